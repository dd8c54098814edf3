"""What is added to logits, and how far each token sees: against attention written down in NumPy.

The oracle knows texts and no cells: which tokens a sequence holds, at which positions.
"""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.tree_util import Partial

import jaxkv
from jaxkv import make_batch
from jaxkv.ops.attention.sight import mask_of
from jaxkv.window import chunked, first_seen, sliding, symmetric
from tests.meshes import RULES, mesh_of, placed
from tests.sights import sight_of_mask

core = pytest.mark.core
H, K, D, Q = 4, 2, 8, 4
EACH = {0: 1, 1: 1, 2: 1}
CLOSE = dict(rtol=0, atol=2e-6)
BUCKETS, FARTHEST = 8, 20


# ------------------------------------------------------------------------------------- some biases


def alibi(query, key, head):
    """Press et al.: logits fall with distance, in each head at a rate of its own."""
    return -(0.5 ** (head + 1.0)) * abs(query - key)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Relative:
    """T5: a table of distances, near ones each for itself and far ones together; `[BUCKETS, H]`."""

    table: jax.Array

    def __call__(self, query, key, head):
        away, exact = jnp.maximum(query - key, 0), BUCKETS // 2
        far = jnp.log(jnp.maximum(away, 1) / exact) / np.log(FARTHEST / exact)
        far = exact + (far * (BUCKETS - exact)).astype(jnp.int32)
        return self.table[jnp.where(away < exact, away, jnp.minimum(far, BUCKETS - 1)), head]


def bent(weights, query, key, head):
    """A function with no derivative, nor a value, where a cell lies far ahead of its token."""
    return weights[head] * jnp.log1p((query - key).astype(jnp.float32))


TABLE = jnp.asarray(np.random.default_rng(5).normal(size=(BUCKETS, H)), jnp.float32)
BIASES = {
    None: None,
    "alibi": alibi,
    "t5": Relative(TABLE),
    "weights": Partial(bent, TABLE[0]),
}


@cache
def every(name):
    """A bias for all positions that the tests come to, and heads: `[query, key, H]`."""
    at, heads = jnp.arange(40), jnp.arange(H)
    return np.asarray(BIASES[name](at[:, None, None], at[None, :, None], heads[None, None]))


def as_array(name, memory, ubatch, until):
    """The same as an array of cells, with a NaN where a token sees none."""
    _, _, mask, position = map(np.asarray, jaxkv.view(memory, 0, ubatch, until=until))
    at = np.asarray(ubatch.positions).reshape(mask.shape[:2])
    added = every(name)[at[..., None], position[:, None]]  # [P, T, N, H]
    added = np.where(mask[..., None], added, np.nan).swapaxes(2, 3)
    return added.reshape(*ubatch.valid.shape, H, -1)


# -------------------------------------------------------------------------------------- the oracle


