"""SmolLM2 and Gemma 3 with real weights, in float32, against recorded runs of llama.cpp."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.models.golden import check_logits, golden

# How far logits may lie apart, and by how much a token must lead to be the same in any rounding.
WITHIN = {"smollm2": 1e-3, "gemma3": 3e-2}
SURE = {"smollm2": 2e-3, "gemma3": 3e-2}


def prefill(model, memory, tokens, *, ubatch_size=64, **batch):
    batch = jaxkv.make_batch(tokens, **batch)
    memory, logits = jaxkv.prefill(
        model.forward, model.weights, memory, batch, ubatch_size=ubatch_size
    )
    return memory, np.asarray(logits)


def of_length(name, *, shortest=0, longest=10**6):
    return [r for r in golden("models")[name] if shortest <= len(r["tokens"]) <= longest]


def test_smollm2_generates_recorded_tokens(smollm2):
    """The best token after a prompt and each one after it; not in a program, which is compiled."""
    record = golden("models")["smollm2"][1]
    tokens = record["tokens"] + record["greedy"][:3]
    batch = jaxkv.make_batch(tokens, outputs=np.ones(len(tokens), bool))
    memory = smollm2.make_memory(cells=64)
    (ubatch,) = jaxkv.init_batch(memory, batch).check().ubatches
    _, logits = smollm2.forward(smollm2.weights, jaxkv.apply(memory, ubatch), ubatch)
    rows = np.asarray(logits)[len(record["tokens"]) - 1 :]
    check_logits(rows[0], record["first"], record["sample_ids"], within=1e-3)
    assert rows.argmax(axis=-1).tolist() == record["greedy"][:4]


def follow(model, name, memory, records, logits):
    """Feed the recorded tokens to a sequence each; every step, the best token is compared.

    Since it is the recorded token that is fed, a close call changes nothing that follows.
    """
    plan, compute = jax.jit(jaxkv.plan_step), jaxkv.loops.step_of(model.forward)
    ids = np.arange(len(records), dtype=np.int32)
    for step in range(len(records[0]["greedy"]) + 1):
        for record, row in zip(records, logits, strict=True):
            if step in (0, len(record["greedy"])):
                expected = record["last" if step else "first"]
                check_logits(row, expected, record["sample_ids"], within=WITHIN[name])
            elif record["margins"][step] > SURE[name]:
                assert int(row.argmax()) == record["greedy"][step], (record["prompt"], step)
        if step < len(records[0]["greedy"]):
            fed = np.array([record["greedy"][step] for record in records], np.int32)
            ubatch, ok = plan(memory, fed, ids, ids >= 0)
            assert ok
            table, buffers, logits = compute(model.weights, *jaxkv.split(memory), ubatch)
            memory, logits = jaxkv.join(table, buffers), np.asarray(logits)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_prompts_together_give_recorded_logits_and_tokens(request, name):
    model, records = request.getfixturevalue(name), of_length(name, longest=64)
    assert len(records) == {"smollm2": 4, "gemma3": 2}[name]
    memory = model.make_memory(
        cells=128, sequences=len(records), ubatch_size=64, rollback=64 if name == "gemma3" else None
    )
    memory, logits = prefill(model, memory, [record["tokens"] for record in records])
    follow(model, name, memory, records, logits)


@pytest.mark.nightly
def test_gemma3_long_prompt_reuses_cells_of_its_window(gemma3):
    """Every token after the first 640 takes a cell that the window has left.

    The memory has the shape of the one in the recorded scripts, so that programs are shared.
    """
    records, rows = golden("models")["gemma3"][1:], []
    memory = gemma3.make_memory(cells=1280, sequences=2, streams=2, ubatch_size=64, rollback=64)
    for seq, record in enumerate(records):
        tokens = record["tokens"]
        if start := max(len(tokens) - 64, 0):
            memory, _ = prefill(gemma3, memory, tokens[:start], sequences=seq)
        memory, logits = prefill(gemma3, memory, tokens[start:], sequences=seq, ubatch_size=1)
        rows.append(logits[0])
    follow(gemma3, "gemma3", memory, records, rows)


@pytest.mark.nightly
def test_smollm2_in_half_precision_stays_close(smollm2):
    """Weights and cache in bfloat16, sums in float32."""
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), smollm2.weights)
    record = golden("models")["smollm2"][0]
    memory = smollm2.make_memory(cells=64, dtype=jnp.bfloat16)
    batch = jaxkv.make_batch(record["tokens"])
    _, logits = jaxkv.prefill(smollm2.forward, weights, memory, batch)
    assert logits.dtype == jnp.float32
    assert int(logits[0].argmax()) == record["greedy"][0]
    found = np.asarray(logits)[0, record["sample_ids"]]
    np.testing.assert_allclose(found, record["first"]["at"], atol=0.5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "dtype", "streams", "full_windows", "ubatch_size", "within"),
    [
        ("smollm2", "float32", 1, False, 256, (0.01, 0.01)),
        ("smollm2", "int8", 1, False, 256, (0.067, 0.067)),
        ("gemma3", "int8", 1, False, 256, (0.073, 0.073)),
        ("gemma3", "float32", 2, False, 512, (0.02, 0.01)),
        ("gemma3", "float32", 1, True, 64, (0.02, 0.01)),
    ],
)
def test_perplexity_of_a_long_text_matches_recorded(
    request, name, dtype, streams, full_windows, ubatch_size, within
):
    """Of int8 SmolLM2 within 0.5 percent, Gemma 3 within 0.8; it differs between processors.

    Logits of the whole text would be 1.6 GB, so of each ubatch only the losses leave the device.
    """
    record, model = golden("models")[f"{name}_nll"], request.getfixturevalue(name)
    tokens = np.asarray(record["tokens"], np.int32)
    options = dict(cells=1536, sequences=streams, streams=streams, ubatch_size=ubatch_size)
    memory = model.make_memory(full_windows=full_windows, dtype=dtype, **options)

    @partial(jax.jit, donate_argnames="memory")
    def score(weights, memory, ubatch, targets):
        memory, logits = model.forward(weights, jaxkv.apply(memory, ubatch), ubatch)
        hit = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return memory, jax.nn.logsumexp(logits, axis=1) - hit

    batch = jaxkv.make_batch(tokens, sequences=streams - 1, outputs=np.ones(len(tokens), bool))
    plan = jaxkv.init_batch(memory, batch, ubatch_size=ubatch_size).check()
    losses = []
    for start, ubatch in zip(range(0, len(tokens), ubatch_size), plan.ubatches, strict=True):
        targets = np.zeros(ubatch_size, np.int32)
        following = tokens[start + 1 : start + 1 + ubatch_size]
        targets[: len(following)] = following
        memory, loss = score(model.weights, memory, ubatch, targets)
        losses.append(np.asarray(loss))
    losses = np.concatenate(losses)[:-1]
    of_all, of_each = within
    assert np.exp(losses.mean()) == pytest.approx(record["ppl"], abs=of_all)
    for i, wanted in enumerate(record["nll_by_256"]):
        assert losses[256 * i : 256 * (i + 1)].mean() == pytest.approx(wanted, abs=of_each)
