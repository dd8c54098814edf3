"""Trees of draft tokens in one ubatch; during a step, each branch has its own sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.batch import make_batch
from jaxkv.core.array_utils import DROP, divmod_nonnegative
from jaxkv.core.constants import NO_SLOT
from jaxkv.generation.speculative.drafters import DraftTokens
from jaxkv.generation.state import DecodeState
from jaxkv.jit_helpers import jit_table
from jaxkv.plan import Plan
from jaxkv.planning.checks import token_sequence_pairs
from jaxkv.planning.layout import rank_in_sequence
from jaxkv.planning.placement import plan_single_ubatch
from jaxkv.spec import TableSpec

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, Shaped

    from jaxkv.table import CacheTable


class TreeNodes(NamedTuple):
    """Tokens that the branches of Z sequences share.

    owns: `owns[t, i, j, m]` is True if tokens 0 to j are equal in branches i and m of sequence t.
    first: True for a valid draft token that no earlier branch shares.
    """

    owns: Bool[Array, "Z k n k"]
    first: Bool[Array, "Z k n"]


def check_branches(spec: TableSpec, batch_size: int, num_branches: int, cache_name: str) -> None:
    """Raise a ValueError unless a cache can fork each drafted sequence into branches."""
    if num_branches == 1:
        return
    if spec.max_rollback is not None:
        raise ValueError(
            f"expected {cache_name} of attention alone for num_branches={num_branches}, since a "
            f"state belongs to one sequence, got {spec.kind}; propose with num_branches=1"
        )
    if batch_size * num_branches > spec.sequences or spec.streams == spec.sequences:
        raise ValueError(
            f"expected {cache_name} with a sequence for each of {num_branches} branches of "
            f"{batch_size} sequences, in the same stream, got {spec.sequences} sequences in "
            f"{spec.streams} streams; make it with sequences={batch_size * num_branches} or more"
        )


def assign_branch_sequences(
    table: CacheTable, sequences: Int32[Array, " Z"], num_branches: int
) -> Int32[Array, "Z {num_branches}"]:
    """Return, in each row, the sorted sequence ids of k branches; Q if a branch has no sequence."""
    spec, count = table.spec, table.spec.sequences
    size = count // spec.streams
    free = (~table.nonempty_sequences()).at[sequences].set(False).reshape(spec.streams, size)
    stream, _ = divmod_nonnegative(sequences, size)
    is_same_stream = stream[:, None] == stream[None]
    # Each drafted sequence takes k - 1 free sequences, after those of earlier drafted sequences in
    # its stream.
    ahead = jnp.sum(jnp.tril(is_same_stream, -1), axis=1, dtype=jnp.int32)
    branch = (
        ahead[:, None] * (num_branches - 1) + jnp.arange(num_branches - 1, dtype=jnp.int32)[None]
    )
    # Free sequences of each stream are first, in ascending order.
    order = jnp.argsort(~free, axis=1, stable=True).astype(jnp.int32)[stream]
    is_available = branch < jnp.sum(free, axis=1, dtype=jnp.int32)[stream][:, None]
    branch_sequences = jnp.take_along_axis(order, jnp.minimum(branch, size - 1), axis=1)
    branch_sequences = jnp.where(is_available, stream[:, None] * size + branch_sequences, count)
    return jnp.sort(jnp.concatenate([sequences[:, None], branch_sequences], axis=1), axis=1)


def find_tree_nodes(draft: DraftTokens) -> TreeNodes:
    """Find the draft tokens that branches share."""
    # Axes: sequence, token, branch. `both` has a second axis of branches; tokens are equal up to j
    # if the product up to j is 1.
    tokens, valid = (jnp.moveaxis(x, 1, 2) for x in (draft.tokens, draft.valid))
    both = valid[..., None] & valid[..., None, :] & (tokens[..., None] == tokens[..., None, :])
    owns = jnp.moveaxis(jnp.cumprod(both, axis=1) > 0, 1, 2)
    branch = jnp.arange(owns.shape[1])
    earlier = (branch[None] < branch[:, None])[None, :, None]
    return TreeNodes(owns=owns, first=draft.valid & ~jnp.any(owns & earlier, axis=3))


@jit_table
def fork_branches(
    table: CacheTable, sequences: Int32[Array, "Z k"], roots: Int32[Array, " Z"]
) -> CacheTable:
    """Fork each drafted sequence into the sequences of its branches."""
    parents = jnp.broadcast_to(roots[:, None], sequences.shape).reshape(-1)
    targets = jnp.where(sequences == roots[:, None], table.spec.sequences, sequences)
    forked, _ = table.seq_select(None, parents, targets.reshape(-1))
    return forked.advance_version(table)


@jit_table
def plan_tree(
    table: CacheTable,
    state: DecodeState,
    draft: DraftTokens,
    active: Bool[Array, " Z"],
    sequences: Int32[Array, "Z k"],
) -> Plan:
    """Plan the last sampled token and the branches of each active sequence, in one ubatch.

    The table is the result of `fork_branches`. Ids in a row of `sequences` ascend; a missing branch
    has the id Q. A sequence has 1 + k * n outputs: one for the last sampled token, then one for
    each draft token, branch by branch. If several branches share a token, only its output in
    the first of these branches is defined.
    """
    batch_size, branches, length = draft.tokens.shape
    count = 1 + branches * length
    nodes = find_tree_nodes(draft)
    ids = jnp.where(sequences < table.spec.sequences, sequences, -1)
    # Axes: sequence, branch, token, sequences of the token. A token belongs to each branch that
    # shares it.
    sets = jnp.where(nodes.owns, ids[:, None, None], -1).reshape(batch_size, -1, branches)
    flat = make_batch(
        _join_columns(state.token, draft.tokens).reshape(-1),
        sequences=jnp.concatenate([ids[:, None], sets], axis=1).reshape(-1, branches),
        valid=_join_columns(active, nodes.first).reshape(-1),
        outputs=jnp.ones(batch_size * count, bool),
        extra=jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), state.extra_of_tokens(count)),
    )
    index = _lay_out_trees(table.spec, batch_size, branches, length)
    plan = plan_single_ubatch(
        table, flat, rank_in_sequence(*token_sequence_pairs(flat)), index, outputs=index.size
    )
    (ubatch,) = plan.ubatches
    token = jnp.arange(flat.valid.size, dtype=jnp.int32)
    place = jnp.arange(index.size, dtype=jnp.int32)
    # `where` inverts `output_index`: for each token of the batch, its index in the ubatch. Outputs
    # are then in the order of the batch.
    where = jnp.zeros_like(token).at[ubatch.output_index].set(place, **DROP)
    order = jnp.where(flat.valid, token, NO_SLOT)
    return replace(plan, ubatches=(replace(ubatch, outputs=where, output_index=order),))


def _join_columns(
    root: Shaped[Array, " Z"], branches: Shaped[Array, "Z k n"]
) -> Shaped[Array, "Z _"]:
    """Return a row for each sequence: the last sampled token, then the tokens of all branches."""
    return jnp.concatenate([root[:, None], branches.reshape(len(root), -1)], axis=1)


def _lay_out_trees(
    spec: TableSpec, batch_size: int, num_branches: int, length: int
) -> Int32[Array, "rows columns"]:
    """Return the indices of all tokens: one row, or one per branch if `single_sequence_rows`."""
    index = jnp.arange(batch_size * (1 + num_branches * length), dtype=jnp.int32)
    if not spec.single_sequence_rows:
        return index[None]
    index = index.reshape(batch_size, -1)
    rows = index[:, 1:].reshape(batch_size, num_branches, length)
    trunk = jnp.full((batch_size, num_branches, 1), NO_SLOT, jnp.int32).at[:, 0, 0].set(index[:, 0])
    return jnp.concatenate([trunk, rows], axis=2).reshape(batch_size * num_branches, -1)


@jit_table
def keep_branch(
    table: CacheTable,
    roots: Int32[Array, " Z"],
    sequences: Int32[Array, "Z k"],
    branch: Int32[Array, " Z"],
) -> CacheTable:
    """Replace each drafted sequence by one of its branches, and clear the other branches."""
    parents = jnp.take_along_axis(sequences, branch[:, None], axis=1)[:, 0]
    kept, _ = table.seq_select(None, parents, roots)
    others = jnp.where(sequences == roots[:, None], table.spec.sequences, sequences).reshape(-1)
    none, end = jnp.int32(0), jnp.int32(-1)
    kept, _ = jax.lax.scan(lambda x, seq: (x.seq_rm(seq, none, end)[0], None), kept, others)
    return kept.advance_version(table)
