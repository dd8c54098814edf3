"""Estimated cycles of a layer's attention from the TPU compiler, without a TPU.

`pip install libtpu==0.0.42` fits jax 0.10.2. Instructions of XLA have an estimate in the compiled
program. A kernel has none, but its schedule is dumped: a bundle of instructions is a cycle. A turn
of its loop takes as long as its bundles or the transfer of its tiles, the longer of both. The
numbers are lower bounds and no measured times.
"""

import argparse
import math
import os
import re
import tempfile
from pathlib import Path

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    LIBTPU_INIT_ARGS=f"--xla_jf_dump_llo_text=true --xla_jf_dump_to={tempfile.mkdtemp()}",
)

import jax

from jaxkv.ops.attention import pallas_tpu
from jaxkv.ops.attention.active_tiles import TILE
from tests.compilers.tpu_kernel import on
from tests.helpers.kernels import GROUPS, QUERIES, attention_shapes, compiled, layers_of_attention

DUMP = Path(os.environ["LIBTPU_INIT_ARGS"].split("=")[-1])
"""The folder of the compiler's schedules."""

BYTES = 819e9 / 940e6
"""Bytes that a v5e reads in a cycle: 819 GB/s according to its data sheet, at 940 MHz."""

CASES = {
    "1 text": {},
    "8 forks of a prompt": {"tokens": 8},
    "32 forks of a prompt": {"tokens": 32},
    "8 streams": {"streams": 8},
    "1 text, 512 cells": {"cells": 512},
    "8 streams, 512 cells": {"streams": 8, "cells": 512},
    "a prompt of 256": {"tokens": 256},
}


def bundles():
    """Bundles of the last compiled kernel, prologue and epilogue included."""
    found = {}
    for path in sorted(DUMP.glob("*jaxkv_attention*schedule-analysis_final_bundles.txt")):
        found = re.search(r"total scheduled bundles:\s+(\d+)", path.read_text())
    for path in DUMP.iterdir():
        path.unlink()
    return int(found[1]) if found else 0


def estimates(program):
    """Cycles of the instructions outside of loops, and of the turns of loops."""
    outside = inside = 0
    entry = False
    for line in program.as_text().splitlines():
        if line and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        for cycles in re.findall(r'estimated_cycles":"(\d+)"', line):
            outside, inside = outside + int(cycles) * entry, inside + int(cycles) * (not entry)
    return outside, inside


def a_layer(implementation, shapes):
    """Cycles of a layer: two layers minus one, for all cells and for a quarter."""
    q, k, v, visibility = shapes
    one, two = (
        compiled("tpu", layers_of_attention(implementation), q, [(k, v)] * layers, visibility)
        for layers in (1, 2)
    )
    (outside, inside), (twice, loops) = estimates(one), estimates(two)
    outside, inside = twice - outside, loops - inside
    lists, tokens = visibility.at.shape
    tiles = math.ceil(k.shape[2] / TILE)
    parts = (1, 0.25)
    if implementation == "whole":  # small buffers are loaded before, which has no estimate
        read = 2 * k.size * k.dtype.itemsize / BYTES
        return [max(outside, read) for _ in parts]
    if implementation == "tiles":
        return [outside + inside * lists * math.ceil(part * tiles) for part in parts]
    block = min(tokens, pallas_tpu.QUERIES // QUERIES)
    rows = jax.ShapeDtypeStruct((lists, GROUPS, block * QUERIES, q.shape[3]), q.dtype)
    heads = pallas_tpu._heads_at_once(rows, k, v)
    fetch = 2 * heads * min(TILE, k.shape[2]) * k.shape[3] * k.dtype.itemsize / BYTES
    turn = max(bundles(), fetch) * GROUPS // heads * lists * math.ceil(tokens / block)
    return [outside + round(turn) * math.ceil(part * tiles) for part in parts]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", default="v5e:2x2")
    parser.add_argument("--size", type=int, default=128, help="numbers of a head")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    arguments = parser.parse_args()
    print("thousands of cycles of a layer, 8 heads in groups of 4, 8,192 cells, bfloat16")
    print(f"{'':24} {'all cells seen':>26} {'a quarter':>26}")
    print(f"{'':24}" + f" {'pallas':>8} {'whole':>8} {'tiles':>8}" * 2)
    for name, case in ((name, CASES[name]) for name in arguments.cases):
        shapes = attention_shapes(
            on(arguments.chip), arguments.size, "bfloat16", **{"tokens": 1, **case}
        )
        found = [a_layer(way, shapes) for way in ("pallas", "whole", "tiles")]
        cells = [f"{way[part] / 1000:8.1f}" for part in (0, 1) for way in found]
        print(f"{name:24} {' '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
