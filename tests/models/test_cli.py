"""The command line: its output is recorded in tests/data/cli.

RECORD_CLI=1 writes the transcripts again; a new line `$ ...` in one is a new case.
"""

import copy
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv import serving, snapshot
from models.chat import chat as edits
from models.chat.saved import save
from models.chat.speaker import Speaker
from models.cli import modes
from models.cli.arguments import InputError
from models.cli.interrupts import watch_interrupts
from models.cli.main import main
from models.cli.screen import Screen
from models.cli.terminal import Pipe
from models.serving import FINISH
from models.texts import Finish
from tests.helpers.caches import attention_cache
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_batch
from tests.models.command_line import CONFIG, DATA, objects, transcript
from tests.models.speaking import say, tiny
from tests.models.tiny_files import tiny_tensors, write_folder, write_gguf
from tests.snapshot.saved import randomize


@pytest.fixture
def files(tmp_path, letters):
    texts = {"prompts.txt": "a time\n\nonce upon\na little\n", "empty.txt": ""}
    texts |= {"blank.txt": "\n  \n", "text.gguf": "not a model at all"}
    texts |= {"cut_gguf": "GGUF\x03\0\0\0"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    tiny = json.loads((DATA / "llama_tied" / "config.json").read_text())
    big = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2}
    big |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    big |= {"vocab_size": 128256, "tie_word_embeddings": False}
    endless = json.loads((DATA / "t5_tied" / "config.json").read_text())
    configs = {"no_weights": CONFIG, "no_length": endless, "big": tiny | big}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    (tmp_path / "no_template").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "no_template" / name).symlink_to(letters / name)
    return tmp_path


def write_snapshots(folder):
    sizes = dict(layers=2, cells=9, kv_heads=1, head_dim=2, dtype="bfloat16")
    cache = attention_cache(window=jaxkv.Window.sliding(4), **sizes)
    cache = apply_batch(cache, [1, 2])
    path = folder / "window.safetensors"
    snapshot.save(randomize(cache), path=path)
    data = path.read_bytes()
    (folder / "bent_table").write_bytes(data.replace(b"sequences", b"sequencez"))
    (folder / "bent_head").write_bytes(data.replace(b"jaxkv.snapshot", b"jaxkv/snapshot"))
    (folder / "cut").write_bytes(data[:-1])


def write_chat(folder):
    speaker = Speaker(model=tiny("granite_hybrid"), max_tokens=4, ubatch_size=16)
    chat = speaker.begin(conversations=2, cells=64, holders=2)
    chat = edits.fork(say(speaker, chat, "Tell me", "More\x1b[2J"), "b")
    chat = edits.switch(edits.drop(edits.switch(chat, "b"), "b"), "main")
    save(path := folder / "chat.safetensors", chat, speaker.model)
    info = snapshot.inspect(path)
    lies = {**info.notes, "conversations": {"main": {"sequence": 0}}}
    snapshot.save(snapshot.load(path), path=folder / "lies", tokens=info.tokens, notes=lies)


CORE = ["chat", "errors_of_models", "generate", "inspect"]
RECORDED = sorted(file.stem for file in (DATA / "cli").glob("*.txt"))


@pytest.mark.parametrize("name", mark_cases(RECORDED, fast=["errors", "plan"], core=CORE))
def test_command_line_prints_recorded(name, command, files, monkeypatch):
    monkeypatch.setattr("models.cli.plan.limits", lambda devices: iter([10**9, 300_000]))
    if name == "inspect_chat":
        write_chat(files)
    if name == "inspect":
        write_snapshots(files)
        tensors = {name: one for name, one in tiny_tensors().items() if not name.endswith(".bias")}
        write_gguf(files / "tiny.gguf", tensors)
        del tensors["model.norm.weight"]
        write_folder(files / "damaged", tensors, tokenizer=[])
    path = DATA / "cli" / f"{name}.txt"
    recorded = path.read_text()
    found = transcript(recorded, command)
    if os.environ.get("RECORD_CLI"):
        path.write_text(recorded := found)
    assert found == recorded


def test_main_bytes_that_are_no_text_say_so(capsys, monkeypatch):
    assert main(["generate", "\udcff"]) == 2
    assert "the prompt is not valid UTF-8" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi\xff\xfe\n"), "utf-8"))
    with pytest.raises(InputError, match="stdin cannot be read"):
        Pipe().read("main")


