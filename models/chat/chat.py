"""Conversations side by side in one memory, as a value, and its edits: each is one verb.

Each conversation has a sequence, and all share the cells of one pool, so a fork copies nothing.
States cannot be taken apart; where a memory has some, each conversation has a second sequence that
holds those from before its last turn, which is what it can go back to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jaxkv
from jaxkv.hybrid import parts_of
from models.chat.conversation import ChatError, Conversation

MAIN = "main"
"""The name of the conversation that a chat begins with."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What an answer took.

    read: tokens that were computed before it began.
    read_seconds: for them.
    made: tokens of the answer, its stop token included.
    made_seconds: for them.
    slid: tokens that were forgotten for it.
    """

    read: int = 0
    read_seconds: float = 0.0
    made: int = 0
    made_seconds: float = 0.0
    slid: int = 0


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Conversations in one memory.

    memory: what the model remembers of them.
    conversations: by name.
    current: the name of the one that goes on.
    computed: how many tokens the model has computed for all of them.
    spent: what the last answer took.
    """

    memory: jaxkv.Memory
    conversations: Mapping[str, Conversation]
    current: str = MAIN
    computed: int = 0
    spent: Spent = Spent()

    @property
    def now(self) -> Conversation:
        """The conversation that goes on."""
        return self.conversations[self.current]

    @property
    def seats(self) -> int:
        """How many conversations there may be."""
        sequences = self.memory.table.facts.sequences
        return sequences // 2 if has_states(self.memory) else sequences

    @property
    def held(self) -> int:
        """How many of the tokens of the current conversation need not be computed any more."""
        return self.now.index(held_in(self.memory, self.now.sequence))

    def going_on(self, conversation: Conversation, memory: jaxkv.Memory) -> "Chat":
        """Return it with another value of the current conversation, and of the memory."""
        conversations = {**self.conversations, self.current: conversation}
        return replace(self, conversations=conversations, memory=memory)


def spend(chat: Chat, **more: float) -> Chat:
    """Return a chat whose last answer has taken more."""
    spent = {name: getattr(chat.spent, name) + amount for name, amount in more.items()}
    return replace(chat, spent=replace(chat.spent, **spent))


def sequences_for(conversations: int, *, states: bool) -> int:
    """Return the sequences that a memory needs for so many conversations."""
    return conversations * 2 if states else conversations


def has_states(memory: jaxkv.Memory) -> bool:
    """Return whether a memory, or its shapes, has recurrent states."""
    return memory.table.facts.rollback is not None


def held_in(memory: jaxkv.Memory, sequence: int) -> int:
    """Return how many tokens a sequence holds, what a window let go of included."""
    return int(jaxkv.seq_pos_max(memory, sequence)) + 1


def spare_of(chat: Chat, sequence: int) -> int | None:
    """Return the sequence that keeps states to go back to; None where any cut is granted."""
    return sequence + chat.seats if has_states(chat.memory) else None


def fork(chat: Chat, name: str) -> Chat:
    """Copy the current conversation under another name: `seq_cp`. The current one stays it.

    Raises:
      ChatError: when the name is taken, is no single word, or there are as many as there may be.
    """
    if not name or len(name.split()) != 1:
        raise ChatError("a fork needs a name of one word: /fork NAME.")
    if name in chat.conversations:
        raise ChatError(f"there is a conversation {name} already: /switch {name}, or another name.")
    taken = {one.sequence for one in chat.conversations.values()}
    free = [seat for seat in range(chat.seats) if seat not in taken]
    if not free:
        raise ChatError(
            f"there are {chat.seats} conversations, as many as there may be: /drop one, or start "
            f"with --conversations {2 * chat.seats}."
        )
    source, target = chat.now.sequence, free[0]
    memory = jaxkv.seq_cp(chat.memory, source, target)
    if (spare := spare_of(chat, source)) is not None:
        memory = jaxkv.seq_cp(memory, spare, spare_of(chat, target))
    forked = replace(chat.now, sequence=target)
    return replace(chat, memory=memory, conversations={**chat.conversations, name: forked})


