"""Recorded scripts of edits: positions and logits of llama.cpp with real weights."""

import jax
import numpy as np
import pytest

import jaxkv
from tests.helpers.caches import edit
from tests.models.golden import check_logits, read_golden

pytestmark = pytest.mark.nightly

SEQUENCES = 8  # more than any script needs; equal in both golden tests, which share programs
SCRIPTS = {script["name"]: script for script in read_golden("ops")}


CASES = [(name, False) for name in SCRIPTS]
CASES += [(name, True) for name in ("fragmented", "divide", "random_unified_2")]


@pytest.mark.parametrize(("name", "defrag"), CASES)
def test_ops_answer_as_llama_cpp(name, defrag, request):
    """Positions are compared exactly, logits within 1e-3 (SmolLM2) or 3e-2.

    A windowed part has window + ubatch + 64 cells per sequence.
    """
    script = SCRIPTS[name]
    model = request.getfixturevalue(script["model"])
    gemma, split = script["model"] == "gemma3", not script["unified"]
    sequences, cells = SEQUENCES, 256 if script["n_ctx"] == 256 else 1024
    if gemma or split:
        sequences, cells = script["n_seq"], script["n_ctx"] // (script["n_seq"] if split else 1)
    # Short rows have few shapes, each of which is a program.
    size = 64 if gemma else (4 if split else 8)
    sizes = dict(cells=cells, sequences=sequences, ubatch_size=size, max_rollback=64)
    streams = sequences if split else 1
    cache = model.make_cache(**sizes, streams=streams)
    rest = dict(ubatch_size=size, donate=True)
    for step in script["steps"]:
        if step["op"] != "decode":
            cache, ok = edit(step["op"], cache, *step["args"])
            assert bool(ok) == (step["ret"] if step["op"] == "seq_rm" else True)
        else:
            cache = jaxkv.apply(cache, jaxkv.init_update(cache), donate=True)
            if defrag:
                cache = jaxkv.apply(cache, jaxkv.defrag_plan(cache), donate=True)
            tokens, fields = step["tokens"], dict(positions=step["pos"], sequences=step["seq"])
            last = np.arange(len(tokens)) == len(tokens) - 1
            outputs = np.array(step.get("want", last), bool)
            batch = jaxkv.make_batch(tokens, **fields, outputs=outputs)
            plan = jaxkv.init_batch(cache, batch, ubatch_size=size)
            assert bool(plan.ok) == (step["rc"] == 0), (plan.reason, step["rc"])
            if plan.ok:
                cache, logits, *_ = jaxkv.prefill(model.forward, model.params, cache, batch, **rest)
                for row, record in zip(np.asarray(logits), step["logits"], strict=True):
                    check_logits(row, record, script["sample_ids"], within=3e-2 if gemma else 1e-3)
        ids = np.arange(len(step["pos_max"]))
        first, last = cache.seq_pos_min(ids), cache.seq_pos_max(ids)
        assert last.tolist() == step["pos_max"]
        if gemma:  # with a window, the order of eviction may differ
            needed = np.maximum(np.asarray(last) + 2 - 512, 0)
            assert np.all(first <= np.where(last >= 0, needed, -1))
        else:
            assert first.tolist() == step["pos_min"]
        assert not any(jax.tree.leaves(cache.check()))
