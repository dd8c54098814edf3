"""Samples of one prompt, and a first call, by jaxkv and by the sampler of tunix, on one model.

Run `python -m benchmarks.tunix_peer`; it needs tunix, see tests/peers/test_tunix.py. The model is a
random Llama 3 of tunix with 39.9M parameters in float32. The sampler of tunix repeats the prompt
for each sample. A first call starts with no compiled program; its compile seconds are those that
JAX reports.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

import jaxkv
from benchmarks import machine, turns
from tests.peers.test_tunix import Numbers, definitions, make

SIZES = {"num_layers": 10, "embed_dim": 512, "hidden_dim": 1536, "num_heads": 8, "head_dim": 64}
SIZES |= {"num_kv_heads": 4, "vocab_size": 16384, "rope_theta": 1_000_000, "norm_eps": 1e-6}


def compile_seconds(work: Callable[[], object]) -> tuple[float, float, int]:
    """Seconds of a call without compiled programs, seconds in the compiler, and programs."""
    durations: list[float] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(duration)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    jax.block_until_ready(work())
    elapsed = time.perf_counter() - start
    jax.monitoring.unregister_event_duration_listener(listen)
    return elapsed, sum(durations), len(durations)


def main() -> None:
    """Print the milliseconds of samples, and the seconds of first calls."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8], help="of first calls")
    args = parser.parse_args()
    machine.main()
    page = definitions()
    from tunix.generate.sampler import CacheConfig, Sampler  # definitions() makes it importable

    model = make("llama3", SIZES)
    forward, params = page["adapt"](model)
    spec = page["spec_of"](model.config)
    names = "num_layers", "num_kv_heads", "head_dim"
    cells = args.prompt + args.tokens + 64
    config = CacheConfig(cache_size=cells, **{name: SIZES[name] for name in names})
    prompt = np.random.default_rng(0).integers(2, 16000, args.prompt - 1).tolist()

    def theirs(count: int) -> object:
        texts = [" ".join(map(str, prompt))] * count
        options = {"max_prompt_length": args.prompt, "temperature": 1.0, "top_p": 1.0, "seed": 0}
        return Sampler(model, Numbers(), config)(texts, args.tokens, **options).tokens

    sampler = jaxkv.generation.make_sampler(temperature=1.0)
    options = {"spec": spec, "max_new_tokens": args.tokens, "sampler": sampler}

    def ours(prompts: list[list[int]], num_samples: int) -> object:
        return jaxkv.generate(forward, params, prompts, num_samples=num_samples, **options).tokens

    start = [[1, *prompt]]
    sides = {
        "jaxkv, num_samples": partial(ours, start, args.samples),
        "jaxkv, prompt repeated": partial(ours, start * args.samples, 1),
        "tunix": partial(theirs, args.samples),
    }
    print(f"{args.samples} samples of {args.tokens} tokens after a prompt of {args.prompt}:")
    timed = {name: turns.milliseconds(side) for name, side in sides.items()}
    turns.table(turns.take_turns(timed, args.rounds), own=list(sides)[:1])
    for count in args.texts:
        print(f"first call with {count} texts: seconds, of them in the compiler, and programs")
        for name, side in (
            ("jaxkv", partial(ours, start * count, 1)),
            ("tunix", partial(theirs, count)),
        ):
            elapsed, seconds, programs = compile_seconds(side)
            print(f"  {name:6s} {elapsed:6.2f} {seconds:6.2f} {programs:4d}")


if __name__ == "__main__":
    main()
