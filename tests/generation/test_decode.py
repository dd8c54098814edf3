"""Decoding: what each text says, where it ends and why, and what a draw depends on."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import loops, make_batch
from jaxkv.loops.sampling import constrained, make_sampler
from tests.generation.tiny import BEST, assert_sound, ends, forward
from tests.memories import SMALL, SPLIT, VOCABULARY, assert_identical, filled

pytestmark = pytest.mark.core


def decoded(memory, state, stop=(), *, steps, sampler=BEST, model=forward):
    return jaxkv.decode(model, sampler, None, memory, state, stop, steps=steps)


@partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=())
@dataclass(frozen=True, eq=False)
class Counting(loops.sampling.Sampler):
    def start(self, prompts):
        return np.zeros(len(prompts), np.int32)

    def adjust(self, logits, state):
        return jnp.where(jnp.arange(logits.shape[1])[None] == state[:, None], 0, -jnp.inf)

    def follow(self, state, tokens):
        return state + 1


def test_begin_reads_lists_and_asks_nothing_of_empty_texts():
    state, first = loops.begin(BEST, filled(2), [[0.0, 2.0, 1.0]], stop=frozenset([1, 2]))
    assert first.tokens.tolist() == [[1]] and not state.active.any()
    for sequences, limit in (([1], 3), ([0, 1], [0, 1])):  # sequence 1 has no logits of its own
        logits = jnp.zeros((len(sequences), 5))
        state, _ = loops.begin(BEST, filled(0, 2), logits, sequences=sequences, limit=limit)
        assert state.active.tolist() == [limit == 3] * len(sequences)


@pytest.mark.parametrize("sampler", ["rule", "penalties"])
def test_start_and_begin_count_the_first_token(sampler):
    if sampler == "rule":
        rising = dict(allowed=lambda n: jnp.arange(VOCABULARY) > n, advance=lambda n, token: token)
        sampler = constrained(BEST, first=-1, **rising)
    else:
        sampler = make_sampler(presence_penalty=9.0, frequency_penalty=2.0)
    memory, logits = jaxkv.prefill(forward, None, filled(2, 1), make_batch([[3], [4]]))
    state, first = loops.begin(sampler, memory, logits, prompts=[[3], [4]])
    again = loops.start(memory, first.tokens[:, 0], sampler=sampler, prompts=[[3], [4]])
    wanted, found = (
        decoded(memory, one, steps=5, sampler=sampler)[2].tokens for one in (state, again)
    )
    np.testing.assert_array_equal(found, wanted)


def test_start_draws_are_numbered_by_position():
    sampler = make_sampler(temperature=1.0)
    memory = filled(3, 2)
    state = loops.start(memory, [1, 2], seed=[7, 8], limit=[4, 1])
    assert state.draw.tolist() == [4, 3]
    after, state, _ = decoded(memory, state, steps=3, sampler=sampler)
    assert state.draw.tolist() == [7, 4]
    again = loops.start(after, state.token, seed=[7, 8], limit=[1, 0])
    assert again.draw.tolist() == [7, 4]
    rest, same = (
        decoded(after, one, steps=3, sampler=sampler)[2].tokens.tolist() for one in (state, again)
    )
    assert rest == same and rest[0][0] >= 0


def test_decode_in_pieces_has_logprobs_of_the_model():
    sampler = make_sampler(temperature=3.0, top_k=5, repeat_penalty=1.3, last_n=4)
    memory, logits = jaxkv.prefill(forward, None, filled(), make_batch([1, 2, 3]))
    options = dict(seed=3, prompts=[[1, 2, 3]], limit=7)
    state, first = loops.begin(sampler, memory, logits, **options)
    pieces, now, rest = [first], memory, state
    for _ in range(3):
        now, rest, picked = decoded(now, rest, steps=2, sampler=sampler)
        pieces.append(picked)
    _, _, whole = decoded(memory, state, steps=6, sampler=sampler)
    text, logprobs = (np.concatenate(one, axis=1)[0] for one in zip(*pieces, strict=True))
    np.testing.assert_array_equal(text[1:], whole.tokens[0])
    batch = make_batch([1, 2, 3, *text.tolist()], outputs=np.ones(len(text) + 3, bool))
    _, logits = jaxkv.prefill(forward, None, filled(), batch)
    wanted = jax.nn.log_softmax(logits)[np.arange(2, len(text) + 2), text]
    np.testing.assert_allclose(logprobs, wanted, atol=1e-5)


def test_decode_ends_by_limit_or_own_stop_token():
    memory = filled(1, 1, 1)
    state = loops.start(memory, [9, 8, 7], [2, 0, 1], limit=[2, 9, 9], sampler=Counting())
    stop = [[-1, -1], [4, 2], [-1, 4]]
    none = [-1] * 3
    for wanted in ([[1, 2, -1], [1, 2, -1], [1, 2, 3]], [none, none, [4, -1, -1]], [none] * 3):
        memory, state, picked = decoded(memory, state, stop, steps=3, sampler=Counting())
        assert picked.tokens.tolist() == wanted
    assert ends(memory, [2, 0, 1]) == [2, 2, 4]
    assert not state.active.any() and not state.reason.any()
    assert state.left.tolist() == [0, 7, 5]


def test_decode_nan_logits_end_one_text():
    def broken(weights, memory, ubatch):
        memory, logits = forward(weights, memory, ubatch)
        return memory, logits.at[1].set(jnp.nan)

    memory = filled(1, 1)
    state = loops.start(memory, [1, 2])
    _, state, picked = decoded(memory, state, steps=3, model=broken)
    assert picked.tokens[1].tolist() == [-1, -1, -1] and (picked.tokens[0] >= 0).all()
    np.testing.assert_array_equal(np.isnan(picked.logprobs), [[False] * 3, [True, False, False]])
    assert state.active.tolist() == [True, False]


@pytest.mark.parametrize("kind", [SMALL, SPLIT], ids=["pool", "streams"])
def test_decode_full_memory_ends_texts_without_room(kind):
    """The others go on, each as it would alone; where there is one pool, the first ones do."""
    cells = kind.cells
    counts = (2, cells - 2, 1) if kind is SPLIT else (1, cells - 6, 1)
    memory = filled(*counts, kind=kind)
    state = loops.start(memory, [1, 2, 3], limit=6)
    after, state, picked = decoded(memory, state, steps=6)
    made = (picked.tokens >= 0).sum(axis=1).tolist()
    assert made == ([6, 2, 6] if kind is SPLIT else [2, 1, 1])
    reasons = [0, 1, 0] if kind is SPLIT else [1, 1, 1]
    assert state.reason.tolist() == [jaxkv.Reason(reason) for reason in reasons]
    assert not state.active.any()
    assert_sound(after)
    for seq in range(3):
        alone = loops.start(memory, [seq + 1], [seq], limit=made[seq])
        _, _, text = decoded(memory, alone, steps=6)
        assert text.tokens[0].tolist() == picked.tokens[seq].tolist()
        np.testing.assert_allclose(text.logprobs[0], picked.logprobs[seq], atol=1e-5)


def test_decode_refused_text_has_reason():
    memory = jaxkv.seq_add(filled(3, 3), 1, 0, -1, 2)
    state = loops.start(memory, [1, 2], limit=2)
    memory, state, picked = decoded(memory, state, steps=2)
    assert state.reason.tolist() == [jaxkv.Reason.FITS, jaxkv.Reason.UPDATE_PENDING]
    assert (picked.tokens[0] >= 0).all() and (picked.tokens[1] == -1).all()
    assert jaxkv.seq_pos_max(memory, 1) == 4 and state.token[1] == 2


def test_decode_bad_traced_sequences_end_texts():
    @jax.jit
    def loop(memory, sequences):
        return decoded(memory, loops.start(memory, jnp.array([1, 2]), sequences, limit=2), steps=2)

    for sequences, reason in (([1, 1], "DUPLICATE"), ([0, 9], "UNKNOWN_SEQUENCE")):
        memory, state, picked = loop(filled(2, 3), jnp.array(sequences))
        assert (picked.tokens == -1).all() and not state.active.any()
        assert {jaxkv.Reason(int(x)).name for x in state.reason} == {reason}
        assert_identical(memory, filled(2, 3))
