"""Free cells in a full cache: evict stored prefixes first, then remove old turns."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.jit_helpers import jit_table
from models.chat.chat import Chat, has_states, num_held_tokens
from models.chat.conversation import ChatError, Conversation


def cells_of(cache: jaxkv.Cache) -> tuple[int, int]:
    """Return the number of used cells and of all cells, for the part with the most used cells.

    Parts with a window or with states are skipped if there are other parts, since parts with a
    window or with states do not need more cells for longer sequences.
    """
    grows = [part for part in cache.parts if _grows(part)] or [*cache.parts]
    return max((int(part.num_used_cells()), part.table.num_cells) for part in grows)


def give_way(chat: Chat, tokens: int) -> Chat | None:
    """Evict stored prefixes until `tokens` more tokens of the current conversation fit.

    Prefixes are evicted least recently used first. Returns None, and evicts nothing, if the tokens
    fit without an eviction, or would not fit after the eviction of all prefixes.
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
    """Remove the oldest turns of the current conversation, by a context shift.

    The tokens before the first message stay in the cache. Of the other tokens the newer half stays,
    from the first message that begins in it, if there is one. The texts of all turns stay in the
    conversation. All stored prefixes are evicted if positions of cells change, since prefixes may
    share these cells. The chat is unchanged after an exception.

    Raises:
      ChatError: If the cache has recurrent states.
      ChatError: If another conversation shares a cell whose position would change.
      ChatError: If a token would attend to cells that a window has evicted.
      ChatError: If the conversation has no tokens to remove.
    """
    conversation, cache, store = chat.now, chat.cache, chat.store
    if has_states(cache):
        raise ChatError("tokens cannot be removed from a recurrent state; /drop to restart.")
    start, num_cached = conversation.frame.keep + conversation.gap, chat.num_cached
    cut = cut_of(conversation)
    if num_cached <= start or cut <= start:
        raise ChatError("no turn can be removed: /drop a conversation, or start with more --cells.")
    if cut >= num_cached:  # the kept half begins after the cached tokens
        cache, ok = jaxkv.seq_rm(cache, conversation.sequence, conversation.frame.keep)
    else:
        drop = cut - start
        cache, store = store.evict(cache, cells=0)
        cache, ok = jaxkv.generation.context_shift(
            cache, conversation.sequence, num_keep=conversation.frame.keep, num_discard=drop
        )
    if not ok:
        raise ChatError(_why_stuck(chat))
    return replace(chat, store=store).with_current(
        replace(conversation, gap=cut - conversation.frame.keep), cache
    )


def cut_of(conversation: Conversation) -> int:
    """Return the index of the first token after the tokens that the function `slide` removes.

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
    """Return the reason why the oldest turns cannot be removed."""
    others = [name for name in chat.conversations if name != chat.current]
    if any(num_held_tokens(chat.cache, chat.conversations[name].sequence) for name in others):
        return (
            f"tokens to shift may be shared with {', '.join(others)}: /drop a conversation, or "
            "/undo."
        )
    return "a window has evicted cells that would be visible again; /drop to restart."


def _grows(part: jaxkv.Cache) -> bool:
    return part.table.spec.max_rollback is None and part.table.window is None


def _num_tokens_left(cache: jaxkv.Cache, sequence: int) -> int:
    """Return the number of additional tokens of a sequence that fit into the cache."""
    return int(_room(cache.table)[sequence])


@jit_table
def _room(table: Any) -> jax.Array:
    nothing = jnp.zeros(table.spec.sequences, jnp.int32)
    return table.find_fitting_sequences(nothing, one_ubatch=True).num_remaining
