"""A verb that names one sequence changes nothing that another could notice.

What a sequence can notice: the positions it holds, their keys and values, and what its next token
would answer. Cells that it shares are its own too: a verb that moves positions moves them for every
owner, and that is the one exception.
"""

from dataclasses import replace

import numpy as np
import pytest

import jaxkv
from jaxkv import make_batch
from tests.memories import SMALL, WIDE, assert_identical, filled, run, think
from tests.twins import lived_in

SEEDS = range(6)


def belongings(memory, seq):
    """The keys and values of a sequence by position, which is all that attention can see of it."""
    table, buffers = jaxkv.split(memory)
    owned = np.asarray(table.owners)[0, seq // 32] >> (seq % 32) & 1 == 1
    cells = np.flatnonzero(owned)
    position = np.asarray(table.position)[0, cells]
    # After forks two cells may share a position: a number of the key tells them apart.
    order = np.lexsort((np.asarray(buffers.k[0])[0, 0, cells, 2], position))
    arrays = [np.asarray(x)[0][:, cells[order]] for x in (*buffers.k, *buffers.v)]
    return position[order], arrays, np.asarray(table.shift)[0, cells[order]]


def verbs(seq, other):
    """Every verb, as something done by or to one sequence."""
    return {
        "seq_rm": lambda memory: jaxkv.seq_rm(memory, seq)[0],
        "seq_rm a range": lambda memory: jaxkv.seq_rm(memory, seq, 1, 3)[0],
        "seq_cp to it": lambda memory: jaxkv.seq_cp(memory, other, seq),
        "decode": lambda memory: decode(memory, seq),
        "refused": lambda memory: refused(memory, seq),
        "defrag": lambda memory: jaxkv.apply(memory, jaxkv.defrag_plan(memory)),
        "update": lambda memory: jaxkv.apply(memory, jaxkv.init_update(memory)),
    }


def decode(memory, seq):
    plan = jaxkv.init_batch(memory, make_batch([3], sequences=seq))
    return think(memory, plan.ubatches[0])[0]


def refused(memory, seq):
    end = jaxkv.seq_pos_max(memory, seq).item()
    batch = make_batch([3, 3, 3], sequences=seq, positions=[end + 1, end + 3, end + 3])
    plan = jaxkv.init_batch(memory, batch)
    assert not plan.ok
    return think(memory, plan.ubatches[0])[0]


KINDS = [SMALL, pytest.param(WIDE, marks=pytest.mark.core)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("verb", verbs(0, 1))
def test_others_keep_what_they_have(kind, verb):
    for seed in SEEDS:
        memory = lived_in(kind, seed)
        for seq in (0, kind.sequences - 1):
            others = [s for s in range(kind.sequences) if s != seq]
            after = verbs(seq, others[seed % len(others)])[verb](memory)
            for other in others:
                assert_identical(belongings(after, other), belongings(memory, other))


@pytest.mark.parametrize("verb", ["seq_add", "seq_div"])
def test_others_keep_what_they_do_not_share(verb):
    """Positions belong to cells: what is shared moves for all, what is not stays."""
    for seed in SEEDS:
        memory = lived_in(SMALL, seed)
        shared = {s: [] for s in range(3)}
        for position, owners in zip(
            memory.table.position[0].tolist(), memory.table.owners[0, 0].tolist(), strict=True
        ):
            for s in (1, 2):
                if owners >> s & 1 and owners & 1:
                    shared[s].append(position)
        after = {
            "seq_add": lambda memory: jaxkv.seq_add(memory, 0, 0, -1, 20),
            "seq_div": lambda memory: jaxkv.seq_div(memory, 0, 0, -1, 2),
        }[verb](memory)
        move = {"seq_add": lambda p: p + 20, "seq_div": lambda p: p // 2}[verb]
        for s in (1, 2):
            held = belongings(memory, s)[0].tolist()
            for position in shared[s]:
                held.remove(position)
            expected = sorted([*held, *map(move, shared[s])])
            assert belongings(after, s)[0].tolist() == expected


@pytest.mark.core
def test_seq_keep_and_clear_keep_no_secrets():
    """The documented exceptions: they empty all other sequences, everywhere."""
    memory = lived_in(WIDE)
    for seq in (0, 31, 32, 39):
        kept = jaxkv.seq_keep(memory, seq)
        assert_identical(belongings(kept, seq), belongings(memory, seq))
        assert jaxkv.used(kept).item() == len(belongings(memory, seq)[0])
        ends = jaxkv.seq_pos_max(kept, [*range(40)]).tolist()
        assert {s for s in range(40) if ends[s] >= 0} <= {seq}


def test_fork_that_goes_on_leaves_its_source_alone():
    memory = filled(4)
    forked = jaxkv.seq_cp(memory, 0, [1, 2])
    for seq, token in ((1, 5), (2, 6), (1, 7)):
        forked, _ = run(forked, make_batch([token], sequences=seq))
    assert_identical(belongings(forked, 0), belongings(memory, 0))
    for seq in (1, 2):
        position, arrays, _ = belongings(forked, seq)
        assert position.tolist() == [0, 1, 2, 3, 4, 5][: len(position)]
        assert_identical([x[:, :4] for x in arrays], belongings(memory, 0)[1])


def alone(prompts, tokens):
    """The logits of the next token of each prompt in a memory of its own."""
    out = []
    for prompt, token in zip(prompts, tokens, strict=True):
        memory, _ = run(SMALL.make(), make_batch(prompt))
        out.append(run(memory, make_batch([token]))[1][0])
    return np.asarray(out)


def test_together_is_as_alone():
    """Several sequences in one pool, and in one ubatch, answer what each answers alone."""
    prompts, tokens = [[1, 2, 3, 4], [5], [7, 8, 9]], [10, 11, 12]
    memory = SMALL.make()
    for seq, prompt in enumerate(prompts):
        memory, _ = run(memory, make_batch(prompt, sequences=seq))
    _, together = run(memory, make_batch([[token] for token in tokens]))
    np.testing.assert_allclose(together, alone(prompts, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.core
def test_neighbour_whose_keys_are_not_numbers():
    """A broken neighbour (and what it leaves behind in free cells) reaches no other sequence."""
    memory = filled(4, 3)
    table, buffers = jaxkv.split(memory)
    broken = np.asarray(belongs_to(table, 1))
    # What is stored for a token that is no number: a key that says so, and a value of zero.
    spoil = replace(
        buffers,
        k=tuple(x.at[:, :, broken].set(np.nan) for x in buffers.k),
        v=tuple(x.at[:, :, broken].set(0.0) for x in buffers.v),
    )
    sick = jaxkv.join(table, spoil)
    for other in (sick, jaxkv.seq_rm(sick, 1)[0]):
        _, clean = run(memory, make_batch([9]))
        _, beside = run(other, make_batch([9]))
        np.testing.assert_allclose(beside, clean, rtol=1e-5, atol=1e-6)
    assert np.isnan(run(sick, make_batch([9], sequences=1))[1]).all()


def belongs_to(table, seq):
    return np.flatnonzero(np.asarray(table.owners)[0, seq // 32] >> (seq % 32) & 1)
