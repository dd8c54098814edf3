"""The main job against recorded runs of an independent implementation, on real weights, float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.models.golden import check_logits, golden

CLOSE = 2e-3  # a best token that leads by less may change with rounding


SLOTS = dict(cells=1024, sequences=8)  # one memory for all tests, so that programs are shared
EVERYONE = np.arange(8, dtype=np.int32)


def run(model, memory, tokens, *, ubatch_size=64, **batch):
    batch = jaxkv.make_batch(tokens, **batch)
    return jaxkv.prefill(model.forward, model.weights, memory, batch, ubatch_size=ubatch_size)


def sure_steps(margins):
    """Count the steps before the first close call."""
    return next((i for i, margin in enumerate(margins) if margin <= CLOSE), len(margins))


def padded(rows):
    """Eight rows, whatever the prompts, so that one program serves every call."""
    full = np.zeros((8, rows.shape[1]), np.float32)
    full[: len(rows)] = np.asarray(rows)
    return full


@pytest.fixture(scope="module")
def runs():
    return golden("models")["smollm2"]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_short_prompt_gives_the_recorded_logits(smollm2, runs, number):
    """In the memory that the README makes, so that programs are shared."""
    record = runs[number]
    batch = jaxkv.make_batch(record["tokens"])
    memory = smollm2.make_memory(cells=512)
    _, logits = jaxkv.prefill(smollm2.forward, smollm2.weights, memory, batch)
    check_logits(np.asarray(logits)[0], record["first"], record["sample_ids"], within=1e-3)


@pytest.mark.nightly
def test_prompts_together_give_the_recorded_logits_and_tokens(smollm2, runs):
    """The prompts run side by side in one cache, so each is also checked against its neighbours.

    The recorded token is fed at every step, so a close call changes nothing that follows.
    """
    runs = [run for run in runs if len(run["tokens"]) < 64]
    assert len(runs) >= 4
    memory = smollm2.make_memory(**SLOTS)
    memory, logits = run(smollm2, memory, [record["tokens"] for record in runs])
    for record, row in zip(runs, np.asarray(logits), strict=True):
        check_logits(row, record["first"], record["sample_ids"], within=1e-3)
        assert int(row.argmax()) == record["greedy"][0]

    plan, step = jax.jit(jaxkv.plan_step), jaxkv.loops.step_of(smollm2.forward)
    for i in range(1, len(runs[0]["greedy"]) + 1):
        fed = np.zeros(8, np.int32)
        fed[: len(runs)] = [record["greedy"][i - 1] for record in runs]
        ubatch, ok = plan(memory, fed, EVERYONE, len(runs) > EVERYONE)
        assert ok
        table, buffers, logits = step(smollm2.weights, *jaxkv.split(memory), ubatch)
        memory = jaxkv.join(table, buffers)
        for record, row in zip(runs, np.asarray(logits), strict=False):
            if i == len(record["greedy"]):
                check_logits(row, record["last"], record["sample_ids"], within=1e-3)
            elif record["margins"][i] > CLOSE:
                assert int(row.argmax()) == record["greedy"][i], (record["prompt"], i)


@pytest.fixture(scope="module")
def generate(smollm2):
    """Greedy generation inside one jitted loop, eight steps a dispatch, with the margins."""

    def generate(prompts, steps):
        memory = smollm2.make_memory(**SLOTS)
        memory, logits = run(smollm2, memory, prompts)
        first = padded(logits).argmax(-1).astype(np.int32)
        limit = np.where(len(prompts) > EVERYONE, 8 * -(-steps // 8), 0)
        state = jaxkv.loops.start(memory, first, EVERYONE, limit=limit)
        best = jaxkv.loops.sampling.make_sampler()
        tokens = [first[:, None]]
        for _ in range(-(-steps // 8)):
            memory, state, picked = jaxkv.decode(
                smollm2.forward, best, smollm2.weights, memory, state, steps=8, donate=True
            )
            tokens.append(np.asarray(picked.tokens))
        return np.concatenate(tokens, axis=1)[: len(prompts), : steps + 1].tolist()

    return generate


@pytest.mark.nightly
def test_the_loop_on_the_device_picks_the_recorded_tokens(runs, generate):
    records = [run for run in runs if len(run["tokens"]) < 64]
    for record, tokens in zip(
        records, generate([record["tokens"] for record in records], 39), strict=True
    ):
        sure = sure_steps(record["margins"])
        assert sure > 10
        assert tokens[:sure] == record["greedy"][:sure]


@pytest.mark.nightly
def test_eight_prompts_together_give_what_each_gives_alone(smollm2, generate):
    """Their ubatches hold tokens of several, and their cells lie mixed; close calls end a run."""
    text = golden("models")["smollm2_nll"]["tokens"]
    prompts = [text[150 * i : 150 * i + 35 + 3 * i] for i in range(8)]
    together = generate(prompts, 8)
    for seq, (prompt, tokens) in enumerate(zip(prompts, together, strict=True)):
        (alone,) = generate([prompt], 8)
        if alone != tokens:
            at = next(i for i, (a, b) in enumerate(zip(alone, tokens, strict=True)) if a != b)
            _, logits = run(smollm2, smollm2.make_memory(**SLOTS), prompt + alone[:at])
            best = np.sort(np.asarray(logits)[0])
            assert best[-1] - best[-2] <= CLOSE, (seq, at)


@pytest.mark.nightly
def test_a_prompt_token_by_token_gives_the_same_logits(smollm2, runs):
    rows = []
    for ubatch_size in (1, 64):
        memory = smollm2.make_memory(**SLOTS)
        _, logits = run(smollm2, memory, runs[0]["tokens"] * 5, ubatch_size=ubatch_size)
        rows.append(np.asarray(logits)[0])
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-4)


@pytest.mark.nightly
def test_how_a_long_prompt_is_cut_does_not_matter(smollm2, runs):
    record = max(runs, key=lambda record: len(record["tokens"]))
    rows = []
    for ubatch_size in (7, 64, 512):
        memory = smollm2.make_memory(**SLOTS)
        _, logits = run(smollm2, memory, record["tokens"], ubatch_size=ubatch_size)
        rows.append(np.asarray(logits)[0])
        check_logits(rows[-1], record["first"], record["sample_ids"], within=1e-3)
    for row in rows[1:]:
        np.testing.assert_allclose(row, rows[0], atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "dtype", "within"),
    [("smollm2", "float32", 0.01), ("smollm2", "int8", 0.067), ("gemma3", "int8", 0.073)],
)
def test_perplexity_of_a_long_text(request, name, dtype, within):
    """Of int8 SmolLM2 within 0.5 percent, Gemma 3 within 0.8; it differs between processors."""
    record, model = golden("models")[f"{name}_nll"], request.getfixturevalue(name)
    tokens = np.asarray(record["tokens"], np.int32)
    memory = model.make_memory(cells=1536, dtype=dtype)
    losses = []
    for start in range(0, len(tokens), 256):
        part = tokens[start : start + 256]
        memory, logits = run(model, memory, part, ubatch_size=256, outputs=np.ones(len(part), bool))
        target = tokens[start + 1 : start + 257]
        logits = np.asarray(logits, np.float64)[: len(target)]
        highest = logits.max(-1, keepdims=True)
        total = np.log(np.exp(logits - highest).sum(-1)) + highest[:, 0]
        losses.append(total - logits[np.arange(len(target)), target])
    assert np.exp(np.concatenate(losses).mean()) == pytest.approx(record["ppl"], abs=within)
    by_256 = np.concatenate(losses)[: 256 * len(record["nll_by_256"])]
    for part, wanted in zip(
        np.array_split(by_256, len(record["nll_by_256"])), record["nll_by_256"], strict=True
    ):
        assert part.mean() == pytest.approx(wanted, abs=within)


@pytest.mark.nightly
def test_a_cache_that_is_too_small_refuses_and_then_serves_a_shorter_prompt(smollm2, runs):
    long = max(runs, key=lambda record: len(record["tokens"]))
    short = runs[1]
    memory = smollm2.make_memory(**SLOTS)
    tokens = long["tokens"] * 2
    assert len(tokens) > 1024
    with pytest.raises(jaxkv.RefusedError, match=f"free cells: wanted {len(tokens)}, got 1024"):
        run(smollm2, memory, tokens)
    memory, logits = run(smollm2, memory, [short["tokens"]] * 7)
    check_logits(np.asarray(logits)[0], short["first"], short["sample_ids"], within=1e-3)


@pytest.mark.nightly
def test_half_precision_stays_close(smollm2, runs):
    """Weights and cache in bfloat16, sums in float32."""
    dtype = jnp.bfloat16
    weights = jax.tree.map(lambda x: x.astype(dtype), smollm2.weights)
    record = runs[0]
    memory = smollm2.make_memory(**SLOTS, dtype=dtype)
    batch = jaxkv.make_batch(record["tokens"])
    _, logits = jaxkv.prefill(smollm2.forward, weights, memory, batch)
    assert logits.dtype == jnp.float32
    assert int(logits[0].argmax()) == record["greedy"][0]
    ids = record["sample_ids"]
    np.testing.assert_allclose(np.asarray(logits)[0, ids], record["first"]["at"], atol=0.5)
