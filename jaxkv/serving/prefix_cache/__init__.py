"""Prefixes that are computed once: which sequences of a cache hold which texts, and forks of them.

A store has some sequences of a cache for itself, its holders. `store_prefix` forks a text into one
of them, and `fork_prefix` forks what a prompt begins with out of one, so within a stream nothing is
copied, and what several texts share is held once. Between streams it is copied.

A store is a value of the host: it says which holder has which tokens, and nothing of it is on a
device. It goes with the cache that was returned beside it, as a table goes with its buffers; both
are values, so an older pair can be gone back to. A token is an integer: where something else is
told to a model as well, such as an image, give it a number of its own.

Leave holders alone. What moves the cells of a text (`seq_add`) moves those of a holder that shares
them: `can_seq_add` says so, and `evict` lets go of them.
"""

from jaxkv.serving.prefix_cache.operations import evict, fork_prefix, held, store_prefix, warm_up
from jaxkv.serving.prefix_cache.store import (
    CachedPrompt,
    MissReason,
    PrefixHit,
    PrefixStore,
    make_prefix_store,
)

__all__ = [
    "PrefixHit",
    "MissReason",
    "PrefixStore",
    "CachedPrompt",
    "evict",
    "held",
    "make_prefix_store",
    "store_prefix",
    "fork_prefix",
]
__all__ += ["warm_up"]