def switch(chat: Chat, name: str) -> Chat:
    """Go on with another conversation.

    Raises:
      ChatError: when there is none of that name.
    """
    _check_there(chat, name)
    return replace(chat, current=name)


def drop(chat: Chat, name: str) -> Chat:
    """Forget a conversation: `seq_rm` of all of it. The current one begins anew.

    Raises:
      ChatError: when there is none of that name.
    """
    _check_there(chat, name)
    gone = chat.conversations[name]
    memory, _ = jaxkv.seq_rm(chat.memory, gone.sequence)
    if (spare := spare_of(chat, gone.sequence)) is not None:
        memory, _ = jaxkv.seq_rm(memory, spare)
    left = {key: one for key, one in chat.conversations.items() if key != name}
    if name == chat.current:
        left = {**chat.conversations, name: replace(gone, tokens=(), turns=(), gap=0)}
    return replace(chat, memory=memory, conversations=left)


def keep_states(chat: Chat) -> Chat:
    """Keep the states that the current conversation has now, where it will go back to."""
    spare = spare_of(chat, chat.now.sequence)
    if spare is None:
        return chat
    return replace(chat, memory=jaxkv.seq_select(chat.memory, [chat.now.sequence], [spare]))


def undo(chat: Chat) -> tuple[Chat, str]:
    """Take the last turn back: `seq_rm` where the kind of memory grants it.

    Returns:
      The chat; and why tokens have to be computed again, nothing if they need not.

    Raises:
      ChatError: when there is no turn.
    """
    _check_turns(chat)
    memory, why = taken_back(chat, chat.now.turns[-1].start)
    return chat.going_on(chat.now.undone(), memory), why


def unanswered(chat: Chat) -> tuple[Chat, str]:
    """Take the last answer back, for another one: the message is said again by the caller.

    What the memory holds of the message stays there, but for its last token, whose logits are the
    beginning of the answer.

    Returns:
      As for `undo`.

    Raises:
      ChatError: when there is no turn.
    """
    _check_turns(chat)
    turn = chat.now.turns[-1]
    memory, why = taken_back(chat, turn.asked - 1)
    return chat.going_on(chat.now.unanswered(), memory), why


def taken_back(chat: Chat, length: int) -> tuple[jaxkv.Memory, str]:
    """Take the current conversation back to its first tokens in the memory.

    Returns:
      The memory, which holds at most `length` of its tokens, and as many as its kind grants; and
      why it holds less than it did of them.
    """
    memory, now, spare = chat.memory, chat.now, spare_of(chat, chat.now.sequence)
    end = now.place(length)
    if spare is not None and not end:
        memory, _ = jaxkv.seq_rm(memory, spare)
    if held_in(memory, now.sequence) <= end:
        return memory, ""
    cut, ok = jaxkv.seq_rm(memory, now.sequence, end)
    if ok and jaxkv.can_resume(cut, now.sequence, end):
        return cut, ""
    if spare is not None and 0 < held_in(memory, spare) <= end:
        return jaxkv.seq_select(memory, [spare], [now.sequence]), ""
    why = " and ".join(_refusals(memory, now.sequence, end))
    return jaxkv.seq_rm(memory, now.sequence)[0], why


def _refusals(memory: jaxkv.Memory, sequence: int, end: int) -> list[str]:
    """Say which parts of a memory cannot go back to a position."""
    found = []
    for part in parts_of(memory):
        cut, ok = jaxkv.seq_rm(part, sequence, end)
        if not ok:
            found.append("a recurrent state cannot forget what it has seen")
        elif not jaxkv.can_resume(cut, sequence, end):
            width = part.table.window.width
            found.append(f"a window of {width:,} has let go of what it would see")
    return found


def _check_there(chat: Chat, name: str) -> None:
    if name not in chat.conversations:
        names = ", ".join(chat.conversations)
        raise ChatError(f"there is no conversation {name or 'without a name'}; there are {names}.")


def _check_turns(chat: Chat) -> None:
    if not chat.now.turns:
        raise ChatError("nothing has been said yet in this conversation.")
