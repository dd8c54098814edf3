"""Conversations in one cache, as an immutable value, and functions that edit them.

Each conversation has a sequence of the cache. All conversations share the cells of one stream, so a
fork copies no cells. The remaining sequences belong to a prefix store
(`jaxkv.serving.PrefixStore`). The store contains prefixes of conversations, such as all tokens
before a turn. If the cache cannot roll back a conversation, the cached tokens of the conversation
are replaced by a stored prefix. Conversations with a common prefix use the same stored prefix.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jaxkv
from jaxkv.serving import MissReason, PrefixStore
from models.chat.conversation import ChatError, Conversation

MAIN = "main"
"""Name of the first conversation."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Time and numbers of tokens of the last answer.

    prompt_tokens: number of tokens that were computed before the answer.
    prompt_seconds: time from the call of `Speaker.answer` to the beginning of the answer.
    answer_tokens: number of tokens of the answer, including the stop token.
    answer_seconds: time of the answer.
    removed_tokens: number of tokens that `models.chat.room.slide` removed to free cells.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    answer_tokens: int = 0
    answer_seconds: float = 0.0
    removed_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Conversations in one cache.

    store: prefixes stored in sequences that belong to no conversation.
    conversations: conversations by name.
    current: name of the current conversation.
    computed: number of tokens computed for all conversations.
    reused: number of tokens found in the prefix store instead of being computed again.
    spent: time and numbers of tokens of the last answer.
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
        """The current conversation."""
        return self.conversations[self.current]

    @property
    def seats(self) -> int:
        """Largest number of conversations."""
        return self.cache.table.spec.sequences - len(self.store.sequences)

    @property
    def num_cached(self) -> int:
        """Number of first tokens of the current conversation that are cached."""
        return self.now.index(num_held_tokens(self.cache, self.now.sequence))

    @property
    def without_prefixes(self) -> jaxkv.Cache:
        """The cache without the sequences of the prefix store, for display."""
        return jaxkv.seq_rm(self.cache, self.store.sequences)[0]

    def with_current(self, conversation: Conversation, cache: jaxkv.Cache) -> "Chat":
        """Return the chat with a new cache and a new value of the current conversation."""
        conversations = {**self.conversations, self.current: conversation}
        return replace(self, conversations=conversations, cache=cache)


def spend(chat: Chat, **more: float) -> Chat:
    """Return a chat in which each amount is added to the field of the same name in `Chat.spent`."""
    spent = {name: getattr(chat.spent, name) + amount for name, amount in more.items()}
    return replace(chat, spent=replace(chat.spent, **spent))


def has_states(cache: jaxkv.Cache) -> bool:
    """Return whether a cache has recurrent states."""
    return cache.table.spec.max_rollback is not None


def num_held_tokens(cache: jaxkv.Cache, sequence: int) -> int:
    """Return the number of tokens of a sequence, up to its last position in the cache.

    Tokens that were evicted by a window count too.
    """
    return int(cache.seq_pos_max(sequence)) + 1


def remember(chat: Chat, length: int) -> Chat:
    """Store the first `length` tokens of the current conversation in the prefix store.

    Nothing is stored if one of these tokens is not cached or follows tokens that `room.slide`
    removed. The keys of tokens after a gap were computed with attention to the removed tokens.
    """
    conversation = chat.now
    if not 0 < length <= conversation.gapless(chat.num_cached):
        return chat
    cache, store, _ = chat.store.store(
        chat.cache, conversation.tokens[:length], conversation.sequence
    )
    return replace(chat, cache=cache, store=store)


def recall(chat: Chat, length: int) -> tuple[Chat, MissReason]:
    """Replace the cached tokens of the current conversation by a stored prefix if it is longer.

    `recall` uses the longest stored prefix of the first `length` tokens of the conversation.
    Returns the chat, and the reason why not more tokens were found in the prefix store.
    """
    conversation = chat.now
    # `fork` never reuses the last token of a prompt, so the prompt has one more token.
    text = conversation.tokens[: conversation.gapless(length) + 1]
    cache, store, hit = chat.store.fork(chat.cache, text, conversation.sequence)
    if (more := hit.length - chat.num_cached) <= 0:
        return chat, hit.miss
    return replace(chat, cache=cache, store=store, reused=chat.reused + more), hit.miss


def use_instructions(chat: Chat) -> Chat:
    """Mark the stored instructions as recently used, so that other prefixes are evicted first."""
    conversation = chat.now
    if not conversation.tokens or not conversation.frame.keep:
        return chat
    begins = conversation.tokens[: conversation.frame.keep + 1]
    forked = chat.store.fork(chat.cache, begins, conversation.sequence)
    return replace(chat, store=forked.store)  # only the order of eviction changes


