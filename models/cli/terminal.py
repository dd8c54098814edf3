"""Input of a chat: a terminal with line editing and history, or a pipe."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.shortcuts import CompleteStyle

from models.cli.arguments import InputError
from models.cli.screen import note

Words = Mapping[str, Callable[[], list[str]] | None]
"""For each command, a function that returns completions of its argument; None for file names."""


class Pipe:
    """Source that reads the lines of stdin."""

    interactive = False

    def read(self, name: str) -> str:
        """Return the next line of stdin; raise EOFError at the end. The argument has no effect."""
        del name
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise InputError(f"stdin cannot be read: {error}.") from None
        if not line:
            raise EOFError
        return line.removesuffix("\n")


class Terminal:
    """Source that reads from a terminal: Enter sends, Alt+Enter begins a new line."""

    interactive = True

    def __init__(self, words: Words):
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: Any) -> None:
            event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        self._session = PromptSession(
            history=_history(),
            key_bindings=keys,
            multiline=True,
            prompt_continuation=lambda width, line, wraps: " " * width,
            completer=_Commands(words),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
        )

    def read(self, name: str) -> str:
        """Return the next message; Ctrl-C discards the current line, Ctrl-D raises EOFError.

        The name of the current conversation, `name`, is shown before the line.
        """
        while True:
            try:
                return self._session.prompt(f"{name}> ")
            except KeyboardInterrupt:
                if not self._session.default_buffer.text:
                    note("Ctrl-D ends the chat")


@contextlib.contextmanager
def hide_keys() -> Iterator[None]:
    """Disable the echo of keys during an answer.

    Keys that are pressed during the answer become part of the next line of input.
    """
    try:
        import termios
    except ImportError:  # Windows has no termios, so keys are shown
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class _Commands(Completer):
    """Completer of commands and their arguments."""

    def __init__(self, words: Words):
        self._words, self._files = words, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: Any) -> Iterator[Completion]:
        """Yield completions of the text before the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        word, space, rest = text.partition(" ")
        after = self._words.get(word)
        if not space:
            found, rest = [name for name in self._words if name.startswith(word)], word
        elif word in self._words and after is None:
            yield from self._files.get_completions(Document(rest), complete_event)
            return
        else:
            found = [name for name in (after() if after else []) if name.startswith(rest)]
        for name in found:
            yield Completion(name, start_position=-len(rest))


def _history() -> History:
    """Return the input history of earlier chats; only the user can read the history file."""
    try:
        file = user_state_path("jaxkv", appauthor=False, ensure_exists=True) / "chat_history"
        file.touch(mode=0o600)
    except OSError as error:
        note(f"note: no history is kept: {error.strerror or error}")
        return InMemoryHistory()
    return FileHistory(str(file))
