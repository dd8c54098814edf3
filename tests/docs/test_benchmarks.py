"""What benchmarks compare with does the same work."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from benchmarks import by_hand

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["BNKD", "BKND"])
def test_cache_by_hand_gives_the_same_logits(layout):
    model = models.load(DATA / "llama_tied")
    c = model.config
    sizes = {"layers": len(c.windows), "kv_heads": c.kv_heads, "head_dim": c.head_dim}
    theirs = by_hand.make(layout, batch=2, cells=8, **sizes)
    ours = model.make_memory(cells=8, sequences=2, streams=2)
    forward = jax.jit(model.forward)
    for position, token in enumerate(np.array([[1, 2], [3, 4], [5, 6]])):
        ubatch, ok = jaxkv.plan_step(ours, jnp.asarray(token), jnp.arange(2), jnp.ones(2, bool))
        assert ok
        ours, wanted = forward(model.weights, jaxkv.apply(ours, ubatch), ubatch)
        step = by_hand.step_ubatch(jnp.asarray(token), jnp.int32(position))
        theirs, found = forward(model.weights, theirs, step)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


PROGRAM = """
import sys
from benchmarks import turns
def main():
    sides = {name: lambda name=name: float(len(name)) for name in "SIDES".split()}
    turns.table(turns.take_turns(sides, int(sys.argv[1])))
    print("it took so long in HERE")
"""
SHOWN = """\
  step
        4.000 ms  one
        4.000 ms  two: 1.000 x (1.000 to 1.000)
  planned
        4.000 ms  one
        7.000 ms  two: 1.750 x (1.750 to 1.750)
  last: not in every checkout, see --same
it took so long in two
"""


@pytest.mark.core
def test_checkouts_take_turns_and_compare_by_name(tmp_path):
    for here, sides in {"one": "step plan last", "two": "step planned"}.items():
        (tmp_path / here / "jaxkv").mkdir(parents=True)
        (tmp_path / here / "jaxkv" / "__init__.py").touch()
        (tmp_path / here / "benchmarks").mkdir()
        shutil.copy(ROOT / "benchmarks" / "turns.py", tmp_path / here / "benchmarks")
        text = PROGRAM.replace("SIDES", sides).replace("HERE", here)
        (tmp_path / here / "benchmarks" / "letters.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.checkouts", "letters", "one", "two"]
        + ["--same", "plan=planned", "--", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == SHOWN
