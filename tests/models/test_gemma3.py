"""Gemma 3: a tiny random model against transformers, and the real one against llama.cpp."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from models.cli import generate
from models.cli.main import main
from tests.models.golden import check_logits, golden

DATA = Path(__file__).parent.parent / "data" / "gemma3"
CLOSE = WITHIN = 3e-2  # how far logits may lie apart, and so by how much a sure token leads
ROLLBACK = 64


def run(model, memory, tokens, *, ubatch_size=64, **batch):
    batch = jaxkv.make_batch(tokens, **batch)
    memory, logits = jaxkv.prefill(
        model.forward, model.weights, memory, batch, ubatch_size=ubatch_size
    )
    return memory, np.asarray(logits)


# --------------------------------------------------------------------- a tiny model, transformers


@pytest.fixture(scope="module")
def tiny():
    """Three layers of four have a window of 12, far shorter than the text."""
    return models.load(DATA)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("streams", "full_windows", "ubatch_size"),
    [
        pytest.param(1, False, 4, id="unified-windowed-4"),
        pytest.param(2, False, 1, id="split-windowed-1"),
        pytest.param(1, True, 1, id="unified-full-size-1"),
        pytest.param(2, True, 4, id="split-full-size-4"),
    ],
)
def test_the_same_as_transformers(tiny, streams, full_windows, ubatch_size):
    record = np.load(DATA / "run.npz")
    memory = tiny.make_memory(
        cells=96,
        sequences=2,
        streams=streams,
        ubatch_size=4,
        rollback=4,
        full_windows=full_windows,
    )
    prompt, wanted = record["tokens"], record["logits"]
    outputs = np.arange(len(prompt)) % 9 == 0
    outputs[-1] = True
    memory, logits = run(
        tiny, memory, prompt, sequences=1, outputs=outputs, ubatch_size=ubatch_size
    )
    np.testing.assert_allclose(logits, wanted[: len(logits)], atol=2e-4)
    for token, row in zip(record["greedy"], wanted[len(logits) - 1 :], strict=True):
        np.testing.assert_allclose(logits[-1], row, atol=2e-4)
        assert logits[-1].argmax() == token
        memory, logits = run(tiny, memory, [token], sequences=1, ubatch_size=4)


def test_only_windows_shrink(tiny):
    """A cell of a layer is one key head of 16 numbers and as many of the value."""
    per_cell = 2 * 4 * 16
    for full_windows, cells in [(False, 12 + 8 + 4), (True, 4096)]:
        memory = tiny.make_memory(cells=4096, ubatch_size=8, rollback=4, full_windows=full_windows)
        _, buffers = jaxkv.split(memory)
        assert jaxkv.nbytes(buffers) == per_cell * (4096 + 3 * cells)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"use_bidirectional_attention": false', '"use_bidirectional_attention": true'),
        ('"model_type": "gemma3_text"', '"model_type": "gemma2"'),
    ],
    ids=["looking-ahead", "unknown"],
)
def test_what_cannot_be_run_is_a_sentence(tmp_path, old, new):
    config = (DATA / "config.json").read_text()
    assert old in config
    (tmp_path / "config.json").write_text(config.replace(old, new))
    (tmp_path / "model.safetensors").write_bytes((DATA / "model.safetensors").read_bytes())
    with pytest.raises(models.ModelError, match="can be run|known are"):
        models.load(tmp_path)


# ---------------------------------------------------------------------- the real model, llama.cpp


@pytest.fixture(scope="module")
def records():
    return golden("models")["gemma3"]


def memory_of(model, *, ubatch_size, **options):
    """A memory in which the window is the model's own, and room is left to take 64 tokens back."""
    return model.make_memory(ubatch_size=ubatch_size, rollback=ROLLBACK, **options)


def follow(model, memory, records, logits):
    """Feed the recorded tokens to a sequence each; every step, the best token is compared.

    Since it is the recorded token that is fed, a close call changes nothing that follows.
    """
    plan, compute = jax.jit(jaxkv.plan_step), jaxkv.loops.step_of(model.forward)
    ids = np.arange(len(records), dtype=np.int32)
    for step in range(len(records[0]["greedy"]) + 1):
        for record, row in zip(records, logits, strict=True):
            if step == 0:
                check_logits(row, record["first"], record["sample_ids"], within=WITHIN)
            if step == len(record["greedy"]):
                check_logits(row, record["last"], record["sample_ids"], within=WITHIN)
            elif record["margins"][step] > CLOSE:
                assert int(row.argmax()) == record["greedy"][step], (record["prompt"], step)
        if step < len(records[0]["greedy"]):
            fed = np.array([record["greedy"][step] for record in records], np.int32)
            ubatch, ok = plan(memory, fed, ids, ids >= 0)
            assert ok
            table, buffers, logits = compute(model.weights, *jaxkv.split(memory), ubatch)
            memory, logits = jaxkv.join(table, buffers), np.asarray(logits)