def fork(chat: Chat, name: str) -> Chat:
    """Copy the current conversation to a new name (`seq_cp`), without switching to the copy.

    Raises:
      ChatError: If the name is taken or is not one word, or if `chat.seats` conversations exist.
    """
    if not name or len(name.split()) != 1:
        raise ChatError("a fork needs a name of one word: /fork NAME.")
    if name in chat.conversations:
        raise ChatError(f"there is a conversation {name} already: /switch {name}, or another name.")
    used_seats = {conversation.sequence for conversation in chat.conversations.values()}
    free = [seat for seat in range(chat.seats) if seat not in used_seats]
    if not free:
        raise ChatError(
            f"there are {chat.seats} conversations, the maximum: /drop one, or start with "
            f"--conversations {2 * chat.seats}."
        )
    source, target = chat.now.sequence, free[0]
    cache, _ = jaxkv.seq_cp(chat.cache, source, target)
    forked = replace(chat.now, sequence=target)
    return replace(chat, cache=cache, conversations={**chat.conversations, name: forked})


def switch(chat: Chat, name: str) -> Chat:
    """Switch to another conversation; raise `ChatError` if no conversation has the name."""
    _check_there(chat, name)
    return replace(chat, current=name)


def drop(chat: Chat, name: str) -> Chat:
    """Remove a conversation (`seq_rm`), or make the conversation empty if it is the current one.

    Prefixes of the conversation stay in the prefix store until they are evicted. Raises `ChatError`
    if no conversation has the name.
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
    """Remove the last turn of the current conversation; see `take_back` for the cache.

    Returns:
      The chat, and a text. If tokens before the removed turn must be computed again, the text is
      the reason; otherwise the text is "".

    Raises:
      ChatError: If the conversation has no turn.
    """
    _check_turns(chat)
    chat, why = take_back(chat, chat.now.turns[-1].start)
    return chat.with_current(chat.now.undone(), chat.cache), why


def retract_answer(chat: Chat) -> tuple[Chat, str]:
    """Remove the last answer of the current conversation, so that another answer can follow.

    The message stays in the cache, except for its last token: another answer begins with the
    computation of this token. The function returns and raises the same as `undo`.
    """
    _check_turns(chat)
    chat, why = take_back(chat, chat.now.turns[-1].asked - 1)
    return chat.with_current(chat.now.unanswered(), chat.cache), why


def take_back(chat: Chat, length: int) -> tuple[Chat, str]:
    """Remove all tokens of the current conversation after the first `length` from the cache.

    The conversation must have a turn, and `length` must be at least the `start` of the last turn.
    If the cache cannot roll back, the cached tokens of the conversation are replaced by a stored
    prefix, or removed if no prefix is stored.

    Returns:
      The chat, and a text. If two or more tokens before the last turn are no longer cached, the
      text is the reason; otherwise the text is "".
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
    # The last token of the previous answer was sampled, not computed, when the prefix was stored.
    # A short message takes no longer than a token, so the loss of one is not reported.
    if (
        num_held_tokens(chat.cache, conversation.sequence)
        >= conversation.place(conversation.turns[-1].start) - 1
    ):
        return chat, ""
    return (
        chat,
        f"{' and '.join(_refusals(cache, conversation.sequence, end))}, and {MISS_TEXTS[miss]}",
    )


MISS_TEXTS = {
    MissReason.NONE: "no prefix up to there is stored",
    MissReason.UNKNOWN: "no prefix of it is stored",
    MissReason.EVICTED: "its stored prefix was evicted",
    MissReason.CONTEXT_EVICTED: "those of the stored prefix too",
    MissReason.INCOMPLETE: "the stored prefix lacks tokens",
    MissReason.NO_STATE: "no state is stored there",
}
"""End of a sentence for each reason why a prefix is missing in a cache of one stream."""


def _refusals(cache: jaxkv.Cache, sequence: int, end: int) -> list[str]:
    """Return a reason for each part of the cache that cannot roll back a sequence to `end`."""
    found = []
    for part in cache.parts:
        if jaxkv.seq_rm(part, sequence, end).ok:
            continue
        if has_states(part):
            found.append("tokens cannot be removed from a recurrent state")
        else:
            width = part.table.window.width
            found.append(f"earlier cells of a window of {width:,} are evicted")
    return found


def _check_there(chat: Chat, name: str) -> None:
    if name not in chat.conversations:
        names = ", ".join(chat.conversations)
        raise ChatError(f"there is no conversation {name or 'without a name'}; there are {names}.")


def _check_turns(chat: Chat) -> None:
    if not chat.now.turns:
        raise ChatError("this conversation has no turn; type a message.")
