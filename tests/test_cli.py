"""The command line, on real weights: what it prints, and what it says when something is wrong."""

import json
import re
import subprocess
import sys

import pytest

from models import cli
from tests.golden import golden

STORY = "Once upon a time there was a little"
FRANCE = "The capital of France is"


@pytest.fixture
def run(smollm2, monkeypatch, capsys):
    """Run the command line in this process; the default model is loaded once for all tests."""
    load = cli.load

    def loaded(name, **options):
        return smollm2 if name == "smollm2" else load(name, **options)

    monkeypatch.setattr(cli, "load", loaded)

    def run(*options):
        status = cli.main(["generate", "--max-tokens", "9", *map(str, options)])
        return status, *capsys.readouterr()

    return run


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def recorded(prompt):
    (record,) = [r for r in golden("models")["smollm2"] if r["prompt"] == prompt]
    return record


def test_json_is_one_object_for_each_prompt_in_order(run):
    status, out, err = run("--json", STORY, FRANCE)
    assert status == 0
    for fields, prompt in zip(objects(out), (STORY, FRANCE), strict=True):
        record = recorded(prompt)
        assert fields["prompt"] == prompt
        assert fields["prompt_tokens"] == record["tokens"]
        assert fields["tokens"] == record["greedy"][:9]
        assert record["text"].startswith(fields["text"]) and fields["text"]
        assert fields["finish"] == "length"
    assert "cells" in err and " 0 programs after that" in err


def test_text_is_the_prompt_and_what_follows(run):
    status, out, _ = run(STORY, FRANCE)
    assert status == 0
    first, second = out.split("\n\n", 1)
    assert first.startswith(STORY + " girl named Emma")
    assert second.startswith(FRANCE + " Paris.")


@pytest.mark.slow
def test_sampling_depends_on_the_seed(run):
    texts = {
        seed: objects(run("--json", "--temperature", 1, "--seed", seed, STORY, FRANCE)[1])
        for seed in (1, 2)
    }
    assert texts[1][0]["tokens"] != texts[2][0]["tokens"]
    again = objects(run("--json", "--temperature", 1, "--seed", 1, STORY, FRANCE)[1])
    assert again == texts[1]


@pytest.mark.slow
def test_a_full_cache_ends_the_text_and_says_so(run):
    status, out, err = run("--json", "--cells", 16, STORY, FRANCE)
    assert status == 0
    for fields in objects(out):
        assert fields["finish"] == "full"
        assert fields["tokens"] == recorded(fields["prompt"])["greedy"][: len(fields["tokens"])]
        assert fields["tokens"]
    assert "the cache was full" in err and "--cells" in err


@pytest.mark.slow
def test_chat_goes_through_the_template(run):
    (fields,) = objects(run("--json", "--chat", "Hi")[1])
    assert len(fields["prompt_tokens"]) > 20
    assert fields["prompt"] == "Hi"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["  "], "a prompt is empty"),
        ([STORY, "--cells", "4"], "have 8 tokens and the cache holds 4.*--cells 17"),
        ([STORY, "--model", "/nowhere/model.gguf"], "No model at '/nowhere/model.gguf'"),
        ([STORY, "--top-p", "2"], "top_p must be above 0 and at most 1, got 2.0"),
        ([STORY, "--temperature", "-1"], "temperature must be at least 0, got -1.0"),
    ],
    ids=["empty prompt", "too long", "missing file", "top-p", "temperature"],
)
def test_what_the_user_can_put_right_is_a_sentence(run, options, message):
    status, out, err = run(*options)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert "Traceback" not in err

    assert re.search(message, err), err


def test_a_file_that_is_no_gguf_is_a_sentence(run, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not a model at all")
    status, _, err = run(STORY, "--model", tmp_path / "model.gguf")
    assert status == 2 and "GGUF" in err


def test_without_weights_it_says_how_to_get_them(run, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["generate", STORY]) == 2


@pytest.mark.parametrize(("option", "value"), [("--max-tokens", "0"), ("--cells", "-3")])
def test_numbers_below_one_are_refused(run, capsys, option, value):
    with pytest.raises(SystemExit) as stopped:
        run(option, value, STORY)
    assert stopped.value.code == 2
    assert f"wanted at least 1, got {value}" in capsys.readouterr().err


@pytest.mark.slow
def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "models", "generate", "--json", "--max-tokens", "3", FRANCE],
        capture_output=True,
        text=True,
        check=True,
    )
    (fields,) = objects(done.stdout)
    assert fields["tokens"] == recorded(FRANCE)["greedy"][:3]
