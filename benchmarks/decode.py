"""Time of a whole decode step. Float32, with nearly full cells of each sequence.

Run `python -m benchmarks.decode`, or with `--model gemma3 --cells 8192` for a model with windows.
Every side has the same weights and the same number of visible positions, and repeats the step after
the prompt. The sides alternate in one process. Peers, where they are installed: llama.cpp on
float32 and on Q8_0 files made from the same weights, and transformers with its static and its
dynamic cache. Two minimal caches (`by_hand`) run the same model.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from benchmarks import by_hand, machine, turns
from benchmarks.peers import peers_of


def jaxkv_step(model: models.Model, prompts: np.ndarray, *, cells: int, split: bool) -> Callable:
    """The step through jaxkv (plan, apply, run, sample), as a function that returns its token."""
    batch, length = prompts.shape
    streams = batch if split else 1
    cells = cells if split else cells * batch
    cache = model.make_cache(cells=cells, sequences=batch, streams=streams, placement="any")
    cache, logits, *_ = jaxkv.prefill(
        model.forward, model.params, cache, jaxkv.make_batch(list(prompts)), donate=True
    )
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    everyone = jnp.arange(batch, dtype=jnp.int32)
    # The table stays that of the prompt, so each step is the first one after it.
    table, buffers = cache.table, cache.buffers

    @partial(jax.jit, donate_argnames="buffers")
    def step(params: Any, table: Any, buffers: Any, token: jax.Array) -> tuple:
        cache = jaxkv.Cache(table=table, buffers=buffers)
        plan = jaxkv.plan_step(cache, token, sequences=everyone)
        step, logits = model.forward(params, jaxkv.apply(cache, plan))
        return step.cache.buffers, jnp.argmax(logits, axis=-1).astype(jnp.int32), plan.ok

    def again() -> np.ndarray:
        nonlocal buffers
        buffers, chosen, ok = step(model.params, table, buffers, token)
        assert ok, "the cache is full"
        return np.asarray(chosen)

    return again


def by_hand_step(
    model: models.Model, prompts: np.ndarray, layout: by_hand.Layout, *, cells: int
) -> Callable:
    """The same model on a minimal cache of zeros, for its time only."""
    batch, length = prompts.shape
    c = model.config
    sizes = {"layers": len(c.windows), "kv_heads": c.kv_heads, "head_dim": c.head_dim}
    buffers = by_hand.make(layout, batch=batch, cells=cells, **sizes)

    @partial(jax.jit, donate_argnames="buffers")
    def step(params: Any, buffers: Any, token: jax.Array, position: jax.Array) -> tuple:
        begun = by_hand.ByHand(layout, buffers, token, position)
        with by_hand.replace_attend():
            after, logits = model.forward(params, begun)
        return after.buffers, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def again() -> np.ndarray:
        nonlocal buffers
        buffers, chosen = step(model.params, buffers, jnp.zeros(batch, jnp.int32), length)
        return np.asarray(chosen)

    return again


def peer_step(peer: Any, prompts: np.ndarray) -> Callable:
    """A step of a peer, see `benchmarks.peers`."""
    peer.prefill(prompts)

    def again() -> np.ndarray:
        peer.rewind()
        peer.step()
        return np.asarray(peer.chosen)

    return again


def sides_of(
    model: models.Model, name: str, prompts: np.ndarray, cells: int
) -> dict[str, Callable]:
    """All available sides."""
    batch = len(prompts)
    sides = {"jaxkv": jaxkv_step(model, prompts, cells=cells, split=batch > 1)}
    if batch > 1:
        sides["jaxkv, one pool"] = jaxkv_step(model, prompts, cells=cells, split=False)
    if model.checkpoint.architecture == "llama":
        sides["by hand [B,K,N,D]"] = by_hand_step(model, prompts, "BKND", cells=cells)
        sides["by hand [B,N,K,D]"] = by_hand_step(model, prompts, "BNKD", cells=cells)
    others = peers_of(model, name, cells=cells, batch=batch, files=("f32", "q8_0"))
    return sides | {peer: peer_step(one, prompts) for peer, one in others.items()}


def main() -> None:
    """Print the milliseconds of a step of each side, and the ratio of jaxkv's to it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", default="smollm2", help="or gemma3, which has windows")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--cells", type=int, default=2048, help="for each sequence")
    parser.add_argument("--steps", type=int, default=4, help="in each turn")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each side")
    args = parser.parse_args()

    machine.main()
    read = machine.bandwidth()["read"]
    model = models.load(args.model)
    c = model.config
    windows = c.windows
    params = sum(x.nbytes for x in jax.tree.leaves(model.params)) / 1e6
    length = args.cells - 32
    ids = np.random.default_rng(0).integers(100, 20_000, (max(args.batch), length), np.int32)
    for batch in args.batch:
        sides = sides_of(model, args.model, ids[:batch], args.cells)
        # Random prompts have close calls: Q8_0 rounds, and the minimal caches have no prompt.
        ours = sides["jaxkv"]()
        for name, side in sides.items():
            if "by hand" not in name and "q8_0" not in name:
                assert np.sum(side() != ours) <= batch // 8, f"{name} picks other tokens"
        seen = sum(min(length, one.width if one else length) for one in windows)
        visible = batch * seen * 2 * c.kv_heads * c.head_dim * 4 / 1e6
        print(f"batch {batch}, {length} of {args.cells} cells: {params:.0f} MB of weights and")
        print(f"{visible:.0f} MB of keys and values have to be read; milliseconds a step:")
        took = turns.take_turns(
            {n: turns.milliseconds(s, repeats=args.steps) for n, s in sides.items()}, args.rounds
        )
        turns.table(took, own=["jaxkv"], megabytes=params + visible, read=read)


if __name__ == "__main__":
    main()
