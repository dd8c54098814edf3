"""After a warm-up nothing is traced or compiled again.

Lengths within a bucket, how full the memory is, ids, positions and answers are all values: they may
change from call to call without a new program. JAX itself tells what it traces and compiles.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch
from models.compiling import counting
from tests.cases import mostly_nightly
from tests.memories import SMALL, SPLIT, TWO, VOCABULARY, WIDE, assert_identical, filled, run, think
from tests.twins import lived_in

pytestmark = pytest.mark.core


def numbers(kind, i):
    """Arguments that differ in every call, of the types that callers use."""
    seq, other = (7 * i) % kind.sequences, (5 * i + 1) % kind.sequences
    if i % 3 == 1:
        return np.int32(seq), np.int64(other), i, i + 2
    if i % 3 == 2:
        return jnp.int32(seq), jnp.int32(other), -1, jnp.int32(i)
    return seq, other, -1, -1


def think_with(weights, memory, ubatch):
    """`think` as the loops call a model."""
    return think(memory, ubatch)


VERBS: dict[str, Callable] = {
    "seq_rm": lambda m, seq, other, p0, p1: jaxkv.seq_rm(m, seq, p0, p1),
    "seq_cp": lambda m, seq, other, p0, p1: jaxkv.seq_cp(m, seq, other, p0, p1),
    "seq_keep": lambda m, seq, other, p0, p1: jaxkv.seq_keep(m, seq),
    "seq_add": lambda m, seq, other, p0, p1: jaxkv.seq_add(m, seq, p0, p1, 1),
    "seq_div": lambda m, seq, other, p0, p1: jaxkv.seq_div(m, seq, p0, p1, 2),
    "clear": lambda m, seq, other, p0, p1: jaxkv.clear(m),
    "seq_pos_min": lambda m, seq, other, p0, p1: jaxkv.seq_pos_min(m, seq),
    "seq_pos_max": lambda m, seq, other, p0, p1: jaxkv.seq_pos_max(m, seq),
    "used": lambda m, seq, other, p0, p1: jaxkv.used(m),
    "can_resume": lambda m, seq, other, p0, p1: jaxkv.can_resume(m, seq, p0),
    "defrag": lambda m, seq, other, p0, p1: jaxkv.apply(m, jaxkv.defrag_plan(m)),
    "update": lambda m, seq, other, p0, p1: jaxkv.apply(
        *(lambda moved: (moved, jaxkv.init_update(moved)))(jaxkv.seq_add(m, seq, p0, p1, 1))
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs(verb):
    memories = [lived_in(SMALL, seed) for seed in range(3)]
    for i in range(3):  # one call for each way that callers write numbers
        for memory in memories[:1]:
            VERBS[verb](memory, *numbers(SMALL, i))
    if verb in ("defrag", "update"):  # the first may have had nothing to do
        VERBS[verb](jaxkv.seq_rm(filled(4, 3), 0, 1, 2)[0], 1, 0, -1, -1)
    with counting(traces=True) as heard:
        for i in range(3, 12):
            VERBS[verb](memories[i % 3], *numbers(SMALL, i))
    assert heard() == 0


def test_concrete_numbers_of_every_kind_share_one_program():
    """A Python int, a NumPy and a JAX integer are all one int32 to a verb."""
    memory = lived_in(WIDE)
    jaxkv.seq_rm(memory, 0, 1, 2)
    with counting(traces=True) as heard:
        for seq, p0, p1 in ((3, 0, 5), (np.int64(39), np.int32(1), -1), (np.int32(31), -1, 0)):
            jaxkv.seq_rm(memory, seq, p0, p1)
    assert heard() == 0


def test_generating():
    """Prompts of any length in a bucket, whatever the memory holds and whichever sequence asks."""
    memory = filled(4)
    run(memory, make_batch([1, 2, 3], sequences=1), ubatch_size=4)
    run(memory, make_batch([1], sequences=1), ubatch_size=4)
    step = jax.jit(jaxkv.plan_step)
    tokens, ids, valid = np.arange(3), np.arange(3), np.ones(3, bool)
    think(memory, step(memory, tokens, ids, valid)[0])
    others = [filled(4, 3), jaxkv.seq_rm(filled(4), 0, 1, 3)[0], SMALL.make(), filled(8, 4)]
    with counting(traces=True) as heard:
        for i, other in enumerate(others):
            for count in (3, 4, 1):
                batch = make_batch(range(count), sequences=(i + count) % 3)
                plan = jaxkv.init_batch(other, batch, ubatch_size=4)
                for ubatch in plan.ubatches:
                    plan.collect([think(other, ubatch)[1]])
            ubatch, _ = step(other, tokens + i, (ids + i) % 3, valid & (ids != i))
            think(other, ubatch)
    assert heard() == 0


def test_prefill_of_more_or_fewer_ubatches():
    """From 3 to 4 ubatches of the same size nothing is new, up to the logits that come out."""
    memory = WIDE.make()
    jaxkv.prefill(think_with, None, memory, make_batch([1] * 12), ubatch_size=4)
    with counting(traces=True) as heard:
        for count in (15, 11, 16):
            batch = make_batch([1] * count, sequences=count)
            jaxkv.prefill(think_with, None, memory, batch, ubatch_size=4)
    assert heard() == 0


class Thinker:
    def run(self, weights, memory, ubatch):
        return think(memory, ubatch)


THINKER = Thinker()
BY_PARTIAL = partial(Thinker.run, THINKER)
KINDS = {
    "function": lambda: think_with,
    "method": lambda: THINKER.run,  # a new object each time that it is asked for
    "partial": lambda: BY_PARTIAL,
}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("function", KINDS)
def test_a_loop_compiles_itself_once(function, donate):
    """Other prompts, fills, sequences, seeds and stop tokens are no new programs."""
    given = KINDS[function]

    def chat(memory, seq, tokens, seed, stop):
        memory = jax.tree.map(jnp.copy, memory)
        batch = make_batch(tokens, sequences=seq)
        memory, logits = jaxkv.prefill(given(), None, memory, batch, ubatch_size=4, donate=donate)
        sampler = loops.sampling.make_sampler(temperature=1.0 + seed)
        state, _ = loops.begin(sampler, memory, logits, [stop], [seq], seed=seed)
        for _ in range(2):
            memory, state, picked = jaxkv.decode(
                given(), sampler, None, memory, state, [stop], steps=2, donate=donate
            )
        return picked

    others = filled(2), filled(1, 1)
    chat(SMALL.make(), 0, [1, 2, 3], 0, 1)
    with counting(traces=True) as heard:
        chat(others[0], 1, [1, 2, 3, 4], 1, 2)
        chat(others[1], 2, [5, 4, 3], 2, 3)
    assert heard() == 0


def test_batches_of_several_sequences_share_the_bucket():
    """Which sequences are in a batch, and how many, are values too."""
    memory = filled(4, 3)
    jaxkv.init_batch(memory, make_batch([1, 2, 3]), ubatch_size=4)
    with counting(traces=True) as heard:
        for ids in ([0, 0, 0, 1], [0, 1, 2], [2, 1, 2, 0], [1, 1, 1, 1]):
            jaxkv.init_batch(memory, make_batch([1] * len(ids), sequences=ids), ubatch_size=4)
    assert heard() == 0


def test_a_warm_up_for_no_sequence_is_refused():
    with pytest.raises(ValueError, match="at least one sequence"):
        loops.warm_up(think_with, None, SMALL.make(), sequences=())


@pytest.mark.parametrize("donate", mostly_nightly([False, True], few=[True]))
def test_a_warm_up_for_more_sequences_than_a_ubatch_has_tokens(donate):
    memory = lived_in(SPLIT)
    given = jax.tree.map(jnp.copy, memory)
    warm = loops.warm_up(think_with, None, given, ubatch_size=2, sequences=(0, 1, 2), donate=donate)
    assert_identical(warm, memory)
    assert all(one.is_deleted() == donate for one in jax.tree.leaves(jaxkv.split(given)[1]))


@pytest.mark.parametrize(
    "kind", mostly_nightly([SMALL, SPLIT, TWO], few=[SPLIT]), ids=lambda kind: kind.name
)
def test_a_warm_up_compiles_what_prompts_need(kind):
    """Also in a memory that is nearly full; not a bit of it changes."""
    memory = lived_in(kind)
    groups = [(0,), (0, 1)] if kind.streams > 1 else [(0,)]
    for sequences in groups:
        warm = loops.warm_up(think_with, None, memory, ubatch_size=6, sequences=sequences)
        assert_identical(warm, memory)
    empty = jaxkv.clear(memory)
    with counting(traces=True) as heard:
        for count in (1, 2, 3, 5, 6):
            batch = make_batch([1] * count, sequences=2)
            jaxkv.prefill(think_with, None, empty, batch, ubatch_size=6)
        if kind.streams > 1:
            batch = make_batch([[1] * 3, [2] * 3], sequences=[2, 0])
            jaxkv.prefill(think_with, None, empty, batch, ubatch_size=6)
    assert heard() == 0


LONGEST = 21


def test_nothing_compiles_after_a_warm_up_for_the_longest_prompt():
    """Prompts of every length, cut in ubatches or not, and the loops after them."""
    memory = WIDE.make()
    sampler = loops.sampling.make_sampler(temperature=0.7, top_p=0.9, repeat_penalty=1.1)
    loop = THINKER.run

    def text(tokens, seed, limit):
        after, logits = jaxkv.prefill(loop, None, memory, make_batch(tokens), ubatch_size=4)
        options = dict(limit=limit, seed=seed, prompts=[tokens])
        state, _ = loops.begin(sampler, after, logits, [1], **options)
        draft = loops.lookup([tokens], recent=16)
        jaxkv.decode(loop, sampler, None, after, state, [1], steps=4)
        loops.speculate(loop, draft, sampler, None, after, state, [1], steps=4)
        cut, _ = jaxkv.seq_rm(after, 0, len(tokens) // 2)
        return cut

    loops.warm_up(loop, None, memory, ubatch_size=4, longest=LONGEST)
    text([1, 2], 0, 0)
    with counting(traces=True) as heard:
        for length in range(1, LONGEST + 1):
            text(list(range(length)), length, 2)
    assert heard() == 0


@pytest.mark.parametrize("kind", [SMALL, SPLIT], ids=lambda kind: kind.name)
def test_other_searches_and_slides_compile_nothing(kind):
    """Other prompts, fills, sequences, penalties and numbers of tokens are values."""
    memories = [filled(*counts, kind=kind) for counts in ((4, 1), (3, 2), (5, 2), (2, 2))]

    def all_of_it(memory, sequences, penalty, keep):
        logits = jnp.arange(VOCABULARY)[None] * jnp.float32(penalty)
        options = dict(width=2, steps=3, stop=[1], sequences=sequences, penalty=penalty)
        loops.beam(think_with, None, memory, logits, **options)
        loops.slide(memory, sequences[0], keep=keep, drop=1)
        loops.extend(memory, sequences[0], 0, group=2, width=2)

    all_of_it(memories[0], [0, 2], 0.5, 0)
    with counting(traces=True) as heard:
        for memory, sequences in zip(memories[1:], ([1, 0], [0, 1], [0, 2]), strict=True):
            all_of_it(memory, sequences, 0.1 * sequences[1], 1)
    assert heard() == 0
