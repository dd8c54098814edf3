"""The command line in this process, on a tiny model of letters; its output as text."""

import io
import json
import re
import shlex
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import tokenizers

import models
from models.cli import generate
from models.cli.main import main
from tests.models.tiny_files import CONFIG, DATA, VOCAB, tiny_tensors, write_folder

LETTERS = [*"abcdefghijklmnopqrstuvwxyz0123456789:;Ġ", "<e>"]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"

# Output that differs between runs, machines and versions, and its placeholders.
MASKS = [
    (r"\d+\.\d s$", "# s"),
    (r"[\d.,]+/s", "#/s"),
    (r"(compil\w+) \d+ program", r"\1 # program"),
    (r"the device has [\d.,]+ GB", "the device has # GB"),
    (r"\(choose from .*\)", "(choose from #)"),
    (r"safetensors cannot read \(.*?\)", "safetensors cannot read (#)"),
    (r'("logprob": -\d+\.\d{4})\d+', r"\1#"),
    (r"\b(?=[0-9]*[a-f])[0-9a-f]{12,16}\b", "#"),
]


@pytest.fixture(scope="session")
def letters(tmp_path_factory):
    """The folder of a model that takes long texts, and has a tokenizer and a template."""
    folder = tmp_path_factory.mktemp("letters")
    ids = {letter: i for i, letter in enumerate(LETTERS)}
    assert len(ids) == VOCAB
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    inner.add_special_tokens(["<e>"])
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    config = CONFIG | {"max_position_embeddings": 65536, "eos_token_id": None}
    tensors = {name: one for name, one in tiny_tensors().items() if not name.endswith(".bias")}
    write_folder(folder, tensors, config, tokenizer_config={"chat_template": TEMPLATE})
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def letters_model(letters):
    return models.load(letters)


@pytest.fixture
def command(letters, letters_model, tmp_path, monkeypatch, capsys):
    """Run the command line in a folder with models; return the exit code, stdout and stderr.

    `letters` is loaded once, since its compiled programs live as long as the model.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for name, folder in (("letters", letters), ("data", DATA)):
        (tmp_path / name).symlink_to(folder)
    load = generate.load

    def loaded(name, **options):
        plain = options["mesh"] is None and not options["cache_dtype"]
        return letters_model if name == "letters" and plain else load(name, **options)

    monkeypatch.setattr(generate, "load", loaded)

    def command(*arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return main([str(one) for one in arguments]), *capsys.readouterr()

    return command


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def transcript(text, command):
    """Run the `$` lines of a transcript again; return the transcript with their output.

    After such a line come its stdin (`<`), stdout (`1`), stderr (`2`) and, unless it is 0, its exit
    code (`=`).
    """
    lines = text.splitlines()
    found = []
    for i, line in enumerate(lines):
        if not line.strip() or line.startswith("#"):
            found.append(line)
        if not line.startswith("$ "):
            continue
        stdin = [*takewhile(lambda line: line.startswith("<"), lines[i + 1 :])]
        said = "".join(line[2:] + "\n" for line in stdin)
        status, out, err = command(*shlex.split(line[2:]), stdin=said)
        found += [line, *stdin]
        for stream, printed in (("1", out), ("2", err)):
            printed = printed.replace(f"{Path.cwd()}/", "")
            for mask, instead in MASKS:
                printed = re.sub(mask, instead, printed, flags=re.M)
            ended = printed.removesuffix("\n")
            if ended:
                found += [f"{stream} {x}".rstrip(" ") for x in ended.split("\n")]
            if printed and printed == ended:
                found[-1] += "(no end of line)"
        found += [f"= {status}"] if status else []
    return "\n".join(found) + "\n"
