"""Messages and commands of a chat in a terminal or pipe."""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import jaxkv
from models.chat import chat as edits
from models.chat.chat import Chat, has_states
from models.chat.conversation import ChatError, Turn
from models.chat.room import cells_of, slide
from models.chat.saved import load, save
from models.chat.speaker import Speaker
from models.cli.interrupts import defer_interrupts
from models.cli.prompts import warn_of_control
from models.cli.report import longest_of, rate
from models.cli.screen import brief, megabytes, note, plain, plural, progress, put


@dataclass
class Talk:
    """A chat and the state of its user interface.

    chat: current value of the chat.
    attempts: for each conversation, the number of earlier answers to its last message.
    interrupted: whether the last answer was interrupted.
    answering: function that returns a context manager; each answer runs inside of such a context.
    """

    speaker: Speaker
    chat: Chat
    attempts: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False
    answering: Callable[[], AbstractContextManager] = nullcontext

    def take(self, line: str) -> None:
        """Handle a line of input: run a command, or answer a message.

        Raises `ChatError` if the command is not possible; no conversation is then changed. Raises
        `ModelError` if the template rejects the message.
        """
        if not line.startswith("/"):
            self.say(line)
            return
        word, _, rest = line.partition(" ")
        if word not in COMMANDS:
            raise ChatError(
                f"no command {plain(word)}: /help lists them; a message may begin with a space."
            )
        command, rest = COMMANDS[word], rest.strip()
        if rest and not command.takes:
            raise ChatError(f"expected no argument, got {rest!r}; leave it out.")
        if command.takes == "FILE" and not rest:
            raise ChatError(f"expected a file name, got none; {word} FILE.")
        command.run(self, *[rest] * bool(command.takes))

    def say(self, message: str) -> None:
        """Send a message and print the answer."""
        warn_of_control(self.speaker.model, [message], chat=True)
        self.chat = self.speaker.ask(self.chat, message)
        self.answer(attempt=0)

    def answer(self, *, attempt: int) -> None:
        """Answer the last message and print the text as it grows; an interrupt ends the answer."""
        self.attempts[self.chat.current] = attempt
        with self.answering(), defer_interrupts() as was_interrupted, progress("reading") as read:
            self.chat = self.speaker.answer(
                self.chat, attempt=attempt, on_read=read, on_text=show, stopped=was_interrupted
            )
            self.interrupted = was_interrupted()
        put("\n", flush=True)
        if self.chat.spent.removed_tokens:
            removed = plural(self.chat.spent.removed_tokens, "token")
            note(f"note: the cache was full: {removed} of the oldest turns were removed")
        self.note_finish(self.chat.now.turns[-1])
        length, longest = self.chat.num_cached, longest_of(self.speaker.model)
        if length > longest:
            note(f"note: {length:,} tokens; the longest text of the model has {longest:,}")

    def note_finish(self, turn: Turn) -> None:
        """Print the reason why an answer ended, unless it ended with a stop token."""
        if turn.finish == "full":
            used, cells = cells_of(self.chat.without_prefixes)
            answer = "the answer is incomplete" if turn.answer else "there is no answer"
            slides = "" if has_states(self.chat.cache) else "/slide, "
            note(f"note: the cache is full, {used:,} of {cells:,} cells; {answer}")
            note(f"To free cells: {slides}/drop NAME or /undo; then /retry.")
            note("Or /save FILE, and start chat --load FILE with more --cells.")
        elif turn.finish == "length":
            note(f"note: the answer reached --max-tokens, {self.speaker.max_tokens:,}")
        elif turn.finish == "interrupted":
            note("note: the answer was interrupted; /retry generates another")
        elif turn.finish == "no token":
            note("note: every next token has probability 0")
        elif turn.finish == "nonfinite logits":
            note("note: the logits contain NaN or infinity, so no token can be sampled")

    def describe(self) -> str:
        """Return a line of text about the current conversation."""
        conversation = self.chat.now
        line = f"{self.chat.current}: {plural(len(conversation.turns), 'turn')}"
        if not conversation.turns:
            return line
        return f"{line}, the last one: {brief(conversation.turns[-1].message)}"


@dataclass(frozen=True)
class Command:
    """A command of the chat.

    takes: name of the argument; "" for no argument, which `run` then does not get.
    run: function of a `Talk` and the argument.
    """

    takes: str
    help: str
    run: Callable[..., None]


def show(piece: str) -> None:
    """Print a piece of an answer."""
    put(plain(piece), flush=True)


def undo(talk: Talk) -> None:
    """Remove the last turn."""
    turn = talk.chat.now.turns[-1:]
    talk.chat, why = edits.undo(talk.chat)
    talk.attempts.pop(talk.chat.current, None)
    note(f"removed: {brief(turn[0].message)}")
    _note_lost(talk, why)


def retry(talk: Talk) -> None:
    """Answer the last message again."""
    before = talk.chat.now.turns[-1:]
    talk.chat, why = edits.retract_answer(talk.chat)
    _note_lost(talk, why)
    again = talk.attempts.get(talk.chat.current, 0) + bool(before[0].answer)
    if talk.speaker.greedy and before[0].finish == "stop":
        note("note: at temperature 0 the same message has the same answer")
    talk.answer(attempt=again)


