"""Host memory for stored prompts and preempted requests. SmolLM2 in float32.

Run `python -m benchmarks.host_tier`. It prints:

- the milliseconds to copy the cells of a prompt to host memory and back, beside a snapshot in
  bytes; and the operations of a prefill in the time of one byte, for `swapping.FLOPS_PER_BYTE`;
- the computed tokens of conversations with common beginnings, for a prefix store with a quarter of
  the cells, with and without host memory;
- the time of requests in a pool half as large as their tokens, swapped or recomputed.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from benchmarks import machine, turns
from jaxkv import serving, snapshot
from jaxkv.core.array_utils import nbytes
from jaxkv.serving.copies import copy_to_host


def tokens_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(100, 20_000, size)


def copies(model: models.Model, tokens: int, rounds: int) -> None:
    """Print the times of copies of a prompt out and in."""
    cache, prompt = model.make_cache(cells=tokens), jaxkv.make_batch(tokens_of(0, tokens))

    def compute() -> jaxkv.Cache:
        empty = model.make_cache(cells=tokens)
        return jaxkv.prefill(model.forward, model.params, empty, prompt, ubatch_size=512).cache

    full = compute()
    copied, data = copy_to_host(full, 0, max_bytes=2**40), snapshot.save(full)
    work: dict[str, Callable[[], object]] = {
        "to host memory": lambda: copy_to_host(full, 0, max_bytes=2**40),
        "to a snapshot": lambda: snapshot.save(full),
        "from host memory": lambda: jaxkv.insert(cache, copied, 0, 0),
        "from a snapshot": lambda: snapshot.load(data, into=cache),
        "prefill": compute,
    }
    megabytes = nbytes(full.buffers) / 1e6
    print(f"{tokens} tokens, {megabytes:.0f} MB:")
    middle = turns.table(
        turns.take_turns({name: turns.milliseconds(one) for name, one in work.items()}, rounds)
    )
    for name in list(work)[:-1]:
        print(f"  {name}: {megabytes / middle[name]:.2f} GB/s")
    both = middle["to host memory"] + middle["from host memory"]
    flops = 2 * sum(np.size(x) for x in jax.tree.leaves(model.params)) * tokens
    print(f"  prefill: {flops / middle['prefill'] / 1e6:.0f} GFLOP/s")
    print(f"  operations for each byte: {flops / middle['prefill'] * both / megabytes / 1e6:.0f}")


def small_model(params: jax.Array, step: jaxkv.Step) -> tuple[jaxkv.Step, jax.Array]:
    """A model of one layer, since only the computed tokens count."""
    x = jnp.take(params, step.tokens, axis=0)[:, :, None]
    step, out = jaxkv.attend(step, 0, x, x, x)
    return step, out.reshape(-1, x.shape[-1])[step.outputs] @ params.T


def conversations(count: int, host_bytes: int | None) -> tuple[int, serving.PrefixStore]:
    """Run conversations of four turns with one of eight beginnings; return the computed tokens."""
    begin, message, answer, num_turns = 64, 24, 8, 4
    cells = count // 4 * (begin + num_turns * (message + answer))
    spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=8)
    cache = jaxkv.make_cache(spec, cells=cells + 2048, sequences=count // 4 + 8)
    holders = range(8, count // 4 + 8)
    store = serving.PrefixStore(cache, sequences=holders, cells=cells, host_bytes=host_bytes)
    params = jax.random.normal(jax.random.key(0), (20_000, 8))
    engine = serving.Engine(small_model, params, cache, prefix_store=store)
    texts, computed = [tokens_of(i % 8, begin) for i in range(count)], 0
    for turn in range(num_turns):
        requests = []
        for i in np.random.default_rng(turn).permutation(count):
            texts[i] = np.append(texts[i], tokens_of(1000 + count * turn + i, message))
            requests.append(serving.Request(prompt=texts[i], max_new_tokens=answer, tag=i))
        for output in engine.generate(requests):
            texts[output.request.tag] = np.append(texts[output.request.tag], output.tokens)
            computed += output.request.prompt.size - output.prefix_hit.length + answer - 1
    assert engine.prefix_store is not None
    return computed, engine.prefix_store


def preempted(model: models.Model, host_bytes: int | None) -> Callable[[], float]:
    """A side: eight requests of 256 tokens, in cells for four of them."""
    prompt, answer, count = 64, 192, 8
    cache = model.make_cache(cells=count * (prompt + answer) // 2, sequences=count)
    options = {"reserve": False, "sampling_options": (), "host_bytes": host_bytes}
    engine = serving.Engine(model.forward, model.params, cache, **options)
    engine.warm_up()
    requests = [
        serving.Request(prompt=tokens_of(i, prompt), max_new_tokens=answer) for i in range(count)
    ]

    def side() -> float:
        start = time.perf_counter()
        engine.generate(requests)
        return 1e3 * (time.perf_counter() - start)

    return side


def main() -> None:
    """Print times and numbers of tokens."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    machine.main()
    model = models.load("smollm2")
    copies(model, args.tokens, args.rounds)

    for name, host_bytes in (("without host memory", None), ("with host memory", 10**9)):
        computed, store = conversations(args.conversations, host_bytes)
        print(f"{args.conversations} conversations {name}: {computed} computed tokens, {store}")

    sides = {"swapped": preempted(model, 10**9), "recomputed": preempted(model, None)}
    print("requests in a pool half as large as their tokens:")
    turns.table(turns.take_turns(sides, args.rounds), own=["swapped"])


if __name__ == "__main__":
    main()
