"""The command `chat` as it is used: by a pipe, by keys, and in a terminal of its own.

The model is a tiny one without meaning, out of a folder, whose tokens are letters.
"""

import io
import os
import re
import signal
import subprocess
import sys

import pexpect
import pytest
import tokenizers
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import models
from models.cli import generate
from models.cli.main import main
from models.cli.screen import plain
from models.cli.terminal import Terminal
from tests.models.tiny_files import CONFIG, VOCAB, tiny_tensors, write_folder

pytestmark = pytest.mark.nightly

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789:;.Ġ"
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that takes long texts, and has a tokenizer and a template."""
    folder = tmp_path_factory.mktemp("model")
    ids = {letter: i for i, letter in enumerate(LETTERS)}
    assert len(ids) == VOCAB
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    config = CONFIG | {"max_position_embeddings": 65536, "eos_token_id": None}
    tensors = {name: one for name, one in tiny_tensors().items() if not name.endswith(".bias")}
    write_folder(folder, tensors, config, tokenizer_config={"chat_template": TEMPLATE})
    inner.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


@pytest.fixture
def chat(folder, model, monkeypatch, capsys):
    """Run the command with lines on stdin; the exit code, stdout and stderr.

    The model is loaded once, since what is compiled for it lives as long as it does.
    """
    load = generate.load

    def loaded(name, **options):
        alone = name == str(folder) and options["mesh"] is None and not options["cache_dtype"]
        return model if alone else load(name, **options)

    monkeypatch.setattr(generate, "load", loaded)

    def chat(text, *options):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        fixed = ["--model", folder, "--temperature", 0, "--cells", 96, "--ubatch-size", 32]
        fixed += ["--max-tokens", 5]
        status = main(["chat", *map(str, [*fixed, *options])])
        return status, *capsys.readouterr()

    return chat


# ---------------------------------------------------------------------------------------- a pipe


def test_each_line_of_a_pipe_is_a_turn(chat):
    status, out, err = chat("hello\n\nand you\n")
    assert status == 0 and "\x1b" not in out + err
    answers = out.splitlines()
    assert len(answers) == 2 and all(re.fullmatch("[a-z0-9:;. ]+", one) for one in answers)
    assert err.count("note: the answer has --max-tokens, 5, and ends there") == 2
    assert "Enter sends" not in err


def test_commands_in_a_pipe(chat, tmp_path):
    """Answers are those of a conversation that never left: what was undone left nothing."""
    plainly = chat("one\ntwo\n")[1].splitlines()
    file = tmp_path / "chat.safetensors"
    talk = f"one\n/fork b\nelse\n/undo\n/switch b\n/save {file}\n/stats\n/show\n"
    status, out, err = chat(talk)
    assert (status, out.splitlines()[0]) == (0, plainly[0])
    for line in (
        "b: a fork of main, which goes on; /switch b goes there",
        "took back: else",
        "b: 1 turn, the last one: one",
    ):
        assert line in err.splitlines()
    assert re.search(r"^saved 2 conversations in .*, 0\.\d MB$", err, re.M)
    assert re.search(r"^memory: 13 of 96 cells used, 0\.\d MB, 2 of 4 conversations$", out, re.M)
    assert "kept: 1 of 8 texts, 9 cells more" in out.splitlines()
    assert re.search(r"^owner +\+ +\.$", out, re.M) and "owner 0 is main, 1 is b" in out

    status, out, err = chat("two\n/stats\n", "--load", file)
    assert (status, out.splitlines()[0]) == (0, plainly[1])
    assert "loaded 2 conversations: main, b" in err and "b: 1 turn, the last one: one" in err
    # Of the new turn alone: 9 and 4, of which the template's 3 were kept, with what was undone.
    assert "computed: 10 tokens in all, and 3 found in what was kept" in out


def test_a_mesh_of_devices_talks_as_one_does(chat, tmp_path):
    """What is said, held, kept and computed, but for how long it took."""
    talk = "one\n/fork b\nelse\n/retry\n/undo\n/switch b\ntwo\n/undo\nthree\n/show\n/stats\n"
    told = [chat(talk, *options)[1] for options in ((), ("--mesh", "data=1,tensor=2"))]
    one, several = (re.sub(r"last answer: .*", "", out) for out in told)
    assert one == several and "found in what was kept" in one
    status, _, err = chat(f"one\n/save {tmp_path / 'chat'}\n", "--mesh", "tensor=2")
    assert status == 2 and "one on a mesh is saved and restored by Orbax" in err


def test_a_chat_in_8_bits_goes_on_in_8_bits_alone(chat, tmp_path):
    file, small = tmp_path / "chat.safetensors", ("--cache-dtype", "int8")
    status, out, _ = chat(f"one\n/save {file}\ntwo\n", *small)
    assert status == 0 and file.stat().st_size
    status, again, _ = chat("two\n", "--load", file, *small)
    assert (status, again.splitlines()[0]) == (0, out.splitlines()[1])
    status, _, err = chat("two\n", "--load", file)
    assert status == 2 and re.search("cannot be loaded: .*int8", err), err


def test_another_answer_is_drawn_anew(chat):
    """It is the one that the next seed gives."""
    drawn = "--temperature", 30, "--top-k", 0, "--top-p", 1, "--min-p", 0
    out = chat("one\n/retry\n", *drawn)[1].splitlines()
    assert len(set(out)) == 2 and out[1:] == chat("one\n", *drawn, "--seed", 1)[1].splitlines()
    _, out, err = chat("one\n/retry\n", "--max-tokens", 2)
    assert len(set(out.splitlines())) == 1


def test_a_full_memory_says_what_can_be_done(chat):
    long = "a" * 80
    status, out, err = chat(f"{long}\n/slide\n/retry\n/stats\n", "--max-tokens", 30)
    assert status == 0
    assert "the memory is full, 96 of 96 cells; the answer ends there\nTo make room: /slide" in err
    assert re.search(r"^\d+ tokens of the oldest turns are forgotten$", err, re.M)
    assert re.search(r"in the memory, \d+ forgotten$", out, re.M)
    status, out, err = chat(f"{long}\n{long}\n", "--max-tokens", 30, "--on-full", "slide")
    assert status == 0 and len(out.splitlines()[1]) == 30
    assert re.search(r"note: the memory was full: \d+ tokens of the oldest turns", err)


def test_help_names_every_command(chat):
    _, out, _ = chat("/help\n")
    assert len(out.splitlines()) == 11 and out.startswith("/undo ")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("/nope\n", (), "no command /nope: /help lists them"),
        ("/undo\n", (), "nothing has been said yet in this conversation."),
        ("/undo now\n", (), "this command takes nothing, got 'now'."),
        ("/save\n", (), "a file is wanted: /save FILE."),
        ("/switch x\n", (), "there is no conversation x; there are main."),
        ("/load /nowhere/x\n", (), "/nowhere/x cannot be read: No such file or directory."),
        ("", ("--load", "/nowhere/x"), "/nowhere/x cannot be read: No such file"),
        ("", ("--load", "x", "--system", "y"), "--system is for a new conversation"),
        ("", ("--load", "x", "--mesh", "tensor=2"), "--load does not go with --mesh"),
        ("", ("--conversations", 0), "--conversations: wanted a whole number from 1"),
        ("", ("--on-full", "guess"), "--on-full: invalid choice: 'guess'"),
    ],
)
def test_what_cannot_be_done_ends_a_pipe_with_a_sentence(chat, text, options, message):
    status, out, err = chat(text, *options)
    assert (status, out) == (2, "") and err.splitlines()[-1].startswith("error: ")
    assert message in err.splitlines()[-1]


def test_a_message_may_begin_with_a_slash_after_a_space(chat):
    status, out, _ = chat(" /undo\n")
    assert status == 0 and len(out.splitlines()) == 1


def test_a_model_without_a_template_says_so(chat, folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    status, out, err = chat("hello\n", "--model", tmp_path)
    assert (status, out) == (2, "") and "has no chat template" in err.splitlines()[-1]


def test_what_moves_a_cursor_is_left_out():
    assert plain("a\x1b[31mb\r\x07\tc\n\x9b2J\x7f") == "a[31mb\tc\n2J"


# ------------------------------------------------------------------------------------------ keys


@pytest.fixture
def keys(monkeypatch, tmp_path):
    """What a terminal gives for keys, one line after another."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def keys(pressed, count=1):
        with create_pipe_input() as pipe, create_app_session(pipe, DummyOutput()):
            pipe.send_text(pressed)
            terminal = Terminal({"/switch": lambda: ["main", "b"], "/save": None})
            return [terminal.read("main") for _ in range(count)]

    return keys


