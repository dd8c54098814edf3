"""Planning sources: what an encoder reads goes into the part of a cache that is made for it."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.batch import Batch
from jaxkv.cache import Cache, split
from jaxkv.places import is_concrete
from jaxkv.plan import Plan, Reason
from jaxkv.planning.layout import FEW, layout_whole, turn_in_sequence
from jaxkv.planning.place import plan_single_ubatch
from jaxkv.tables import jit_table


def init_encoder(cache: Cache, batch: Batch) -> Plan:
    """Plan where the sources of sequences go. Looks at the table only, and changes nothing.

    A source comes whole, since its tokens see each other: all of the batch is one ubatch, however
    long, with a row for each sequence. Its tokens stand at 0 and so on, apart from the positions of
    the text.

    Args:
      cache: a hybrid cache with a part of `make_cross_attention_cache`.
      batch: the tokens, or embeddings such as frames of sound, that the encoder reads, `make_batch`
        makes it; for sequences that have no source yet. Traced, it keeps its rows; a
        list of tokens is one row, which a cache that needs a row for each sequence refuses.

    Returns:
      A `Plan` of one ubatch. `apply` takes it in; `write_kv` then writes the keys and values of
      each layer that looks at sources, as `encode` does. The text is not touched. A sequence that
      has a source is refused, `Reason.ENCODER_ALREADY_WRITTEN`.

    Raises:
      TypeError: when it is no batch, or the cache has no part for sources.
      ValueError: when the batch says positions, a token of it belongs to several sequences, a
        sequence id is known and is none of the cache, or nothing is in the batch.

    Examples:
      >>> sizes = dict(layers=1, kv_heads=1, head_dim=1)
      >>> text = make_kv_cache(cells=4, **sizes)
      >>> sources = make_cross_attention_cache(cells=4, **sizes)
      >>> cache = make_hybrid_cache((text, (0,)), (sources, (1,)))
      >>> (ubatch,) = init_encoder(cache, make_batch([7, 8, 9])).ubatches
      >>> k, v = jnp.zeros((1, 4, 1, 1)), jnp.array([2.0, 4.0, 6.0, 0.0]).reshape(1, 4, 1, 1)
      >>> cache = write_kv(apply(cache, ubatch), 1, ubatch, k, v)

      Two tokens of the text, each of which sees the whole source:

      >>> (ubatch,) = init_batch(cache, make_batch([0, 3])).ubatches
      >>> attend(apply(cache, ubatch), 1, ubatch, jnp.zeros((1, 2, 1, 1)))[1][0, :, 0, 0]
      Array([4., 4.], dtype=float32)

      It is written once:

      >>> init_encoder(cache, make_batch([5])).check()
      Traceback (most recent call last):
      ...
      jaxkv.plan.PlanRefusedError: the batch was refused, and nothing was changed.
      sequence 0: ENCODER_ALREADY_WRITTEN, it has a source of 3 tokens already, and one is written
        once: forget \
the sequence (seq_rm), which takes its source along

    llama.cpp: `llama_encode`.
    """
    table = split(cache)[0].as_encoder_table()
    if not isinstance(batch, Batch):
        raise TypeError(f"wanted a batch, got {type(batch)}: make_batch(tokens) makes one")
    if batch.shared_with is not None:
        raise ValueError(
            "wanted tokens of one sequence each in a source, got some of several: encode it for "
            "one of them, and fork that (seq_cp)"
        )
    if batch.positions is not None:
        raise ValueError(
            "wanted no positions for a source, whose tokens stand at 0 and so on: leave them out"
        )
    xp = np if is_concrete(batch) else jnp
    flat, index = layout_whole(table.spec, replace(batch, outputs=xp.zeros_like(batch.valid)))
    ranks = turn_in_sequence(flat.sequences, flat.valid)
    return _planned(table, replace(flat, positions=ranks[0]), ranks, index)


@jit_table
def _planned(table: Any, batch: Batch, ranks: tuple, index: jax.Array) -> Plan:
    """Plan a batch whose sequences must be empty; arguments as of `plan_single_ubatch`."""
    plan = plan_single_ubatch(table, batch, ranks, index, outputs=FEW)
    reason = jnp.where(
        plan.reason == Reason.NOT_CONTIGUOUS, Reason.ENCODER_ALREADY_WRITTEN, plan.reason
    )
    return replace(plan, reason=reason)
