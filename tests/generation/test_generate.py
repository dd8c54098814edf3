"""`generate` equals `prefill`, `init_decode` and `decode`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import generation
from tests.generation.tiny import table_model
from tests.helpers.caches import assert_identical
from tests.helpers.meshes import mesh_of
from tests.helpers.mistakes import assert_raises, mistakes

pytestmark = pytest.mark.core

SPEC = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=1)
TABLE = jax.nn.softmax(2 * jax.random.normal(jax.random.key(0), (16, 16)))
PROMPTS = [[1, 2, 3], [4], [5, 6]]
WARM = generation.make_sampler(temperature=1.0)
generate = jaxkv.generate


def generate_texts(prompts=PROMPTS, **options):
    options = dict(spec=SPEC, max_new_tokens=9, stop_tokens=[7]) | options
    if "cache" in options:
        options.pop("spec")
    return jaxkv.generate(table_model, TABLE, prompts, **options)


def test_generate_equals_calls_in_a_row():
    cache = jaxkv.make_cache(SPEC, cells=64, sequences=3, streams=3)
    cache, logits, ids, *_ = jaxkv.prefill(table_model, TABLE, cache, PROMPTS)
    picking = dict(sampler=WARM, stop_tokens=[7])
    options = dict(sequences=ids, max_new_tokens=9, seed=3, prompts=PROMPTS, **picking)
    first = generation.init_decode(cache, logits=logits, **options)
    rest = jaxkv.decode(table_model, TABLE, cache, first.state, num_tokens=8, **picking)
    out = generate_texts(sampler=WARM, seed=3)
    np.testing.assert_array_equal(out.tokens, np.concatenate([first.tokens, rest.tokens], axis=1))
    assert_identical(out.cache.table, rest.cache.table)
    assert out.finish_reason.tolist() == rest.finish_reason.tolist()
    padded = np.stack([np.pad(text, (1, 9 - len(text)), constant_values=-1) for text in PROMPTS])
    assert generate_texts(padded, sampler=WARM, seed=3).lists() == out.lists()


def test_generate_makes_cells_for_its_longest_prompt():
    assert [*map(len, generate_texts([[1], [15] * 65], max_new_tokens=1).lists())] == [1, 1]


def test_generate_on_tokens_streams_same_texts():
    heard = {text: [] for text in range(3)}
    calls = []

    def on_tokens(text, tokens):
        calls.append(len(tokens))
        heard[text] += tokens

    wanted = generate_texts(sampler=WARM)
    out = generate_texts(sampler=WARM, on_tokens=on_tokens, tokens_per_call=3)
    assert [*heard.values()] == out.lists() == wanted.lists()
    assert max(calls) == 3 and out.tokens.shape == wanted.tokens.shape == (3, 9)
    np.testing.assert_allclose(out.logprobs, wanted.logprobs, atol=1e-6)


def test_generate_with_drafter_has_same_texts_and_counts_of_all_calls():
    drafter = generation.prompt_lookup(PROMPTS, ngram=1, num_draft_tokens=2)
    out = generate_texts(drafter=drafter, on_tokens=lambda *_: None, tokens_per_call=3)
    counts = out.num_model_steps + out.num_accepted
    assert counts.tolist() == [len(text) - 1 for text in out.lists()]
    assert out.lists() == generate_texts().lists() and out.num_drafted.shape == (3,)


def test_generate_samples_fork_their_prompt():
    out = generate_texts(PROMPTS[:2], sampler=WARM, num_samples=2, seed=[1, 2, 1, 5])
    assert out.lists()[1::2] == generate_texts(PROMPTS[:2], sampler=WARM, seed=[2, 5]).lists()


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(3, id="number"),
        pytest.param(jax.random.key(3), id="key", marks=pytest.mark.nightly),
    ],
)
def test_generate_sample_does_not_depend_on_neighbours(seed):
    few = generate_texts(PROMPTS[:2], sampler=WARM, seed=seed, num_samples=2).lists()
    many = generate_texts(sampler=WARM, seed=seed, num_samples=3).lists()
    alone = generate_texts(sampler=WARM, seed=seed).lists()
    assert few == [many[i] for i in (0, 1, 3, 4)] and alone == many[::3]
    assert len({tuple(tokens) for tokens in many}) == len(many)


def test_generate_samples_replace_what_their_sequences_held():
    cache = jaxkv.make_cache(SPEC, cells=64, sequences=2)
    cache, *_ = jaxkv.prefill(table_model, TABLE, cache, jaxkv.make_batch([8, 9, 8], sequences=1))
    out = generate_texts(PROMPTS[:1], cache=cache, num_samples=2)
    fresh = generate_texts(
        PROMPTS[:1], cache=jaxkv.make_cache(SPEC, cells=64, sequences=2), num_samples=2
    )
    assert out.lists() == fresh.lists()
    assert out.cache.num_used_cells() == fresh.cache.num_used_cells()


def test_generate_continues_cache_and_leaves_it():
    cache = jaxkv.make_cache(SPEC, cells=64, sequences=4)
    cache, *_ = jaxkv.prefill(table_model, TABLE, cache, [[8, 9], [8]])
    before = jax.tree.map(np.array, cache)
    out = generate_texts(PROMPTS[:2], cache=cache)
    assert out.lists() == generate_texts(PROMPTS[:2]).lists()  # the model uses the last token only
    assert_identical(cache, before)
    made = [len(tokens) for tokens in out.lists()]
    ends = [2 + 3 + made[0] - 2, 1 + 1 + made[1] - 2]  # the last token is in no cell
    assert out.cache.seq_pos_max([0, 1]).tolist() == ends


def test_generate_full_cache_ends_texts_by_name_and_warns_once():
    with pytest.warns(UserWarning, match="got 3 OUT_OF_CELLS of 3 sequences; ") as warned:
        out = generate_texts(cache=jaxkv.make_cache(SPEC, cells=8, sequences=3), stop_tokens=())
    assert len(warned) == 1 and "jaxkv/generation" not in warned[0].filename  # that of the caller
    reasons = [jaxkv.Reason(reason).name for reason in out.finish_reason.tolist()]
    assert set(reasons) == {"OUT_OF_CELLS"}
    assert repr(out).endswith("finish_reason=[OUT_OF_CELLS, OUT_OF_CELLS, OUT_OF_CELLS])")
    assert "tokens=int32[3,9]" in repr(out) and "state=DecodeState" in repr(out)
    with pytest.raises(jaxkv.PlanRefusedError, match="OUT_OF_CELLS"):
        generate_texts(cache=jaxkv.make_cache(SPEC, cells=4, sequences=3))


def test_generate_nonfinite_logits_warns():
    table = TABLE.at[7].set(jnp.nan)  # after token 7
    prompts = [[7], *[[1]] * 9]
    with pytest.warns(UserWarning, match="got 1 NONFINITE_LOGITS of 10 sequences; "):
        out = jaxkv.generate(table_model, table, prompts, spec=SPEC, max_new_tokens=1)
    assert repr(out).endswith("finish_reason=[9 OK, 1 NONFINITE_LOGITS])")


@pytest.mark.nightly
def test_generate_on_mesh_same_texts():
    prompts, mesh = [*PROMPTS, [9]], mesh_of(data=2)
    with jax.set_mesh(mesh):
        cache = jaxkv.make_cache(SPEC, cells=64, sequences=4, streams=2, mesh=mesh)
        out = generate_texts(prompts, cache=cache)
    assert out.cache.buffers.k[0].addressable_shards[0].data.shape == (1, 1, 64, 1)
    assert out.lists() == generate_texts(prompts).lists()


@pytest.mark.parametrize(("call", "outcome"), mistakes("generate"))
def test_generate_bad_argument_raises(call, outcome):
    assert_raises(call, outcome, globals())