def test_lines_and_keys(keys, tmp_path, capsys):
    assert keys("hello\r") == ["hello"]
    assert keys("one\x1b\rtwo\r") == ["one\ntwo"]  # Alt+Enter
    assert keys("\x1b[200~one\ntwo\x1b[201~\r") == ["one\ntwo"]  # pasted
    assert keys("thrown away\x03kept\r") == ["kept"]  # Ctrl-C
    assert capsys.readouterr().err == ""
    assert keys("\x03on\r") == ["on"] and capsys.readouterr().err == "Ctrl-D ends the chat\n"
    with pytest.raises(EOFError):
        keys("\x04")
    assert keys("\x1b[A\r") == ["on"]  # from the history of those before
    history = next(tmp_path.rglob("chat_history"))
    assert "+one\n+two\n" in history.read_text() and history.stat().st_mode & 0o77 == 0


def test_tab_completes_commands_names_and_files(keys, tmp_path):
    (tmp_path / "only.safetensors").touch()
    assert keys("/sw\t b\t\r") == ["/switch b"]
    assert keys(f"/save {tmp_path}/only\t\r") == [f"/save {tmp_path}/only.safetensors"]
    assert keys("a message\t\r") == ["a message"]


def test_a_history_that_cannot_be_kept_is_noted(keys, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert keys("hello\r") == ["hello"]
    assert "note: no history is kept: " in capsys.readouterr().err


# ------------------------------------------------------------------------------------ a terminal


@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # it execs at once
def test_a_talk_in_a_terminal(folder, tmp_path):
    """A process of its own: lines, Ctrl-C in an answer, undo, fork, switch, save, Ctrl-D."""
    file = tmp_path / "chat.safetensors"
    env = os.environ | {
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "XDG_STATE_HOME": str(tmp_path),
    }
    command = ["-m", "models", "chat", "--model", str(folder), "--temperature", "0"]
    command += ["--cells", "30000", "--max-tokens", "20000"]
    with pexpect.spawn(sys.executable, command, env=env, encoding="utf-8", timeout=60) as one:
        one.setwinsize(24, 80)

        def say(line, wanted):
            one.send(line + "\r")
            one.expect(wanted)
            return one.before

        one.expect("/help lists the commands.")
        one.expect("main>")
        one.send("one\x1b\rtwo\r")
        one.expect("[a-z0-9]{20}")  # the answer is being made
        one.sendintr()
        one.sendintr()  # one too many
        one.expect("note: the answer ends there and stays as it is; /retry for another")
        one.expect("main>")
        assert re.search("last one: one two", say("/stats", "computed: "))
        one.expect("main>")
        say("/fork b", "b: a fork of main")
        say("/switch b", "b: 1 turn, the last one: one two")
        one.expect("b>")
        say("/undo", "took back: one two")
        say("/undo", "error: nothing has been said yet")
        say("/switch main", "main: 1 turn, the last one: one two")
        say(f"/save {file}", "saved 2 conversations in ")
        one.expect("main>")
        one.sendeof()
        one.expect(pexpect.EOF)
    assert one.exitstatus == 0

    command[-4:] = ["--load", str(file), "--cells", "30000", "--max-tokens", "5"]
    done = subprocess.run(
        [sys.executable, *command], input="go on\n/stats\n", env=env, capture_output=True, text=True
    )
    assert done.returncode == 0 and "main: 2 turns, the last one: go on" in done.stdout
    assert re.search(r"^computed: 1\d tokens in all, and 0 found", done.stdout, re.M)
    assert "\x1b" not in done.stdout + done.stderr


def test_an_interrupt_of_a_pipe_ends_it(folder):
    command = [sys.executable, "-m", "models", "chat", "--model", str(folder), "--temperature", "0"]
    command += ["--cells", "60000", "--max-tokens", "50000"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as one:
        one.stdin.write("hello\nnever\n")
        one.stdin.flush()
        assert len(one.stdout.read(10)) == 10
        one.send_signal(signal.SIGINT)
        out, err = one.communicate(timeout=120)
    assert one.returncode == 130 and "Traceback" not in err
    assert out.count("\n") == 1 and "the answer ends there and stays" in err
