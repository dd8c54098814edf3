"""How fast is a whole decode step? SmolLM2 in float32, all cells of each sequence nearly full.

Run `python -m benchmarks.decode`. Every side holds the same weights and the same number of visible
positions, and repeats the step after the prompt; all take turns in one process. Peers, where they
are installed: llama.cpp on float32 and on Q8_0 files made from the same weights, and transformers
with its static and its dynamic cache. Two caches written by hand run the same Flax model.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from benchmarks import by_hand, llama_cpp_peer, machine, transformers_peer, turns


def jaxkv_step(model: models.Model, prompts: np.ndarray, *, cells: int, split: bool) -> Callable:
    """The step through jaxkv: plan, apply, run, pick. Returns what does one and gives its token."""
    batch, length = prompts.shape
    streams = batch if split else 1
    memory = model.make_memory(
        cells=cells if split else cells * batch, sequences=batch, streams=streams
    )
    memory, logits = jaxkv.prefill(
        model.step, model.weights, memory, jaxkv.make_batch(list(prompts))
    )
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    everyone = jnp.arange(batch, dtype=jnp.int32)
    # The table stays that of the prompt, so that each step is the first one after it.
    table, rows = jaxkv.split(memory)

    @partial(jax.jit, donate_argnames="rows")
    def step(weights: Any, table: Any, rows: Any, token: jax.Array) -> tuple:
        memory = jaxkv.join(table, rows)
        ubatch, ok = jaxkv.plan_step(memory, token, everyone, jnp.ones(batch, bool))
        memory, logits = model.forward(weights, jaxkv.apply(memory, ubatch), ubatch)
        return jaxkv.split(memory)[1], jnp.argmax(logits, axis=-1).astype(jnp.int32), ok

    def again() -> np.ndarray:
        nonlocal rows
        rows, chosen, ok = step(model.weights, table, rows, token)
        assert ok, "the cache is full"
        return np.asarray(chosen)

    return again


def by_hand_step(
    model: models.Model, prompts: np.ndarray, layout: by_hand.Layout, *, cells: int
) -> Callable:
    """The same model on a cache written by hand. Its rows are zeros: only the time is asked for."""
    batch, length = prompts.shape
    c = model.config
    memory = by_hand.make(
        layout, batch=batch, layers=c.layers, cells=cells, heads=c.groups, size=c.size
    )

    @partial(jax.jit, donate_argnames="memory")
    def step(weights: Any, memory: Any, token: jax.Array, position: jax.Array) -> tuple:
        memory, logits = model.forward(weights, memory, by_hand.step_ubatch(token, position))
        return memory, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def again() -> np.ndarray:
        nonlocal memory
        memory, chosen = step(model.weights, memory, jnp.zeros(batch, jnp.int32), length)
        return np.asarray(chosen)

    return again


def peer_step(peer: Any, prompts: np.ndarray) -> Callable:
    """A step of a peer that has `prefill`, `step`, `rewind` and `chosen`."""
    peer.prefill(prompts)

    def again() -> np.ndarray:
        peer.rewind()
        peer.step()
        return np.asarray(peer.chosen)

    return again


def timed(step: Callable, steps: int) -> Callable[[], float]:
    """A side for `turns.take_turns`: milliseconds of a step."""

    def side() -> float:
        step()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return 1e3 * (time.perf_counter() - start) / steps

    return side


def sides_of(model: models.Model, prompts: np.ndarray, cells: int) -> dict[str, Callable]:
    """Everybody who can take part here."""
    batch = len(prompts)
    options = {"cells": cells, "batch": batch, "threads": machine.threads()}
    sides = {"jaxkv": jaxkv_step(model, prompts, cells=cells, split=batch > 1)}
    if batch > 1:
        sides["jaxkv, unified"] = jaxkv_step(model, prompts, cells=cells, split=False)
    sides["by hand [B,K,N,D]"] = by_hand_step(model, prompts, "BKND", cells=cells)
    sides["by hand [B,N,K,D]"] = by_hand_step(model, prompts, "BNKD", cells=cells)
    if llama_cpp_peer.available():
        for kind in ("f32", "q8_0"):
            peer = llama_cpp_peer.LlamaCppPeer(
                llama_cpp_peer.weights_file("smollm2", kind), **options
            )
            sides[f"llama.cpp {kind}"] = peer_step(peer, prompts)
    else:
        print("llama-cpp-python is not installed here: pip install llama-cpp-python")
    if transformers_peer.available():
        tensors = {name: model.checkpoint.tensor(name) for name in model.checkpoint.names()}
        for kind in ("static", "dynamic"):
            peer = transformers_peer.TransformersPeer(
                tensors, model.checkpoint.config, cache=kind, **options
            )
            sides[f"transformers, {kind}"] = peer_step(peer, prompts)
    else:
        print("transformers is not installed here: pip install torch transformers")
    return sides


def main() -> None:
    """Print the milliseconds of a step of each side, and what jaxkv's is to it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cells", type=int, default=2048, help="for each sequence")
    parser.add_argument("--steps", type=int, default=4, help="in each turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side")
    args = parser.parse_args()

    machine.main()
    read = machine.bandwidth()["read"]
    model = models.load()
    c = model.config
    weights = sum(x.nbytes for x in jax.tree.leaves(model.weights)) / 1e6
    length = args.cells - 32
    ids = np.random.default_rng(0).integers(100, 20_000, (max(args.batch), length), np.int32)
    for batch in args.batch:
        sides = sides_of(model, ids[:batch], args.cells)
        # Random ids leave close calls; Q8_0 rounds, and what is written by hand has no prompt.
        ours = sides["jaxkv"]()
        for name, side in sides.items():
            if "by hand" not in name and "q8_0" not in name:
                assert np.sum(side() != ours) <= batch // 8, f"{name} picks other tokens"
        visible = batch * length * c.layers * 2 * c.groups * c.size * 4 / 1e6
        print(f"batch {batch}, {length} of {args.cells} cells: {weights:.0f} MB of weights and")
        print(f"{visible:.0f} MB of keys and values have to be read; milliseconds a step:")
        took = turns.take_turns({n: timed(s, args.steps) for n, s in sides.items()}, args.rounds)
        turns.table(took, own=["jaxkv"], megabytes=weights + visible, read=read)


if __name__ == "__main__":
    main()
