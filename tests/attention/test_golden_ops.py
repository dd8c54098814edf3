"""Scripts of verbs with positions and logits that llama.cpp answered, on real weights."""

import jax
import numpy as np
import pytest

import jaxkv
from tests.models.golden import check_logits, golden

pytestmark = pytest.mark.nightly

SEQUENCES = 8  # more than any script uses, as in the other golden test, so that programs are shared
SCRIPTS = {script["name"]: script for script in golden("ops")}


def memory_of(model, script, placement):
    """The memory that a script runs in, and its largest ubatch."""
    gemma, split = script["model"] == "gemma3", not script["unified"]
    if gemma or split:
        sequences, cells = script["n_seq"], script["n_ctx"] // (script["n_seq"] if split else 1)
    else:
        sequences, cells = SEQUENCES, 256 if script["n_ctx"] == 256 else 1024
    # Rows of few tokens come in few shapes, each of which is a program.
    size = 64 if gemma else (4 if split else 8)
    streams = sequences if split else 1
    sizes = dict(cells=cells, sequences=sequences, streams=streams, ubatch_size=size, rollback=64)
    return model.make_memory(**sizes, placement=placement), size


def replay(model, script, *, placement="scattered", defrag=False):
    """Run a script; positions are compared exactly, logits within 1e-3 (SmolLM2) or 3e-2.

    Where cells must be neighbours, room is made for what is refused as fragmented.

    Returns:
      How often that helped.
    """
    gemma, helps = script["model"] == "gemma3", 0
    memory, size = memory_of(model, script, placement)
    for step in script["steps"]:
        if step["op"] == "seq_rm":
            memory, ok = jaxkv.seq_rm(memory, *step["args"])
            assert bool(ok) == step["ret"]
        elif step["op"] != "decode":
            memory = getattr(jaxkv, step["op"])(memory, *step["args"])
        else:
            memory = jaxkv.apply(memory, jaxkv.init_update(memory), donate=True)
            if defrag:
                memory = jaxkv.apply(memory, jaxkv.defrag_plan(memory), donate=True)
            last = np.arange(len(step["tokens"])) == len(step["tokens"]) - 1
            batch = jaxkv.make_batch(
                step["tokens"],
                positions=step["pos"],
                sequences=step["seq"],
                outputs=np.array(step.get("want", last), bool),
            )
            plan = jaxkv.init_batch(memory, batch, ubatch_size=size)
            if placement == "contiguous":
                refused = plan.reason
                memory, plan, helped = jaxkv.make_room(memory, batch, ubatch_size=size, donate=True)
                assert not helped or jaxkv.Reason.FRAGMENTED in refused.tolist()
                helps += helped
            assert bool(plan.ok) == (step["rc"] == 0), (plan.reason, step["rc"])
            if plan.ok:
                rest = dict(ubatch_size=size, donate=True)
                memory, logits = jaxkv.prefill(model.forward, model.weights, memory, batch, **rest)
                for row, record in zip(np.asarray(logits), step["logits"], strict=True):
                    check_logits(row, record, script["sample_ids"], within=3e-2 if gemma else 1e-3)
        check_positions(memory, step, exactly=not gemma)
    return helps


def check_positions(memory, step, *, exactly):
    """Compare ends of sequences; with a window it is a matter of choice which cells go first."""
    ids = np.arange(len(step["pos_max"]))
    first, last = jaxkv.seq_pos_min(memory, ids), jaxkv.seq_pos_max(memory, ids)
    assert last.tolist() == step["pos_max"]
    if exactly:
        assert first.tolist() == step["pos_min"]
    else:
        needed = np.maximum(np.asarray(last) + 2 - 512, 0)
        assert np.all(first <= np.where(last >= 0, needed, -1))
    assert not any(jax.tree.leaves(jaxkv.check_invariants(memory)))


@pytest.mark.parametrize("name", SCRIPTS)
def test_ops_answer_as_llama_cpp(name, request):
    """In one stream and several; a windowed part has window + ubatch + 64 cells a sequence."""
    script = SCRIPTS[name]
    assert replay(request.getfixturevalue(script["model"]), script) == 0


@pytest.mark.parametrize("name", ["fragmented", "divide", "random_unified_2"])
def test_ops_answer_as_llama_cpp_after_defrags(smollm2, name):
    replay(smollm2, SCRIPTS[name], defrag=True)


@pytest.mark.parametrize("name", ["fragmented", "full_then_freed", "random_unified_0"])
def test_ops_answer_as_llama_cpp_in_neighbours(smollm2, name):
    helps = replay(smollm2, SCRIPTS[name], placement="contiguous")
    assert helps or name != "fragmented"
