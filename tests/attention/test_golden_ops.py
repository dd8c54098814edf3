"""Scripts of verbs with recorded positions and logits, on real weights, unified and split."""

import jax
import numpy as np
import pytest

import jaxkv
from tests.models.golden import check_logits, golden

SEQUENCES = 8  # more than any script uses, as in the other golden test, so that programs are shared


def scripts(model="smollm2", *, unified=True):
    found = [s for s in golden("ops") if s["model"] == model]
    return [s for s in found if unified is None or s["unified"] == unified]


def parameters(scripts):
    return [pytest.param(s, id=s["name"]) for s in scripts]


def replay(
    model,
    script,
    *,
    placement="scattered",
    before=lambda memory: memory,
    make_room=False,
):
    """Run a script; positions are compared exactly, logits within 1e-3 (SmolLM2) or 3e-2."""
    gemma, split = script["model"] == "gemma3", not script["unified"]
    if gemma or split:
        sequences, cells = script["n_seq"], script["n_ctx"] // (script["n_seq"] if split else 1)
    else:
        sequences, cells = SEQUENCES, 256 if script["n_ctx"] == 256 else 1024
    # Rows of few tokens come in few shapes, each of which is a program.
    ubatch_size, within = (64, 3e-2) if gemma else (4 if split else 8, 1e-3)
    memory = model.make_memory(
        cells=cells,
        sequences=sequences,
        streams=sequences if split else 1,
        ubatch_size=ubatch_size,
        rollback=64,
        placement=placement,
    )
    helps = 0
    for step in script["steps"]:
        if step["op"] == "decode":
            memory = jaxkv.apply(memory, jaxkv.init_update(memory), donate=True)
            memory = before(memory)
            batch = jaxkv.make_batch(
                step["tokens"],
                positions=step["pos"],
                sequences=step["seq"],
                outputs=wanted(step),
            )
            plan = jaxkv.init_batch(memory, batch, ubatch_size=ubatch_size)
            if make_room:
                memory, plan, helped = jaxkv.make_room(
                    memory, batch, ubatch_size=ubatch_size, donate=True
                )
                helps += helped
            assert bool(plan.ok) == (step["rc"] == 0), (plan.reason, step["rc"])
            if plan.ok:
                memory, logits = jaxkv.prefill(
                    model.forward,
                    model.weights,
                    memory,
                    batch,
                    ubatch_size=ubatch_size,
                    donate=True,
                )
                for row, record in zip(np.asarray(logits), step["logits"], strict=True):
                    check_logits(row, record, script["sample_ids"], within=within)
        elif step["op"] == "seq_rm":
            memory, ok = jaxkv.seq_rm(memory, *step["args"])
            assert bool(ok) == step["ret"]
        else:
            memory = getattr(jaxkv, step["op"])(memory, *step["args"])
        ids = np.arange(script["n_seq"])
        first, last = jaxkv.seq_pos_min(memory, ids), jaxkv.seq_pos_max(memory, ids)
        assert last.tolist() == step["pos_max"]
        if gemma:  # which hidden cell is used again first is a matter of choice
            needed = np.maximum(np.asarray(last) + 2 - 512, 0)
            assert np.all(first <= np.where(last >= 0, needed, -1))
        else:
            assert first.tolist() == step["pos_min"]
        assert not any(jax.tree.leaves(jaxkv.check_invariants(memory)))
    return helps


def wanted(step):
    if "want" in step:
        return np.array(step["want"], bool)
    return np.arange(len(step["tokens"])) == len(step["tokens"]) - 1


def test_every_recorded_script_is_replayed():
    replayed = [*scripts(), *scripts(unified=False), *scripts("gemma3", unified=None)]
    assert sorted(s["name"] for s in replayed) == sorted(s["name"] for s in golden("ops"))


@pytest.mark.nightly
@pytest.mark.parametrize("script", parameters(scripts()))
def test_scattered(smollm2, script):
    replay(smollm2, script)


@pytest.mark.nightly
@pytest.mark.parametrize("script", parameters(scripts(unified=False)))
def test_with_a_stream_for_each_sequence(smollm2, script):
    replay(smollm2, script)


@pytest.mark.nightly
@pytest.mark.parametrize("script", parameters(scripts("gemma3", unified=None)))
def test_with_windows(gemma3, script):
    """Unified and split; the window cache holds window + ubatch + 64 cells for each sequence."""
    replay(gemma3, script)


@pytest.mark.nightly
@pytest.mark.parametrize("script", parameters(scripts()))
def test_with_a_defrag_squeezed_in_before_every_decode(smollm2, script):
    replay(
        smollm2,
        script,
        before=lambda memory: jaxkv.apply(memory, jaxkv.defrag_plan(memory), donate=True),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("script", parameters(scripts()))
def test_contiguous_through_make_room(smollm2, script):
    replay(smollm2, script, placement="contiguous", make_room=True)


@pytest.mark.nightly
def test_contiguous_alone_refuses_what_is_fragmented(smollm2):
    """The freed cells lie in runs shorter than the prompt, so it is refused and nothing changes."""
    (script,) = [s for s in golden("ops") if s["name"] == "fragmented"]
    first, gone, prompt = script["steps"][:3]
    memory = smollm2.make_memory(cells=256, sequences=SEQUENCES, placement="contiguous")
    for one in (0, 1):  # the two sequences come in turns, so that their cells interleave
        assert [s for s in first["seq"]].count(one)
    fill = jaxkv.make_batch(first["tokens"], positions=first["pos"], sequences=first["seq"])
    for ubatch in jaxkv.init_batch(memory, fill, ubatch_size=8).check().ubatches:
        memory = jaxkv.apply(memory, ubatch)
    memory, _ = jaxkv.seq_rm(memory, *gone["args"])
    batch = jaxkv.make_batch(prompt["tokens"], positions=prompt["pos"], sequences=prompt["seq"])
    plan = jaxkv.init_batch(memory, batch, ubatch_size=512)
    assert not plan.ok
    assert plan.reason[prompt["seq"][0]] == jaxkv.Reason.FRAGMENTED
    after = jaxkv.apply(memory, plan)
    for name in ("position", "owners", "shift", "stamp"):
        assert np.array_equal(getattr(after.table, name), getattr(memory.table, name))
    _, plan, helped = jaxkv.make_room(memory, batch, ubatch_size=512)
    assert plan.ok and helped
