"""Conversations side by side in one cache, as a value, and its edits: each is one verb.

Each conversation has a sequence, and all share the cells of one pool, so a fork copies nothing. The
other sequences are those of a store (`jaxkv.serving.PrefixStore`): what was said before a turn
is kept there, to be gone back to where a window or a state cannot, and for conversations that begin
alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jaxkv
from jaxkv.serving import MissReason, PrefixStore
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
    """Conversations in one cache.

    cache: what the model remembers of them.
    store: what the cache keeps beside them.
    conversations: by name.
    current: the name of the one that goes on.
    computed: how many tokens the model has computed for all of them.
    reused: how many it need not compute, since they were kept.
    spent: what the last answer took.
    """

    cache: jaxkv.Cache
    store: PrefixStore
    conversations: Mapping[str, Conversation]
    current: str = MAIN
    computed: int = 0
    reused: int = 0
    spent: Spent = Spent()

    @property
    def now(self) -> Conversation:
        """The conversation that goes on."""
        return self.conversations[self.current]

    @property
    def seats(self) -> int:
        """How many conversations there may be."""
        return self.cache.table.spec.sequences - len(self.store.sequences)

    @property
    def held(self) -> int:
        """How many of the tokens of the current conversation need not be computed any more."""
        return self.now.index(num_held_tokens(self.cache, self.now.sequence))

    @property
    def without_kept(self) -> jaxkv.Cache:
        """The cache without what is kept beside the conversations, to look at."""
        return jaxkv.seq_rm(self.cache, self.store.sequences)[0]

    def going_on(self, conversation: Conversation, cache: jaxkv.Cache) -> "Chat":
        """Return it with another value of the current conversation, and of the cache."""
        conversations = {**self.conversations, self.current: conversation}
        return replace(self, conversations=conversations, cache=cache)


def spend(chat: Chat, **more: float) -> Chat:
    """Return a chat whose last answer has taken more."""
    spent = {name: getattr(chat.spent, name) + amount for name, amount in more.items()}
    return replace(chat, spent=replace(chat.spent, **spent))


def has_states(cache: jaxkv.Cache) -> bool:
    """Return whether a cache has recurrent states."""
    return cache.table.spec.max_rollback is not None


def num_held_tokens(cache: jaxkv.Cache, sequence: int) -> int:
    """Return how many tokens a sequence holds, what a window let go of included."""
    return int(cache.seq_pos_max(sequence)) + 1


def remember(chat: Chat, length: int) -> Chat:
    """Keep the first tokens of the current conversation, if they can be gone on with.

    Nothing is kept of tokens behind a gap: they were computed when more was seen.
    """
    conversation = chat.now
    if not 0 < length <= conversation.gapless(chat.held):
        return chat
    cache, store, _ = chat.store.store(
        chat.cache, conversation.tokens[:length], conversation.sequence
    )
    return replace(chat, cache=cache, store=store)


def recall(chat: Chat, length: int) -> tuple[Chat, MissReason]:
    """Let the current conversation hold what is kept of its first tokens, where that is more.

    Returns:
      The chat; and why it holds no more of them, if it is fewer than `length`.
    """
    conversation = chat.now
    # Of these the last one is always computed.
    text = conversation.tokens[: conversation.gapless(length) + 1]
    cache, store, hit = chat.store.fork(chat.cache, text, conversation.sequence)
    if (more := hit.length - chat.held) <= 0:
        return chat, hit.miss
    return replace(chat, cache=cache, store=store, reused=chat.reused + more), hit.miss


def use_instructions(chat: Chat) -> Chat:
    """Let what conversations begin with be the last thing to give way."""
    conversation = chat.now
    if not conversation.tokens or not conversation.frame.keep:
        return chat
    begins = conversation.tokens[: conversation.frame.keep + 1]
    forked = chat.store.fork(chat.cache, begins, conversation.sequence)
    return replace(chat, store=forked.store)  # the fork is not taken


def fork(chat: Chat, name: str) -> Chat:
    """Copy the current conversation under another name: `seq_cp`. The current one stays it.

    Raises:
      ChatError: when the name is taken, is no single word, or there are as many as there may be.
    """
    if not name or len(name.split()) != 1:
        raise ChatError("a fork needs a name of one word: /fork NAME.")
    if name in chat.conversations:
        raise ChatError(f"there is a conversation {name} already: /switch {name}, or another name.")
    used_seats = {conversation.sequence for conversation in chat.conversations.values()}
    free = [seat for seat in range(chat.seats) if seat not in used_seats]
    if not free:
        raise ChatError(
            f"there are {chat.seats} conversations, as many as there may be: /drop one, or start "
            f"with --conversations {2 * chat.seats}."
        )
    source, target = chat.now.sequence, free[0]
    cache, _ = jaxkv.seq_cp(chat.cache, source, target)
    forked = replace(chat.now, sequence=target)
    return replace(chat, cache=cache, conversations={**chat.conversations, name: forked})


def switch(chat: Chat, name: str) -> Chat:
    """Go on with another conversation.

    Raises:
      ChatError: when there is none of that name.
    """
    _check_there(chat, name)
    return replace(chat, current=name)


def drop(chat: Chat, name: str) -> Chat:
    """Forget a conversation: `seq_rm` of all of it. The current one begins anew.

    What is kept of it stays until it has to give way, so that one that begins alike need not be
    computed.

    Raises:
      ChatError: when there is none of that name.
    """
    _check_there(chat, name)
    gone = chat.conversations[name]
    cache, _ = jaxkv.seq_rm(chat.cache, gone.sequence)
    conversations = {
        key: conversation for key, conversation in chat.conversations.items() if key != name
    }
    if name == chat.current:
        conversations = {**chat.conversations, name: replace(gone, tokens=(), turns=(), gap=0)}
    return replace(chat, cache=cache, conversations=conversations)


def undo(chat: Chat) -> tuple[Chat, str]:
    """Take the last turn back: `seq_rm` where the cache grants it, else what was kept.

    Returns:
      The chat; and why tokens have to be computed again, nothing if they need not.

    Raises:
      ChatError: when there is no turn.
    """
    _check_turns(chat)
    chat, why = take_back(chat, chat.now.turns[-1].start)
    return chat.going_on(chat.now.undone(), chat.cache), why


def retract_answer(chat: Chat) -> tuple[Chat, str]:
    """Take the last answer back, for another one: the message is said again by the caller.

    What the cache holds of the message stays there, but for its last token, whose logits are the
    beginning of the answer.

    Returns:
      As for `undo`.

    Raises:
      ChatError: when there is no turn.
    """
    _check_turns(chat)
    chat, why = take_back(chat, chat.now.turns[-1].asked - 1)
    return chat.going_on(chat.now.unanswered(), chat.cache), why


def take_back(chat: Chat, length: int) -> tuple[Chat, str]:
    """Take the current conversation back to its first tokens in the cache.

    Args:
      chat: its current conversation has a turn.
      length: how many they are, those before that turn or more.

    Returns:
      The chat, whose cache holds at most `length` of its tokens: all of them where the cache
      grants the cut, else what was kept; and why it lost some from before the turn, nothing if it
      did not.
    """
    cache, conversation = chat.cache, chat.now
    end = conversation.place(length)
    if num_held_tokens(cache, conversation.sequence) <= end:
        return chat, ""
    cut, ok = jaxkv.seq_rm(cache, conversation.sequence, end)
    if ok:
        return replace(chat, cache=cut), ""
    chat = replace(chat, cache=jaxkv.seq_rm(cache, conversation.sequence)[0])
    chat, miss = recall(chat, length)
    # What was kept before the turn lacks the token that was picked last, which was not computed
    # yet; and a short message takes no longer than a token.
    if (
        num_held_tokens(chat.cache, conversation.sequence)
        >= conversation.place(conversation.turns[-1].start) - 1
    ):
        return chat, ""
    return (
        chat,
        f"{' and '.join(_refusals(cache, conversation.sequence, end))}, and {NOT_KEPT[miss]}",
    )


NOT_KEPT = {
    MissReason.NONE: "nothing was kept from there",
    MissReason.UNKNOWN: "nothing was kept of it",
    MissReason.EVICTED: "what was kept from there had to give way",
    MissReason.CONTEXT_EVICTED: "so has what was kept",
    MissReason.INCOMPLETE: "what was kept has lost a passage",
    MissReason.NO_STATE: "no state was kept from there",
}
"""Why the store has no more of a text, as the end of a sentence; there is one stream, so room."""


def _refusals(cache: jaxkv.Cache, sequence: int, end: int) -> list[str]:
    """Say which parts of a cache cannot go back to a position."""
    found = []
    for part in cache.parts:
        if jaxkv.seq_rm(part, sequence, end).ok:
            continue
        if has_states(part):
            found.append("a recurrent state cannot forget what it has seen")
        else:
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
