"""Where a cache is full: what is kept gives way first, then turns are forgotten to go on."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.jit_helpers import jit_table
from models.chat.chat import Chat, has_states, num_held_tokens
from models.chat.conversation import ChatError, Conversation


def cells_of(cache: jaxkv.Cache) -> tuple[int, int]:
    """Return how many cells are in use where most are, and how many there are in that part.

    Layers with a window take their cells again, and a state is one whatever it has seen: those
    parts count only where no other is.
    """
    grows = [part for part in cache.parts if _grows(part)] or [*cache.parts]
    return max((int(part.num_used_cells()), part.table.num_cells) for part in grows)


def give_way(chat: Chat, tokens: int) -> Chat | None:
    """Let go of what is kept, the least recently used first, until so many tokens find room.

    Returns:
      The chat; None where they would not find it, or had it before: nothing is let go of then.
    """
    if _num_tokens_left(chat.cache, chat.now.sequence) >= tokens:
        return None
    cache, store = chat.cache, chat.store
    while store.prompts:
        cache, store = store.evict(cache, cells=store.num_used_cells(cache) - 1)
        if _num_tokens_left(cache, chat.now.sequence) >= tokens:
            return replace(chat, cache=cache, store=store)
    return None


def slide(chat: Chat) -> Chat:
    """Forget the oldest turns of the current conversation; see `generation.context_shift`.

    What comes before the first message stays, and of the rest the newer half, from the beginning of
    a turn on where one begins there. The texts of all turns stay in the conversation. What is kept
    is let go of, since it shares the cells that move.

    Raises:
      ChatError: when the kind of cache does not allow it, a fork shares what would move, or there
        is nothing to forget. Nothing has changed then.
    """
    conversation, cache, store = chat.now, chat.cache, chat.store
    if has_states(cache):
        raise ChatError("a recurrent state cannot forget what it has seen: /drop begins anew.")
    start, num_held = conversation.frame.keep + conversation.gap, chat.held
    cut = cut_of(conversation)
    if num_held <= start or cut <= start:
        raise ChatError(
            "there is nothing to forget yet: /drop a conversation, or give more --cells."
        )
    if cut >= num_held:  # the rest of the message is longer than what is there
        cache, ok = jaxkv.seq_rm(cache, conversation.sequence, conversation.frame.keep)
    else:
        drop = cut - start
        cache, store = store.evict(cache, cells=0)
        cache, ok = jaxkv.generation.context_shift(
            cache, conversation.sequence, num_keep=conversation.frame.keep, num_discard=drop
        )
    if not ok:
        raise ChatError(_why_stuck(chat))
    return replace(chat, store=store).going_on(
        replace(conversation, gap=cut - conversation.frame.keep), cache
    )


def cut_of(conversation: Conversation) -> int:
    """Return up to which token a conversation is forgotten.

    >>> from models.text.turns import Frame
    >>> one = Conversation(sequence=0, frame=Frame(keep=2, closing=1))
    >>> for message in "abc":
    ...     one = one.ask(message, [0] * 10).answered([0] * 5, "", "stop")
    >>> cut_of(one), cut_of(replace(one, gap=cut_of(one) - 2)), len(one.tokens)
    (31, 38, 45)
    """
    first = conversation.frame.keep + conversation.gap
    half = first + -(-(len(conversation.tokens) - first) // 2)
    opens = [turn.start + conversation.frame.closing for turn in conversation.turns[1:]]
    return min((place for place in opens if place >= half), default=half)


def _why_stuck(chat: Chat) -> str:
    """Say why a passage cannot be forgotten."""
    others = [name for name in chat.conversations if name != chat.current]
    if any(num_held_tokens(chat.cache, chat.conversations[name].sequence) for name in others):
        return (
            f"the tokens that would move may be shared with {', '.join(others)}: /drop what is not "
            "needed, or /undo."
        )
    return "a window has let go of what it would see again: /drop begins anew."


def _grows(part: jaxkv.Cache) -> bool:
    return part.table.spec.max_rollback is None and part.table.window is None


def _num_tokens_left(cache: jaxkv.Cache, sequence: int) -> int:
    """Return how many more tokens of a sequence find room."""
    table = cache.table
    return int(_room(table)[sequence])


@jit_table
def _room(table: Any) -> jax.Array:
    return table.find_fitting_sequences(jnp.zeros(table.spec.sequences, jnp.int32)).num_remaining