class Texts:
    """A memory, and beside it what its sequences hold: `(position, key, value)` of each token."""

    def __init__(self, *, streams=1, window=None, seed=0, dtype=jnp.float32, place=lambda m: m):
        self.memory = place(
            jaxkv.make_kv_cache(
                layers=1, cells=32, kv_heads=K, head_dim=D, sequences=Q,
                streams=streams, window=window, dtype=dtype,
            )
        )  # fmt: skip
        self.window, self.dtype = window, dtype
        self.held = {seq: [] for seq in range(Q)}
        self.rng = np.random.default_rng(seed)

    def feed(self, counts, bias=None, until=None, size=None, close=CLOSE, array=False, **options):
        """Attend from so many tokens more of each sequence, and compare all of them.

        `bias` is one of the names above, `until` is of the sequence and the position.
        """
        batch = make_batch([[1] * n for n in counts.values()], sequences=[*counts])
        plan = jaxkv.init_batch(self.memory, batch, ubatch_size=size).check()
        for ubatch in plan.ubatches:
            memory = jaxkv.apply(self.memory, ubatch)
            seqs, last = np.asarray(ubatch.sequences), np.asarray(ubatch.positions)
            new = [self.rng.normal(size=(*seqs.shape, n, D)).astype(self.dtype) for n in (H, K, K)]
            q, k, v = (x.astype(np.float64) for x in new)
            tokens = [
                (seqs[r, t], last[r, t], (r, t)) for r, t in np.argwhere(np.asarray(ubatch.valid))
            ]
            for seq, at, i in tokens:
                self.held[seq].append((at, k[i], v[i]))
            if until is not None:
                last = np.vectorize(until)(seqs, last).astype(np.int32)
                options["until"] = last
            given = as_array(bias, memory, ubatch, options.get("until")) if array else BIASES[bias]
            self.memory, out = jaxkv.attend(memory, 0, ubatch, *new, bias=given, **options)
            assert out.dtype == self.dtype
            out = np.asarray(out, np.float64)
            for seq, at, i in tokens:
                wanted = self.of_token(seq, at, last[i], q[i], bias)
                np.testing.assert_allclose(out[i], wanted, **close)
        return self

    def of_token(self, seq, at, last, q, bias):
        first = int(first_seen(self.window, jnp.int32(at))) if self.window else 0
        seen = [token for token in self.held[seq] if first <= token[0] <= last]
        out = np.zeros((H, D))
        for head in range(H if seen else 0):
            position, k, v = (np.array(x) for x in zip(*seen, strict=True))
            logits = k[:, head // (H // K)] @ q[head] / D**0.5
            if bias is not None:
                logits = logits + every(bias)[at, position, head]
            weights = np.exp(logits - logits.max())
            out[head] = weights @ v[:, head // (H // K)] / weights.sum()
        return out

    def fork(self, src, dst):
        self.memory = jaxkv.seq_cp(self.memory, src, dst)
        self.held[dst] = [*self.held[src]]
        return self

    def cut(self, seq, p0, p1):
        self.memory, ok = jaxkv.seq_rm(self.memory, seq, p0, p1)
        assert ok
        self.held[seq] = [token for token in self.held[seq] if not p0 <= token[0] < p1]
        return self

    def shift(self, seq, p0, by):
        """Keys carry no rotation here: nothing but positions changes."""
        memory = jaxkv.seq_add(self.memory, seq, p0, -1, by)
        self.memory = jaxkv.apply(memory, jaxkv.init_update(memory))
        self.held[seq] = [(at + by * (at >= p0), k, v) for at, k, v in self.held[seq]]
        return self


def live(texts, bias, **options):
    """Prompts at once and in parts, a fork, a hole, a shift, and tokens one by one."""
    feed = partial(texts.feed, bias=bias, **options)
    feed({0: 5, 1: 3})
    feed({1: 6}, size=3)
    texts.fork(0, 2).cut(0, 1, 3)
    feed(EACH)
    texts.shift(1, 3, 4)
    for _ in range(2):
        feed(EACH)


@pytest.mark.core
def test_a_bias_is_added_to_prompts_in_ubatches_and_to_tokens():
    Texts().feed({0: 5, 1: 3}, "t5").feed({1: 6}, "t5", size=3).feed(EACH, "t5")


@core
@pytest.mark.parametrize(
    ("name", "array"), [("t5", False), ("alibi", False), ("weights", False), ("t5", True)]
)
def test_a_bias_is_added_at_every_step_of_a_life(name, array):
    live(Texts(), name, array=array)


def test_trap_55_a_bias_follows_shifted_positions_and_keys_stay():
    texts = Texts().feed({0: 3}, "alibi")
    before = np.asarray(texts.memory.buffers.k[0])
    texts.shift(0, 1, 7)
    np.testing.assert_array_equal(texts.memory.buffers.k[0], before)
    texts.feed(EACH, "alibi")


@core
@pytest.mark.parametrize(
    ("implementation", "streams"), [(None, 2), (None, Q), ("tiles", 2), ("whole", 2), ("xla", 2)]
)
def test_every_implementation_and_stream(implementation, streams):
    texts = Texts(streams=streams)
    for array in (False, True):
        feed = partial(texts.feed, bias="t5", array=array, implementation=implementation)
        feed({0: 3, 1: 2, 3: 4})
        feed({0: 1, 3: 1})


# ----------------------------------------------------------------------------------- how far ahead


def prefix(seq, at):
    """The first four tokens of a text see each other."""
    return max(at, 3)


def test_tokens_see_ahead_and_no_further():
    texts = Texts().feed({0: 6, 1: 2}, until=prefix).feed({0: 2, 1: 1}, until=prefix)
    texts.feed(EACH, until=lambda seq, at: at - 1)  # and less than itself, or nothing
    texts.feed({1: 4}, until=lambda seq, at: at + 1)


def test_a_view_shows_as_far():
    texts = Texts()
    (ubatch,) = jaxkv.init_batch(texts.memory, make_batch([[1] * 3, [1]])).ubatches
    memory = jaxkv.apply(texts.memory, ubatch)
    until = jnp.where(ubatch.sequences == 0, 1, ubatch.positions)
    mask = jaxkv.view(memory, 0, ubatch, until=until).mask[0, :, :4]
    wanted = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(mask, np.array(wanted, bool))


@core
@pytest.mark.parametrize("implementation", [None, "tiles", "whole", "pallas", "xla"])
def test_every_implementation_sees_ahead(implementation):
    texts = Texts(streams=2)
    for _ in range(2):
        texts.feed({0: 6, 1: 2, 3: 1}, until=prefix, implementation=implementation)


@core
@pytest.mark.parametrize("window", [sliding(3), chunked(4)], ids=str)
def test_windows_reach_back_from_the_token_itself(window):
    texts = Texts(window=window).feed({0: 6, 1: 2}, "alibi", until=prefix)
    texts.feed({0: 4, 1: 4}, "alibi", until=lambda seq, at: 8)


@core
def test_a_symmetric_window_reaches_ahead_no_further_than_else():
    sight = sight_of_mask(np.ones((1, 3, 9), bool), [0], 1)
    sight = replace(
        sight,
        position=jnp.arange(9)[None],
        at=jnp.array([[2, 4, 6]]),
        until=jnp.array([[3, 8, 5]]),
        window=symmetric(4),
    )
    seen = [np.flatnonzero(row).tolist() for row in mask_of(sight)[0]]
    assert seen == [[0, 1, 2, 3], [2, 3, 4, 5, 6], [4, 5]]


# ------------------------------------------------------------------------------ no numbers, refused


def hiding(query, key, head):
    """The second head looks at nothing, the third at position 0 alone."""
    hidden = (head == 1) | ((head == 2) & (key > 0))
    return jnp.where(hidden, -jnp.inf, 0.0)


@pytest.mark.parametrize(
    "implementation",
    [None, *(pytest.param(name, marks=core) for name in ("tiles", "whole", "xla"))],
)
def test_minus_infinity_hides_and_what_is_no_number_shows(implementation):
    memory = Texts().memory
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1] * 3)).ubatches
    memory = jaxkv.apply(memory, ubatch)
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(*ubatch.valid.shape, n, D)).astype(np.float32) for n in (H, K, K))
    call = partial(jaxkv.attend, memory, 0, ubatch, q, k, v, implementation=implementation)
    usual, out = np.asarray(call()[1]), np.asarray(call(bias=hiding)[1])
    np.testing.assert_allclose(out[:, :, [0, 3]], usual[:, :, [0, 3]], **CLOSE)
    assert not out[:, :, 1].any()
    np.testing.assert_allclose(out[0, :3, 2], np.broadcast_to(v[0, :1, 1], (3, D)), **CLOSE)
    broken = np.zeros((1, 1, H, 32), np.float32)
    broken[0, 0, 3, 1], broken[0, 0, 0, 2] = np.nan, np.inf
    out = np.asarray(call(bias=broken)[1])[0, :3]
    no_number = np.isnan(out)
    assert (no_number.all(-1) == no_number.any(-1)).all()
    wanted = [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 1]]
    np.testing.assert_array_equal(no_number.all(-1), np.array(wanted, bool))
    edited, _ = jaxkv.seq_rm(memory, 0, 2, 3)
    stale = jaxkv.attend(edited, 0, ubatch, q, bias=hiding, implementation=implementation)[1]
    assert np.isnan(stale[0, :3]).all()


