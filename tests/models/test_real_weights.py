"""SmolLM2 and Gemma 3 with real weights, in float32, against recorded runs of llama.cpp."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.models.golden import check_logits, read_golden

# The tolerance of logits, and the lead that a token needs to be the same in any rounding.
WITHIN = {"smollm2": 1e-3, "gemma3": 3e-2}
SURE = {"smollm2": 2e-3, "gemma3": 3e-2}


def test_smollm2_generates_recorded_tokens(smollm2):
    """The greedy tokens after a prompt; not in a loop, which would be compiled."""
    record = read_golden("models")["smollm2"][1]
    tokens = record["tokens"] + record["greedy"][:3]
    batch = jaxkv.make_batch(tokens, outputs=np.ones(len(tokens), bool))
    cache = smollm2.make_cache(cells=64)
    (ubatch,) = jaxkv.init_batch(cache, batch).check().ubatches
    _, logits = smollm2.forward(smollm2.params, jaxkv.apply(cache, ubatch))
    rows = np.asarray(logits)[len(record["tokens"]) - 1 :]
    check_logits(rows[0], record["first"], record["sample_ids"], within=1e-3)
    assert rows.argmax(axis=-1).tolist() == record["greedy"][:4]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_texts_have_recorded_logits_and_tokens(request, name):
    model = request.getfixturevalue(name)
    for record in read_golden("models")[name]:
        tokens, greedy = record["tokens"] + record["greedy"], np.array(record["greedy"])
        outputs = np.arange(len(tokens)) >= len(record["tokens"]) - 1
        cache = model.make_cache(cells=1280, ubatch_size=64)
        batch, run = jaxkv.make_batch(tokens, outputs=outputs), (model.forward, model.params)
        rows = np.asarray(jaxkv.prefill(*run, cache, batch, ubatch_size=64)[1])
        check_logits(rows[0], record["first"], record["sample_ids"], within=WITHIN[name])
        check_logits(rows[-1], record["last"], record["sample_ids"], within=WITHIN[name])
        best, sure = rows[:-1].argmax(axis=-1), np.array(record["margins"]) > SURE[name]
        assert sure.sum() > 10 and (best == greedy)[sure].all(), record["prompt"]


@pytest.mark.nightly
def test_smollm2_in_half_precision_stays_close(smollm2):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), smollm2.params)
    record = read_golden("models")["smollm2"][0]
    cache = smollm2.make_cache(cells=64, dtype=jnp.bfloat16)
    batch = jaxkv.make_batch(record["tokens"])
    _, logits, *_ = jaxkv.prefill(smollm2.forward, params, cache, batch)
    assert logits.dtype == jnp.float32
    assert int(logits[0].argmax()) == record["greedy"][0]
    found = np.asarray(logits)[0, record["sample_ids"]]
    np.testing.assert_allclose(found, record["first"]["at"], atol=0.5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "dtype", "streams", "full_windows", "ubatch_size", "within"),
    [
        ("smollm2", "float32", 1, False, 256, 0.01),
        ("smollm2", "int8", 1, False, 256, 0.067),  # within 0.5 percent
        ("gemma3", "int8", 1, False, 256, 0.073),  # within 0.8 percent
        ("gemma3", "float32", 2, False, 512, 0.02),
        ("gemma3", "float32", 1, True, 64, 0.02),
    ],
)
def test_perplexity_of_a_long_text_matches_recorded(
    request, name, dtype, streams, full_windows, ubatch_size, within
):
    """Logits of the whole text would be 1.6 GB, so only the losses leave the device."""
    record, model = read_golden("models")[f"{name}_nll"], request.getfixturevalue(name)
    tokens = np.asarray(record["tokens"], np.int32)
    options = dict(cells=1536, sequences=streams, streams=streams, ubatch_size=ubatch_size)
    cache = model.make_cache(full_windows=full_windows, dtype=dtype, **options)

    @partial(jax.jit, donate_argnames="cache")
    def score(params, cache, ubatch, targets):
        step, logits = model.forward(params, jaxkv.apply(cache, ubatch))
        hit = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return step.cache, jax.nn.logsumexp(logits, axis=1) - hit

    batch = jaxkv.make_batch(tokens, sequences=streams - 1, outputs=np.ones(len(tokens), bool))
    plan = jaxkv.init_batch(cache, batch, ubatch_size=ubatch_size).check()
    following = np.pad(tokens[1:], (0, ubatch_size))
    losses = []
    for start, ubatch in zip(range(0, len(tokens), ubatch_size), plan.ubatches, strict=True):
        cache, loss = score(model.params, cache, ubatch, following[start : start + ubatch_size])
        losses.append(np.asarray(loss))
    losses = np.concatenate(losses)[: len(tokens) - 1]
    assert np.exp(losses.mean()) == pytest.approx(record["ppl"], abs=within)
    found = [losses[i : i + 256].mean() for i in range(0, 256 * len(record["nll_by_256"]), 256)]
    np.testing.assert_allclose(found, record["nll_by_256"], rtol=0, atol=within)