def fork(talk: Talk, rest: str) -> None:
    """Copy the current conversation to a new conversation with the name `rest`."""
    talk.chat = talk.speaker.settle(talk.chat)  # it donates the buffers, also if the fork fails
    talk.chat = edits.fork(talk.chat, rest)
    note(f"{rest}: a fork of {talk.chat.current}; to continue the fork, /switch {rest}")


def switch(talk: Talk, rest: str) -> None:
    """Switch to another conversation."""
    talk.chat = edits.switch(talk.chat, rest)
    note(talk.describe())


def drop(talk: Talk, rest: str) -> None:
    """Remove a conversation."""
    name = rest or talk.chat.current
    talk.chat = edits.drop(talk.chat, name)
    talk.attempts.pop(name, None)
    note(f"{name}: " + ("emptied" if name == talk.chat.current else "removed"))


def slide_now(talk: Talk) -> None:
    """Remove the oldest turns."""
    before = talk.chat.now.gap
    talk.chat = slide(talk.chat)
    note(f"removed {plural(talk.chat.now.gap - before, 'token')} of the oldest turns")


def draw(talk: Talk) -> None:
    """Print the cache table of all conversations."""
    names = {conversation.sequence: name for name, conversation in talk.chat.conversations.items()}
    width = shutil.get_terminal_size((100, 24)).columns
    put(jaxkv.show(talk.chat.without_prefixes, width=width) + "\n")
    put("owner " + ", ".join(f"{seq} is {names[seq]}" for seq in sorted(names)) + "\n", flush=True)


def stats(talk: Talk) -> None:
    """Print the used cells, counts of tokens, and speeds."""
    chat, spent = talk.chat, talk.chat.spent
    used, cells = cells_of(chat.without_prefixes)
    kept = cells_of(chat.cache)[0] - used
    lines = [
        f"{talk.describe()}",
        f"{plural(len(chat.now.tokens), 'token')}, {chat.now.place(chat.num_cached):,} of them in "
        "the cache" + f", {chat.now.gap:,} removed" * bool(chat.now.gap),
        f"cache: {used:,} of {cells:,} cells used, {megabytes(chat.cache.nbytes)}, "
        f"{len(chat.conversations)} of {plural(chat.seats, 'conversation')}",
        f"stored prefixes: {len(chat.store.prompts)} of {len(chat.store.sequences):,}, "
        f"{plural(kept, 'more cell')}",
        f"computed: {plural(chat.computed, 'token')}, and {chat.reused:,} reused from prefixes",
    ]
    if spent.answer_tokens:
        lines.append(
            f"last answer: {rate(spent.answer_tokens, spent.answer_seconds)}, after "
            f"{rate(spent.prompt_tokens, spent.prompt_seconds)}"
        )
    put("\n".join(lines) + "\n", flush=True)


def save_all(talk: Talk, rest: str) -> None:
    """Save all conversations to a file."""
    path = os.path.expanduser(rest)
    save(path, talk.chat, talk.speaker.model)
    count = plural(len(talk.chat.conversations), "conversation")
    note(f"saved {count} in {rest}, {megabytes(os.path.getsize(path))}")


def load_all(talk: Talk, rest: str) -> None:
    """Replace all conversations by the conversations in a file."""
    talk.chat = load(os.path.expanduser(rest), talk.chat, talk.speaker.model)
    talk.attempts.clear()
    names = ", ".join(map(plain, talk.chat.conversations))
    note(f"loaded {plural(len(talk.chat.conversations), 'conversation')}: {names}")
    note(talk.describe())


def help_all(talk: Talk) -> None:
    """List the commands."""
    del talk
    lines = [f"{f'{word} {command.takes}':<16}{command.help}" for word, command in COMMANDS.items()]
    put("\n".join(lines) + "\n", flush=True)


COMMANDS = {
    "/undo": Command("", "remove the last turn", undo),
    "/retry": Command("", "answer the last message again", retry),
    "/fork": Command("NAME", "copy the conversation under another name", fork),
    "/switch": Command("NAME", "continue another conversation", switch),
    "/drop": Command("[NAME]", "remove a conversation, or empty the current one", drop),
    "/slide": Command("", "remove the oldest turns of this conversation", slide_now),
    "/show": Command("", "draw the cache: owners and positions of cells", draw),
    "/stats": Command("", "print used cells, computed tokens and speed", stats),
    "/save": Command("FILE", "write all conversations to a file", save_all),
    "/load": Command("FILE", "replace all conversations by those in a file", load_all),
    "/help": Command("", "list the commands", help_all),
}
"""Commands by name."""


def _note_lost(talk: Talk, why: str) -> None:
    if why:
        count = plural(len(talk.chat.now.tokens) - talk.chat.num_cached, "token")
        note(f"note: {why}: {count} will be computed again with the next answer")