def test_main_device_out_of_memory_says_so(command, monkeypatch):
    def no_room(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(modes, "generate_texts", no_room)
    status, _, err = command("generate", "--model", "letters", "once")
    assert status == 2 and "not enough memory" in err and "--cells" in err
    monkeypatch.setattr(modes, "generate_texts", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # unexpected exceptions are raised
        command("generate", "--model", "letters", "once")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk is simulated there alone")
def test_main_full_disk_says_so(files, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["inspect", str(files / "no_weights")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the output cannot be written: ") and err.count("\n") == 1


def test_main_closed_streams_read_and_write_nothing(files, monkeypatch):
    names = ("stdin", "stdout", "stderr")
    for name in names:
        monkeypatch.setattr(sys, name, None)
    assert main(["generate", "-"]) == 2  # an empty prompt
    assert main(["inspect", str(files / "no_weights")]) == 0
    for name in names:
        getattr(sys, name).close()


def test_finish_has_a_word_for_every_end_of_an_engine():
    assert set(FINISH) == set(serving.FinishReason)
    assert set(FINISH.values()) == set(get_args(Finish))


def test_screen_shows_first_text_live_and_others_after_it(capsys):
    screen, seen = Screen(["A", "B"], chat=False), []
    for step in [(1, " b", False), (0, " a", False), (1, "b", True), (0, "a", True)]:
        screen(*step)
        seen.append(capsys.readouterr().out)
    assert seen == ["=== 1 of 2\nA", " a", "", "a\n\n=== 2 of 2\nB bb\n"]


def test_noticed_raises_an_interrupt_that_python_dropped(capfd):
    class Trap:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), watch_interrupts() as check:
        check()
        Trap()  # freed immediately; its exception is dropped
        check()
    assert signal.getsignal(signal.SIGINT) is before
    assert not capfd.readouterr().err


CAUSES = {jnp.nan: "NaN or inf", -jnp.inf: "probability 0"}
ENDS = [*product(CAUSES, ("once", "once --beams 2", "--file prompts.txt"))]


@pytest.mark.parametrize("logit, options", mark_cases(ENDS, core=[ENDS[0], ENDS[2], ENDS[4]]))
def test_generate_without_a_next_token_notes_it_once(
    command, files, letters_model, monkeypatch, options, logit
):
    model, forward = copy.copy(letters_model), letters_model.forward

    def broken(params, step):
        step, logits = forward(params, step)
        return step, jnp.full_like(logits, logit)

    vars(model)["forward"] = broken
    monkeypatch.setattr("models.cli.generate.load", lambda *args, **options: model)
    status, out, err = command("generate", "--json", "--max-tokens", 4, *options.split())
    assert status == 0 and {tuple(one["tokens"]) for one in objects(out)} == {()}
    (line,) = [line for line in err.splitlines() if line.startswith("note: ")]
    assert CAUSES[logit] in line and f"{len(objects(out))} text" in line


LONG = [
    ("generate --max-tokens 4 once", "7 tokens: 1 text ended later"),
    ("chat --max-tokens 5 --cells 96 --ubatch-size 32", "note: 12 tokens; the longest text"),
    ("generate --max-tokens 4 once --beams 2", "7 tokens: 1 text ended later"),
    ("generate --max-tokens 1 --file prompts.txt", "7 tokens: 2 texts ended later"),
]


@pytest.mark.parametrize("line, longer", mark_cases(LONG, core=LONG[:2]))
def test_text_beyond_the_longest_of_the_model_is_noted_once(
    command, files, letters_model, monkeypatch, line, longer
):
    model, checkpoint = copy.copy(letters_model), letters_model.checkpoint
    config = checkpoint.config.updated(max_position_embeddings=7)
    vars(model)["checkpoint"] = replace(checkpoint, config=config)
    monkeypatch.setattr("models.cli.generate.load", lambda *args, **options: model)
    status, _, err = command(*line.split(), "--temperature", 0, stdin="one\n")
    assert status == 0
    (said,) = [said for said in err.splitlines() if "longest text of the model has" in said]
    assert longer in said


@pytest.mark.nightly
def test_generate_file_interrupted_keeps_texts(command, files, monkeypatch):
    looks = iter([False, False, False, True])

    def look():
        if next(looks, False):
            raise KeyboardInterrupt

    options = "--json --file prompts.txt --sequences 1 --max-tokens 12"
    line = shlex.split(f"generate --model letters {options}")
    _, out, _ = command(*line)
    whole = [one["tokens"] for one in objects(out)]
    monkeypatch.setattr("models.cli.main.watch_interrupts", lambda: nullcontext(look))
    status, out, err = command(*line)
    ended, running = objects(out)
    assert (status, ended["finish"], running["finish"]) == (130, "length", "interrupted")
    assert ended["tokens"] == whole[0]
    assert running["tokens"] == whole[1][:9] and running["text"]
    note, summary = err.splitlines()[-2:]
    assert note == "note: interrupted with 1 of 3 prompts done"
    assert summary.startswith("prompts: 1 of 3, 15 tokens | generation: 21 tokens")


@pytest.mark.core
@pytest.mark.parametrize("seconds", [0.1, 0.4, 1.0])
def test_process_interrupted_while_importing_ends_quietly(seconds):
    # A process in the background of a shell inherits that SIGINT is ignored.
    default = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    run = "runpy.run_module('models', run_name='__main__', alter_sys=True)"
    code = f"import runpy, signal; {default}; print('begun', flush=True); {run}"
    command, pipe = [sys.executable, "-c", code, "plan"], subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as one:
        # An earlier signal would interrupt Python before it runs any of our code.
        assert one.stdout and one.stdout.readline() == "begun\n"
        time.sleep(seconds)
        one.send_signal(signal.SIGINT)
        out, err = one.communicate(timeout=120)
    assert (one.returncode, out, err) == (130, "", "\n")


@pytest.mark.nightly
def test_compiled_programs_are_stored_and_damaged_files_are_harmless(letters, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "100"}
    del environment["JAX_COMPILATION_CACHE_DIR"]
    command = [sys.executable, "-m", "models", "generate", "--model", str(letters), "once"]
    command += ["--max-tokens", "1"]  # no program for further tokens
    folder = tmp_path / "jaxkv" / "compiled"

    def run(*arguments, **variables):
        options = {"text": True, "capture_output": True, "check": True}
        return subprocess.run([*command, *arguments], env=environment | variables, **options)

    other = tmp_path / "other"
    off = run("--no-compilation-cache"), run(JAX_COMPILATION_CACHE_DIR=str(other))
    assert not folder.exists() and [*other.glob("*-cache")]
    first = run()
    assert f"compiled programs are stored in {folder}" in first.stderr
    files = {path: path.read_bytes() for path in folder.glob("*-cache")}
    assert any("jit_model_step" in path.name for path in files)
    for path, data in files.items():
        path.write_bytes(data[: len(data) // 2])
    damaged = run()
    assert "Error reading persistent compilation cache" in damaged.stderr
    assert {one.stdout for one in (*off, first, damaged)} == {first.stdout}
