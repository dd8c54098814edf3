"""Scripts of verbs with recorded positions and logits, on real weights, in one shared cache."""

import numpy as np
import pytest

import jaxkv
from tests.golden import golden

SEQUENCES = 8  # more than any script uses, as in the other golden test, so that programs are shared
FAST = ("context_shift",)


def scripts():
    try:
        return [s for s in golden("ops") if s["model"] == "smollm2" and s["unified"]]
    except pytest.skip.Exception:
        return []


def parameters(names=None):
    return [
        pytest.param(s, id=s["name"], marks=() if s["name"] in FAST else pytest.mark.slow)
        for s in scripts()
        if names is None or s["name"] in names
    ]


def replay(model, script, *, placement="scattered", before=lambda memory: memory, make_room=False):
    """Run a script; every position is compared exactly and every logit within 1e-3."""
    cells = 256 if script["n_ctx"] == 256 else 1024
    memory = model.make_memory(cells=cells, sequences=SEQUENCES, placement=placement)
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
            plan = jaxkv.init_batch(memory, batch, ubatch_size=8)
            if make_room:
                memory, plan, helped = jaxkv.make_room(memory, batch, ubatch_size=8, donate=True)
                helps += helped
            assert bool(plan.ok) == (step["rc"] == 0), (plan.reason, step["rc"])
            if plan.ok:
                logits = []
                for ubatch in plan.ubatches:
                    memory, out = model.step(model.weights, memory, ubatch)
                    logits.append(out)
                check(np.asarray(plan.collect(logits)), step["logits"], script["sample_ids"])
        elif step["op"] == "seq_rm":
            memory, ok = jaxkv.seq_rm(memory, *step["args"])
            assert bool(ok) == step["ret"]
        else:
            memory = getattr(jaxkv, step["op"])(memory, *step["args"])
        ids = np.arange(script["n_seq"])
        assert jaxkv.seq_pos_min(memory, ids).tolist() == step["pos_min"]
        assert jaxkv.seq_pos_max(memory, ids).tolist() == step["pos_max"]
        assert not any(jaxkv.check_invariants(memory).values())
    return helps


def wanted(step):
    if "want" in step:
        return np.array(step["want"], bool)
    return np.arange(len(step["tokens"])) == len(step["tokens"]) - 1


def check(logits, records, ids):
    assert len(logits) == len(records)
    for row, record in zip(logits, records, strict=True):
        top = np.array(record["top"])
        np.testing.assert_allclose(row[ids], record["at"], atol=1e-3)
        np.testing.assert_allclose(row[top[:, 0].astype(int)], top[:, 1], atol=1e-3)


@pytest.mark.parametrize("script", parameters())
def test_scattered(smollm2, script):
    replay(smollm2, script)


@pytest.mark.slow
@pytest.mark.parametrize("script", parameters())
def test_with_a_defrag_squeezed_in_before_every_decode(smollm2, script):
    replay(
        smollm2,
        script,
        before=lambda memory: jaxkv.apply(memory, jaxkv.defrag_plan(memory), donate=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", parameters())
def test_contiguous_through_make_room(smollm2, script):
    replay(smollm2, script, placement="contiguous", make_room=True)


def test_contiguous_alone_refuses_what_is_fragmented(smollm2):
    """The freed cells lie in runs shorter than the prompt, so it is refused and nothing changes."""
    (script,) = [s for s in scripts() if s["name"] == "fragmented"]
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