@core
def test_a_weight_may_be_a_number():
    memory = Texts().memory
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1] * 3)).ubatches
    memory, q = jaxkv.apply(memory, ubatch), jnp.ones((*ubatch.valid.shape, H, D))
    k = jnp.arange(ubatch.valid.size * K * D, dtype=jnp.float32).reshape(*q.shape[:2], K, D) / 40
    number, array = (
        jaxkv.attend(
            memory, 0, ubatch, q, k, k, bias=Partial(lambda w, query, key, head: w * key, w)
        )
        for w in (0.5, jnp.float32(0.5))
    )
    np.testing.assert_array_equal(number[1], array[1])


def test_mistakes_are_named():
    memory = Texts().memory
    (ubatch,) = jaxkv.init_batch(memory, make_batch([1] * 3)).ubatches
    memory, shape = jaxkv.apply(memory, ubatch), ubatch.valid.shape
    q = jnp.ones((*shape, H, D))

    def call(**options):
        return jaxkv.attend(memory, 0, ubatch, q, **options)

    zeros = jnp.zeros((1, 1, H, 32))
    until = jnp.zeros(shape, jnp.int32)
    for error, message, options in (
        (ValueError, "'pallas' adds no bias: leave the implementation to jaxkv, or take",
         {"bias": alibi, "implementation": "pallas"}),
        (ValueError, "'cudnn' adds no bias", {"bias": zeros, "implementation": "cudnn"}),
        (ValueError, r"broadcasts to \[R, T, H, N\] of \(1, \d, 4, 32\), got \(1, 1, 2, 32\)",
         {"bias": zeros[:, :, :2]}),
        (ValueError, r"broadcasts to \[R, H, T, N\] of \(1, 4, \d, 32\), got \(\)",
         {"bias": lambda query, key, head: 1.0 * jnp.max(key)}),
        (TypeError, "wanted a bias of floats, got int32",
         {"bias": lambda query, key, head: query - key}),
        (TypeError, "wanted a bias of floats, got bool", {"bias": zeros > 0}),
        (TypeError, "wanted a bias as a function or as an array, got <class 'float'>",
         {"bias": 1.0}),
        (TypeError, "returns an array, got 2", {"bias": lambda query, key, head: (query, key)}),
        (ValueError, "wanted until or causal=False, got both", {"until": until, "causal": False}),
        (ValueError, r"wanted until \[R, T\] of .*, got \(1, 1\)", {"until": until[:, :1]}),
        (TypeError, "wanted integers for until, got float32", {"until": until * 1.0}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call(**options)

    def of(weights):
        return call(bias=lambda query, key, head: weights[head] * (query - key))[1].sum()

    for transformed in (jax.jit(of), jax.grad(of)):
        with pytest.raises(TypeError, match="closes over traced arrays: pass .*Partial"):
            transformed(TABLE[0])


# ----------------------------------------------------------------------------- meshes, other dtypes


@core
@pytest.mark.parametrize(
    ("mode", "axes", "streams"),
    [
        (AxisType.Auto, {"tensor": 2, "cells": 4}, 1),
        (AxisType.Auto, {"data": 2, "tensor": 2, "cells": 2}, 2),
        (AxisType.Explicit, {"data": 2, "tensor": 2}, 2),
    ],
    ids=str,
)
def test_on_a_mesh(mode, axes, streams):
    """Heads have their own numbers and columns, cells their own part of an array."""
    with jax.set_mesh(mesh_of(mode, **axes)):
        texts = Texts(streams=streams, place=partial(placed, rules=RULES))
        for array in (False, True):
            feed = partial(texts.feed, bias="t5", array=array)
            feed({0: 2, 1: 2, 2: 2, 3: 1}, until=prefix)
            feed({3: 1, 0: 1})


@core
@pytest.mark.parametrize("implementation", ["tiles", "whole", "xla"])
def test_bfloat16(implementation):
    coarse = dict(rtol=2e-2, atol=2e-2)
    options = {"bias": "t5", "close": coarse, "implementation": implementation}
    Texts(dtype=jnp.bfloat16).feed({0: 5, 1: 3}, **options).feed({0: 4, 1: 4}, **options)


@core
def test_float64():
    jax.config.update("jax_enable_x64", True)
    try:
        exact = dict(rtol=0, atol=1e-12)
        texts = Texts(dtype=jnp.float64).feed({0: 5, 1: 2}, "t5", until=prefix, close=exact)
        texts.feed({0: 1}, "t5", close=exact)
    finally:
        jax.config.update("jax_enable_x64", False)
