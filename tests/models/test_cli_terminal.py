"""The command `chat` in a terminal: keys, completion, history, and a whole conversation."""

import os
import sys

import pexpect
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from models.cli.terminal import Terminal


@pytest.fixture
def keys(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def keys(pressed):
        with create_pipe_input() as pipe, create_app_session(pipe, DummyOutput()):
            pipe.send_text(pressed)
            return Terminal({"/switch": lambda: ["main", "b"], "/save": None}).read("main")

    return keys


@pytest.mark.core
def test_terminal_keys_edit_send_and_end(keys, tmp_path, capsys):
    assert keys("hello\r") == "hello"
    assert keys("one\x1b\rtwo\r") == "one\ntwo"  # Alt+Enter
    assert keys("\x1b[200~one\ntwo\x1b[201~\r") == "one\ntwo"  # pasted
    assert keys("thrown away\x03kept\r") == "kept"  # Ctrl-C
    assert capsys.readouterr().err == ""
    assert keys("\x03on\r") == "on" and capsys.readouterr().err == "Ctrl-D ends the chat\n"
    with pytest.raises(EOFError):
        keys("\x04")
    assert keys("\x1b[A\r") == "on"  # from earlier history
    history = next(tmp_path.rglob("chat_history"))
    assert "+one\n+two\n" in history.read_text() and history.stat().st_mode & 0o77 == 0


@pytest.mark.core
def test_terminal_tab_completes_and_no_history_is_noted(keys, tmp_path, monkeypatch, capsys):
    (tmp_path / "only.safetensors").touch()
    assert keys("/sw\t b\t\r") == "/switch b"
    assert keys(f"/save {tmp_path}/only\t\r") == f"/save {tmp_path}/only.safetensors"
    assert keys("a message\t\r") == "a message"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert keys("hello\r") == "hello" and "note: no history is kept: " in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")  # execs immediately
def test_chat_in_terminal_takes_keys_and_commands(letters, tmp_path):
    env = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    env["XDG_STATE_HOME"] = str(tmp_path)
    command = ["-m", "models", "chat", "--model", str(letters), "--temperature", "0"]
    command += ["--cells", "30000", "--max-tokens", "20000"]
    with pexpect.spawn(sys.executable, command, env=env, encoding="utf-8", timeout=60) as one:
        one.setwinsize(24, 80)
        one.expect("/help lists the commands.")
        one.expect("main>")
        one.send("one\x1b\rtwo\r")
        one.expect("[a-z0-9]{20}")  # during the answer
        one.sendintr()
        one.sendintr()  # one too many
        one.expect("note: the answer was interrupted; /retry generates another")
        one.expect("main>")
        for line, wanted in [
            ("/fork b", "b: a fork of main"),
            ("/switch b", "b: 1 turn, the last one: one two"),
            ("/undo", "removed: one two"),
            (f"/save {tmp_path / 'chat.safetensors'}", "saved 2 conversations in "),
        ]:
            one.send(line + "\r")
            one.expect(wanted)
        one.expect("b>")
        one.sendeof()
        one.expect(pexpect.EOF)
    assert one.exitstatus == 0
