"""The command `inspect`: what it says of files is what is in them, and of others one sentence."""

import json
import re
import sys
from pathlib import Path

import pytest

import jaxkv
import models
from jaxkv import prefix, snapshot
from models.chat.chat import MAIN, Chat
from models.chat.conversation import Conversation
from models.chat.saved import save
from models.cli.main import main
from models.text.turns import Frame
from tests.models.tiny_files import tiny_tensors, write_gguf

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def inspect(capsys):
    """Run the command; the exit code, stdout and stderr."""

    def inspect(*options):
        status = main(["inspect", *map(str, options)])
        return status, *capsys.readouterr()

    return inspect


@pytest.fixture(scope="module")
def hybrid():
    return models.load(DATA / "granite_hybrid")


@pytest.fixture
def saved(hybrid, tmp_path):
    """A chat of two conversations, one of three tokens, which are also kept."""
    memory = hybrid.make_memory(cells=32, sequences=4)
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch([1, 2, 3])))
    frame = Frame(keep=0, closing=0)
    one = Conversation(sequence=0, frame=frame).ask("Tell me\x1b[2J", [1, 2, 3])
    other = Conversation(sequence=1, frame=frame)
    store = prefix.make_store(memory, holders=[2, 3])
    memory, store, _ = prefix.remember(memory, store, [1, 2, 3], 0)
    chat = Chat(memory=memory, store=store, conversations={MAIN: one, "b": other})
    save(tmp_path / "chat.safetensors", chat, hybrid)
    return tmp_path / "chat.safetensors"


def test_a_chat_tells_what_it_holds(inspect, saved, hybrid):
    status, out, err = inspect(saved, "--json")
    told = json.loads(out)
    assert (status, err, told["is"], told["bytes"]) == (0, "", "snapshot", saved.stat().st_size)
    assert told["model"]["architecture"] == "granitemoehybrid"
    info = snapshot.inspect(saved)
    assert told["memory"]["bytes"] == jaxkv.nbytes(info.memory)
    states, full = told["parts"]
    assert (states["kind"], states["bytes"]) == ("recurrent states", 5632)  # one state
    assert (full["kind"], full["bytes"]) == ("full attention", 3 * 128)  # three tokens
    assert [one["tokens"] for one in told["sequences"]] == [3, 0, 3]
    assert [one["conversation"] for one in told["sequences"]] == ["main", "b", None]
    assert [one["kept"] for one in told["sequences"]] == [False, False, True]


def test_the_page_of_a_chat(inspect, saved):
    status, out, _ = inspect(saved)
    assert status == 0 and max(map(len, out.splitlines()[1:])) <= 80
    for line in (
        r".*chat\.safetensors: a snapshot, version 1, [\d.]+ kB",
        r"model: granitemoehybrid float32 [0-9a-f]{16}",
        r"memory: 4 sequences in 1 stream of 32 cells, [\d.]+ kB when it is loaded",
        r"full attention +1 +384",
        r"0 +3  main: 1 turn, the last one: Tell me\[2J",  # without what clears a screen
        r"1 +0  b: 0 turns",
        r"2 +3  kept, to be gone back to",
    ):
        assert re.search(f"^{line}$", out, re.M), (line, out)


def test_a_snapshot_of_anything(inspect, tmp_path):
    memory = jaxkv.make_kv_cache(
        layers=2, cells=9, kv_heads=1, head_dim=2, window=jaxkv.window.sliding(4), dtype="bfloat16"
    )
    memory = jaxkv.apply(memory, jaxkv.init_batch(memory, jaxkv.make_batch([1, 2])))
    snapshot.save(tmp_path / "one", memory)
    status, out, _ = inspect(tmp_path / "one")
    assert status == 0 and "model: one without a name" in out
    assert re.search(r"^window of 4 +2 +32$", out, re.M)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "mamba2"])
def test_a_folder_needs_its_config_alone(inspect, tmp_path, name):
    (tmp_path / "config.json").symlink_to(DATA / name / "config.json")
    status, out, _ = inspect(tmp_path, "--json")
    told, model = json.loads(out), models.load(DATA / name)
    assert (status, told["weights"], told["architecture"]) == (
        0,
        model.size,
        model.checkpoint.architecture,
    )
    assert sum(part["layers"] for part in told["parts"]) == model.checkpoint.layers()
    assert (told["vocabulary"], told["template"]) == (None, False)


def test_a_gguf_file(inspect, tmp_path):
    tensors = {name: one for name, one in tiny_tensors().items() if not name.endswith(".bias")}
    status, out, _ = inspect(write_gguf(tmp_path / "tiny.gguf", tensors))
    assert status == 0 and "texts: of at most 128 tokens" in out
    assert re.search(r"^full attention +2 +256 a token$", out, re.M)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "none cannot be read: No such file or directory; give a snapshot, a .gguf"),
        ("empty", b"", "empty cannot be inspected: wanted a snapshot, got the empty file"),
        ("text", b"not at all", "cannot be inspected: wanted a snapshot, got what cannot be read"),
        ("text.gguf", b"not at all", "is not a GGUF file"),
        ("cut", b"GGUF\x03\0\0\0", "GGUF"),
    ],
)
def test_what_is_neither_is_a_sentence(inspect, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    status, out, err = inspect(tmp_path / name)
    assert (status, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_the_home_of_somebody_who_is_not_there_is_a_sentence(capsys):
    for command in (["inspect"], ["plan", "--model"]):
        assert main([*command, "~no-such-user/file"]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is simulated there alone")
def test_a_full_disk_is_a_sentence(saved, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["inspect", str(saved)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: the output cannot be written: ") and err.count("\n") == 1


def test_streams_that_are_closed_read_nothing_and_lose_what_is_written(saved, monkeypatch):
    names = ("stdin", "stdout", "stderr")
    for name in names:
        monkeypatch.setattr(sys, name, None)
    assert main(["generate", "-"]) == 2  # an empty prompt
    assert main(["inspect", str(saved)]) == 0
    for name in names:
        getattr(sys, name).close()


def test_damage_is_a_sentence(inspect, saved, tmp_path):
    data = saved.read_bytes()
    for place in (40, len(data) // 3):
        (tmp_path / "bent").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        status, out, err = inspect(tmp_path / "bent")
        assert (status, out) == (2, "") and err.count("\n") == 1
        assert "cannot be inspected: wanted " in err
    (tmp_path / "cut").write_bytes(data[:-1])
    assert inspect(tmp_path / "cut")[0] == 2
    assert inspect(DATA / "llama_tied" / "model.safetensors")[2].endswith(
        "it was written by something else than jaxkv.snapshot.\n"
    )


def test_a_chat_whose_notes_lie_is_a_sentence(inspect, saved, hybrid, tmp_path):
    info = snapshot.inspect(saved)
    lies = {**info.notes, "conversations": {"main": {"sequence": 0}}}
    memory = snapshot.load(saved)
    snapshot.save(tmp_path / "lies", memory, tokens=info.tokens, notes=lies)
    status, _, err = inspect(tmp_path / "lies")
    assert status == 2 and "cannot be inspected: " in err