@pytest.mark.nightly
def test_short_prompts_give_the_recorded_logits_and_tokens(gemma3, records):
    short = [record for record in records if len(record["tokens"]) < 64]
    assert len(short) == 2
    memory = memory_of(gemma3, cells=128, sequences=2, ubatch_size=64)
    memory, logits = run(gemma3, memory, [record["tokens"] for record in short])
    follow(gemma3, memory, short, logits)


@pytest.mark.nightly
def test_the_command_line_gives_the_recorded_text(gemma3, records, monkeypatch, capsys):
    """The text without a close call, beside another."""
    (record,) = [r for r in records if len(r["tokens"]) < 64 and min(r["margins"]) > CLOSE]
    monkeypatch.setattr(generate, "load", lambda name, **options: gemma3)
    command = ["generate", "--model", "gemma3", "--json", "--max-tokens", "24"]
    assert main([*command, "--streams", "split", record["prompt"], "Two, four,"]) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[0])
    assert first["prompt_tokens"] == record["tokens"]
    assert (first["tokens"], first["text"]) == (record["greedy"], record["text"])


@pytest.mark.nightly
def test_a_stream_for_each_prompt_and_the_last_tokens_one_by_one(gemma3, records):
    """Of the long one, every token after the first 640 takes a cell that the window has left.

    The memory has the shape of the one in the recorded scripts, so that programs are shared.
    """
    records = records[1:]
    memory = memory_of(gemma3, cells=1280, sequences=2, streams=2, ubatch_size=64)
    rows = []
    for seq, record in enumerate(records):
        tokens = record["tokens"]
        if start := max(len(tokens) - 64, 0):
            memory, _ = run(gemma3, memory, tokens[:start], sequences=seq)
        memory, logits = run(gemma3, memory, tokens[start:], sequences=seq, ubatch_size=1)
        rows.append(logits[0])
    follow(gemma3, memory, records, rows)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("streams", "full_windows", "ubatch_size"),
    [(2, False, 512), (1, True, 64)],
    ids=["split-windowed-512", "unified-full-size-64"],
)
def test_perplexity_of_a_long_text(gemma3, streams, full_windows, ubatch_size):
    record = golden("models")["gemma3_nll"]
    tokens = np.asarray(record["tokens"], np.int32)
    memory = memory_of(
        gemma3,
        cells=1536,
        sequences=streams,
        streams=streams,
        ubatch_size=ubatch_size,
        full_windows=full_windows,
    )

    # Logits of the whole text would be 1.6 GB, so of each ubatch only the losses leave the device.
    @partial(jax.jit, donate_argnames="memory")
    def score(weights, memory, ubatch, targets):
        memory, logits = gemma3.forward(weights, jaxkv.apply(memory, ubatch), ubatch)
        hit = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return memory, jax.nn.logsumexp(logits, axis=1) - hit

    batch = jaxkv.make_batch(tokens, sequences=streams - 1, outputs=np.ones(len(tokens), bool))
    plan = jaxkv.init_batch(memory, batch, ubatch_size=ubatch_size).check()
    losses = []
    for start, ubatch in zip(range(0, len(tokens), ubatch_size), plan.ubatches, strict=True):
        targets = np.zeros(ubatch_size, np.int32)
        following = tokens[start + 1 : start + 1 + ubatch_size]
        targets[: len(following)] = following
        memory, loss = score(gemma3.weights, memory, ubatch, targets)
        losses.append(np.asarray(loss))
    losses = np.concatenate(losses)[:-1]
    assert np.exp(losses.mean()) == pytest.approx(record["ppl"], abs=0.02)
    for i, wanted in enumerate(record["nll_by_256"]):
        assert losses[256 * i : 256 * (i + 1)].mean() == pytest.approx(wanted, abs=0.01)
