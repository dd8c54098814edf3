"""Encoder sources, in a tiny encoder-decoder without positions.

A formula computes a token's logits from the tokens of its sequence and its source, for any edits.
"""

import functools
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation, make_batch
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.sharding.make import make_sharded
from tests.attention.formula import formula
from tests.helpers.caches import assert_identical, recurrent_cache
from tests.helpers.meshes import mesh_of
from tests.helpers.mistakes import NAMES, assert_raises, mistakes
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_plan

core = pytest.mark.core
SIZE, VOCABULARY, Q = 8, 12, 4
TEXT, CROSS = 0, 1  # layers
SHAPES = dict.fromkeys(["embedding", "sources"], (VOCABULARY, SIZE))
SHAPES |= dict.fromkeys(["q0", "k0", "v0", "q1", "k1", "v1"], (SIZE, SIZE))
WEIGHTS = {n: jax.random.normal(jax.random.key(i), SHAPES[n]) for i, n in enumerate(SHAPES)}
BEST = generation.make_sampler()


def heads(x):
    return x.reshape(*x.shape[:-1], 2, SIZE // 2)


def encoder(params, step):
    """Each token of a source plus the mean of all, which requires the whole source in one row."""
    x = params["sources"][step.tokens]
    same = step.valid[:, None] & (step.sequences[:, :, None] == step.sequences[:, None])
    x += same @ x / jnp.maximum(same.sum(axis=-1, keepdims=True), 1)
    return jaxkv.write_kv(step, CROSS, heads(x @ params["k1"]), heads(x @ params["v1"]))


def forward(params, step):
    x = params["embedding"][step.tokens]
    q, k, v = (heads(x @ params[f"{what}0"]) for what in "qkv")
    step, out = jaxkv.attend(step, TEXT, q, k, v)
    x += out.reshape(x.shape)
    step, out = jaxkv.attend(step, CROSS, heads(x @ params["q1"]))
    x += out.reshape(x.shape)
    return step, x.reshape(-1, SIZE)[step.outputs] @ params["embedding"].T


def attend_one(q, k, v):
    """Attention of one token over some cells, in NumPy; zeros over none."""
    q, k, v = (np.reshape(x, (1, -1, 2, SIZE // 2)) for x in (q, k, v))
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    return formula(q, k, v, np.ones((1, 1, k.shape[2]), bool)).reshape(-1)


def compute_logits(source, text):
    w = {name: np.asarray(x, np.float64) for name, x in WEIGHTS.items()}
    held = w["embedding"][text]
    x = held[-1]
    x = x + attend_one(x @ w["q0"], held @ w["k0"], held @ w["v0"])
    encoded = source if source and isinstance(source[0], list) else [source]
    encoded = [w["sources"][part] for part in encoded if part]  # each in one call
    read = np.concatenate([w["sources"][:0], *(x + x.mean(axis=0) for x in encoded)])
    x = x + attend_one(x @ w["q1"], read @ w["k1"], read @ w["v1"])
    return x @ w["embedding"].T


HEADS = dict(layers=1, kv_heads=2, head_dim=SIZE // 2)
TEXT_SPEC = jaxkv.CacheSpec.attention(**HEADS, rope=None)
SOURCE_SPEC = jaxkv.CacheSpec.cross_attention(**HEADS)
BOTH = jaxkv.CacheSpec.hybrid((TEXT_SPEC, [TEXT]), (SOURCE_SPEC, [CROSS]))


def make_both(streams=1):
    return jaxkv.make_cache(BOTH, cells=(32, 24), sequences=Q, streams=streams)


A, B, C, D = SOURCES = [[3, 4, 5, 6, 7], [8], [], [9, 2]]
TEXTS = {"a": [0, 5], "b": [0, 3, 4], "c": [0], "d": [3, 4], "e": [5], "f": [0, 7, 8], ".": []}
ABC = [TEXTS[name] for name in "abc"]


def encode(cache, lists, sequences):
    return jaxkv.encode(encoder, WEIGHTS, cache, make_batch(lists, sequences=sequences)).cache


def prefill_texts(cache, lists, sequences):
    batch = make_batch(lists, sequences=sequences)
    return jaxkv.prefill(forward, WEIGHTS, cache, batch)[:2]


@jax.jit
def next_logits(cache):
    """The logits of each sequence after a token 1."""
    everyone = jnp.arange(Q, dtype=jnp.int32)
    plan = jaxkv.plan_step(cache, jnp.ones_like(everyone), sequences=everyone, active=everyone >= 0)
    return forward(WEIGHTS, jaxkv.apply(cache, plan))[1], plan.ok


def assert_logits(logits, sources, texts):
    for row, *both in zip(logits, sources, texts, strict=True):
        np.testing.assert_allclose(row, compute_logits(*both), atol=2e-4, err_msg=str(both))


def check(cache, sources, texts):
    """Compare the next logits of all sequences, and check the invariants of the tables."""
    sources = [SOURCES["ABCD".index(one)] for one in sources]
    texts = [TEXTS[one] for one in texts]
    logits, ok = next_logits(cache)
    assert ok
    assert_logits(logits, sources, [[*text, 1] for text in texts])
    assert not any(map(int, cache.check().values()))
    assert lengths(cache) == [*map(len, sources)]


def lengths(cache):
    return (cache.parts[1].seq_pos_max(range(Q)) + 1).tolist()


@functools.cache
def fill_cache(streams=1):
    """Sources of several lengths, a sequence without a source, and one without text."""
    cache = encode(make_both(streams), [A, B, D], [0, 1, 3])
    return prefill_texts(cache, ABC, [0, 1, 2])[0]


@core
def test_encode_and_prefill_see_all_of_their_source():
    """And zeros for a sequence without a source; in one traced program too."""

    @jax.jit
    def traced(cache, source, text):
        cache, _, _, ok, _ = jaxkv.encode(encoder, WEIGHTS, cache, make_batch(source, sequences=1))
        batch = make_batch(text, sequences=1)
        _, logits, _, there, _ = jaxkv.prefill(forward, WEIGHTS, cache, batch)
        return logits, ok, there

    cache = encode(make_both(), [A, B, D], [0, 1, 3])
    cache, logits = prefill_texts(cache, ABC, [0, 1, 2])
    assert_logits(logits, SOURCES[:3], ABC)
    assert cache.seq_pos_max(range(Q)).tolist() == [1, 2, 0, -1]  # of the decoder
    assert cache.num_used_cells().item() == 6 + 8
    nothing = [np.zeros(1, int)] * 2
    assert cache.table.can_allocate(np.array([9, 9, 9, 5]), 4, nothing).all()
    logits, ok, there = traced(make_both(), jnp.array([4, 5, 6]), jnp.array([0, 2]))
    assert ok and there
    assert_logits(logits[:1], [[4, 5, 6]], [[0, 2]])
    assert not traced(cache, jnp.array([4, 5, 6]), jnp.array([0, 2]))[1]


@core
def test_encode_twice_traces_the_encoder_once():
    traces = []

    def counted(params, step):
        traces.append(step.tokens.shape)
        return encoder(params, step)

    for seq in (0, 1):
        jaxkv.encode(counted, WEIGHTS, make_both(), make_batch([1, 2], sequences=seq))
    assert len(traces) == 1


def remove_and_defrag(cache):
    cache, _ = jaxkv.seq_rm(cache, 0)
    return jaxkv.apply(cache, jaxkv.defrag_plan(cache))


def shift_context(cache):
    cache, _ = prefill_texts(cache, [[6, 7, 8]], [0])
    return generation.context_shift(cache, 0, num_keep=1, num_discard=2)[0]


def rewind_token(cache):
    return jaxkv.rewind(prefill_texts(cache, [[3]], [0])[0], to=cache.table)[0]


def save_and_load(cache, **options):
    data = jaxkv.snapshot.save(cache)
    if options:
        return jaxkv.snapshot.load(data, into=cache, **options)
    return jaxkv.snapshot.load(data)


traced_cp = jax.jit(lambda *args: jaxkv.seq_cp(*args).cache)
EDITS = json.loads((Path(__file__).parents[1] / "data" / "edits_of_sources.json").read_text())
"""Edits of `fill_cache` (ABCD and abc); sources and texts of all sequences after each."""


def apply_edit(cache, name):
    return eval(EDITS[name][0], NAMES | globals() | {"m": cache})


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("streams", mark_cases([1, 2, Q], core=[2]))
def test_edits_move_sources_with_whole_sequences(streams, name):
    """An edit of a part of a sequence does not change its source."""
    check(apply_edit(fill_cache(streams), name), *EDITS[name][1:])


@core
def test_seq_div_divides_positions_of_text_alone():
    cache, ok = jaxkv.seq_div(fill_cache(), 1, 0, -1, divisor=2)
    assert ok and lengths(cache) == lengths(fill_cache())
    assert [one.parts[0].seq_pos_max(1) for one in (fill_cache(), cache)] == [2, 1]


@core
def test_init_source_has_a_row_for_each_source():
    """Not one row for all: an encoder compares the tokens of a row."""
    batch = make_batch([A, B, D], sequences=[0, 1, 3])
    (ubatch,) = jaxkv.init_batch(make_both(), batch, encoder=True).ubatches
    plan = jax.jit(lambda cache: jaxkv.init_batch(cache, batch, encoder=True))
    assert ubatch.valid.shape == (4, 8)
    assert_identical(plan(make_both()).ubatches[0], ubatch)  # with static tokens
    rows = zip(ubatch.sequences, ubatch.valid, strict=True)
    assert sorted(sorted({*row[there].tolist()}) for row, there in rows) == [[], [0], [1], [3]]


def test_tables_of_sources_have_treedefs_of_their_own():
    """JAX compares only the fields of dataclasses: equal ones could share compiled programs."""
    table = make_both().table
    text, sources = table.parts
    for one, other in (
        (table, table.as_encoder_table()),
        (text, make_part(1).table),
        (text, sources),
    ):
        other = jax.tree.map(lambda _: 0, other)
        assert jax.tree.structure(one) != jax.tree.structure(other)


def encode_by(one):
    return jaxkv.encode(one, WEIGHTS, make_both(), make_batch([1]))


def as_encoder(verb, arrays):
    x = jnp.zeros((1, 1, 2, SIZE // 2))
    return encode_by(lambda params, step: verb(step, TEXT, *[x] * arrays))


def as_reader(verb, arrays, **options):
    step = jaxkv.apply(make_both(), jaxkv.init_batch(make_both(), make_batch([1])))
    return verb(step, CROSS, *[jnp.zeros((1, 1, 2, SIZE // 2))] * arrays, **options)


def make_part(i):
    return make_both().parts[i]


@pytest.mark.parametrize(("call", "outcome"), mistakes("sources"))
def test_sources_bad_call_raises(call, outcome):
    assert_raises(call, outcome, globals())


@core
def test_init_source_refused_names_reasons_and_changes_nothing():
    cache = fill_cache()
    with pytest.raises(
        jaxkv.PlanRefusedError,
        match="ENCODER_ALREADY_WRITTEN, expected no encoder source, got one of 5",
    ):
        encode(cache, [[1]], [0])
    plan = jaxkv.init_batch(cache, make_batch([[1] * 30, [2]], sequences=[2, 0]), encoder=True)
    reasons = [jaxkv.Reason(int(one)).name for one in plan.reason]
    assert reasons == ["ENCODER_ALREADY_WRITTEN", "OK", "OUT_OF_CELLS", "OK"]
    assert_identical(apply_plan(cache, plan), cache)
    reader = jaxkv.init_batch(cache, make_batch([1] * 40, sequences=0)).ubatches[0]
    q = jnp.ones((*reader.valid.shape, 2, SIZE // 2))
    assert not jaxkv.attend(jaxkv.apply(cache, reader), CROSS, q)[1].any()  # refused


def append(cache, lists, sequences):
    batch = make_batch(lists, sequences=sequences)
    return jaxkv.encode(encoder, WEIGHTS, cache, batch, append=True)


def assert_next(cache, *sources, texts="abca"):
    logits, ok = next_logits(cache)
    assert ok and not any(map(int, cache.check().values()))
    assert_logits(logits, sources, [[*TEXTS[name], 1] for name in texts])


@pytest.mark.parametrize("streams", mark_cases([1, 2, Q], core=[2]))
def test_append_adds_to_the_source_of_a_sequence_and_not_of_its_fork(streams):
    fork = jaxkv.seq_cp(fill_cache(streams), 0, 3).check()
    cache = append(fork, [[8, 9], D], [0, 2]).cache
    assert lengths(cache) == [7, 1, 2, 5]
    assert_next(cache, [A, [8, 9]], B, D, A)
    cache = append(save_and_load(cache), [[6], [7, 7]], [3, 0]).cache
    assert_next(cache, [A, [8, 9], [7, 7]], B, D, [A, [6]])
    gone, ok = jaxkv.seq_rm(cache, 0)
    assert ok and lengths(gone) == [0, 1, 2, 6]
    back, ok = jaxkv.rewind(append(fork, [[8, 9]], [0]).cache, to=fork.table)
    assert ok
    assert_next(back, A, B, C, A)


@core
def test_append_that_does_not_fit_changes_nothing_traced_too():
    cache = fill_cache()
    run = jax.jit(lambda *args: jaxkv.encode(encoder, WEIGHTS, *args, append=True))
    with pytest.raises(jaxkv.PlanRefusedError, match="OUT_OF_CELLS"):
        append(cache, [[1], [2] * 20], [0, 1])
    refused = run(cache, make_batch([[1], [2] * 20], sequences=[0, 1]))
    assert not refused.ok
    assert_identical(refused.cache, cache)
    made = run(cache, make_batch([[8, 9]], sequences=[0]))
    assert made.ok
    assert_next(made.cache, [A, [8, 9]], B, C, D, texts="abc.")


@core
def test_bias_hides_an_earlier_source_from_later_tokens():
    """As in a model whose tokens attend to the last image alone; positions continue."""
    cache = append(fill_cache(), [[8, 9]], [0]).cache
    (ubatch,) = jaxkv.init_batch(cache, make_batch([1], sequences=0)).ubatches

    def latest(query, cell, head):
        return jnp.where(cell >= len(A), 0.0, -jnp.inf) + 0.0 * (query + head)

    q = jnp.ones((*ubatch.valid.shape, 2, SIZE // 2))
    alone = encode(make_both(), [[8, 9]], [0])
    (other,) = jaxkv.init_batch(alone, make_batch([1], sequences=0)).ubatches
    _, found = jaxkv.attend(jaxkv.apply(cache, ubatch), CROSS, q, bias=latest)
    _, wanted = jaxkv.attend(jaxkv.apply(alone, other), CROSS, q)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@core
def test_edit_of_a_source_makes_plans_and_tables_stale():
    cache = fill_cache()
    (ubatch,) = jaxkv.init_batch(cache, make_batch([1], sequences=0)).ubatches
    read = encode(cache, [[7]], [2])
    assert cache.is_current(ubatch) and not read.is_current(ubatch)
    q = jnp.ones((*ubatch.valid.shape, 2, SIZE // 2))
    step = jaxkv.apply(cache, ubatch)
    shown, mask = jaxkv.read_kv(step, CROSS)[::2]
    owner = cache.parts[1].cells().owner
    assert shown.shape == (1, 2, 24, SIZE // 2) and mask[0, 0].tolist() == (owner[0] == 0).tolist()
    assert not np.isnan(jaxkv.attend(step, CROSS, q)[1]).any()
    for edited in (read, jaxkv.seq_rm(cache, 3)[0], jaxkv.clear(cache)):
        assert np.isnan(jaxkv.attend(jaxkv.apply(edited, ubatch), CROSS, q)[1]).all()
    plan = jaxkv.init_batch(cache, make_batch([7], sequences=2), encoder=True)
    assert not prefill_texts(cache, [[3]], [2])[0].is_current(plan.ubatches[0])
    gone, _ = jaxkv.seq_rm(cache, 1)  # its source's cells are overwritten
    assert not jaxkv.rewind(encode(gone, [[1]], [2]), to=cache.table)[1]


@core
def test_token_of_several_sequences_looks_at_their_one_source():
    cache = jaxkv.seq_cp(fill_cache(), 0, 3).cache
    tree = make_batch([[6], [7], [8]], sequences=[[0, 3], [0], [3]], outputs=[True] * 3)
    _, logits, *_ = jaxkv.prefill(forward, WEIGHTS, cache, tree)
    assert_logits(logits, [A] * 3, [[0, 5, 6], [0, 5, 6, 7], [0, 5, 6, 8]])
    apart = encode(make_both(), [[3, 4], [5]], [0, 1])  # the same text, another source
    plan = jaxkv.init_batch(apart, make_batch([[6]], sequences=[[0, 1]]))
    assert jaxkv.Reason(int(plan.reason[1])) == jaxkv.Reason.DIVERGED


def start_decode(*texts):
    """Prefill texts of sequences 0, 1, ... with sources A and B; the cache, logits and state."""
    cache = encode(make_both(), [A, B], [0, 1])
    ids = [*range(len(texts))]
    cache, logits = prefill_texts(cache, texts, ids)
    first = generation.init_decode(cache, logits=logits, sampler=BEST, sequences=ids)
    return cache, logits, first.state, first


def decode_greedily(source, text, count):
    for _ in range(count):
        text = [*text, int(np.argmax(compute_logits(source, text)))]
    return text[-count:]


@pytest.mark.nightly
def test_decode_and_beam_with_sources_say_as_the_formula():
    cache, logits, state, first = start_decode([0], [0])
    after, _, *_ = picked = jaxkv.decode(forward, WEIGHTS, cache, state, num_tokens=4, sampler=BEST)
    for q in range(2):
        assert [*first.tokens[q], *picked.tokens[q]] == decode_greedily(SOURCES[q], [0], 5)
    assert lengths(after)[:2] == [5, 1]
    options = {"num_beams": 2, "num_tokens": 3, "sequences": [1, 3]}
    after, *_ = beams = generation.beam(forward, WEIGHTS, cache, logits[1:], **options)
    assert lengths(after) == [5, 1, 0, 1]
    for tokens, score in zip(beams.tokens.tolist(), beams.scores, strict=True):
        rows = [compute_logits(B, [0, *tokens[:i]]) for i in range(3)]
        shares = [row[t] - np.log(np.exp(row).sum()) for row, t in zip(rows, tokens, strict=True)]
        np.testing.assert_allclose(score, sum(shares), atol=1e-3)


@pytest.mark.nightly
def test_speculate_branches_leave_other_sources_alone():
    """Sequence 1 has a source and no text; decoding is greedy."""
    cache, logits, state, _ = start_decode([0, 0])
    token = int(np.argmax(logits))
    guesses = generation.prompt_lookup([[token, 1, token, 2]], ngram=1, num_branches=2)
    options = dict(drafter=guesses, num_tokens=2, sampler=BEST)
    after, _, *_ = made = generation.speculate(forward, WEIGHTS, cache, state, **options)
    assert lengths(after) == [5, 1, 0, 0]
    assert made.tokens[0, :2].tolist() == decode_greedily(A, [0, 0, token], 2)


@core
def test_sources_beside_states():
    """Rows of one sequence each, though there is one pool."""
    states = recurrent_cache(1, {"n": ((), jnp.float32)}, sequences=Q)
    parts = enumerate([*make_both(1).parts, states])
    cache = compose_hybrid_cache(*((part, (i,)) for i, part in parts))
    cache = encode(cache, [A, B], [0, 1])

    @jax.jit
    def step(cache, ubatch):
        step, logits = forward(WEIGHTS, jaxkv.apply(cache, ubatch))
        after = jaxkv.read_states(step, 2)["n"] + step.valid.sum(axis=1)
        return jaxkv.write_states(step, 2, {"n": after[:, None]}).cache, logits

    plan = jaxkv.init_batch(cache, make_batch([[0, 1], [0, 3]]))
    cache, logits = step(cache, *plan.ubatches)
    assert_logits(plan.gather_outputs([logits]), (A, B), ([0, 1], [0, 3]))
    assert cache.seq_pos_max(range(Q)).tolist() == [1, 1, -1, -1]


@pytest.mark.nightly
def test_encode_prefill_and_select_on_a_mesh():
    mesh, name = mesh_of(streams=2, cells=2), "change places"
    with jax.set_mesh(mesh):
        rules = jaxkv.sharding.ShardingRules(streams="streams", cells="cells")
        cache = make_sharded(partial(make_both, 2), mesh, rules)
        cache, _ = prefill_texts(encode(cache, [A, B, D], [0, 1, 3]), ABC, [0, 1, 2])
        check(apply_edit(cache, name), *EDITS[name][1:])
        longer = append(cache, [[8, 9], [6]], [0, 3]).cache
        assert_next(longer, [A, [8, 9]], B, C, [D, [6]], texts="abc.")


@pytest.mark.parametrize("streams", mark_cases([1, 2, Q], core=[2]))
def test_insert_copies_sources_with_texts(streams):
    """Sequences come from one stream through a cache of two sequences, in another order."""
    cache = encode(make_both(), [A, B, D], [0, 1, 3])
    cache, _ = prefill_texts(cache, ABC, [0, 1, 2])
    cache = jaxkv.seq_cp(cache, 1, 3).check()  # sequences 1 and 3 share source and text
    check(cache, "ABCB", "abcb")
    away = jaxkv.extract(cache, [3, 0], cells=8).check()
    other, _ = prefill_texts(encode(make_both(streams), [D], [2]), [TEXTS["d"]], [1])
    other = jaxkv.insert(other, away, [0, 1], [2, 1]).check()
    other = jaxkv.insert(other, cache, [2, 3], [0, 3]).check()
    check(other, "CABB", "cabb")
    too_small = jaxkv.extract(cache, [0, 1], cells=5)  # 6 cells of sources
    assert not too_small.ok and not too_small.cache.num_used_cells()
