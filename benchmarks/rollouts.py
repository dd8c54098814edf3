"""G samples of one prompt, and policy gradients of them: shared against repeated prompts.

Run `python -m benchmarks.rollouts`. All sides have the same weights, a random decoder in plain JAX,
and alternate in one process. The sides without jaxkv attend by `jax.nn.dot_product_attention`, to
arrays of keys and values that are filled in order.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from benchmarks import machine, turns

LAYERS, HEADS, KV_HEADS, SIZE, VOCABULARY = 4, 8, 4, 64, 4096
WIDTH = HEADS * SIZE
ROPE = jaxkv.Rope.make(SIZE)
SPEC = jaxkv.CacheSpec.attention(LAYERS, KV_HEADS, SIZE, rope=ROPE)

Attend = Callable[..., jax.Array]


def make_params() -> dict[str, Any]:
    """Random weights: 15M parameters."""
    keys = iter(jax.random.split(jax.random.key(0), 1 + 6 * LAYERS))

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    shapes = {"q": HEADS * SIZE, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE, "up": 4 * WIDTH}
    layers = [
        {name: draw(WIDTH, width) for name, width in shapes.items()}
        | {"out": draw(HEADS * SIZE, WIDTH), "down": draw(4 * WIDTH, WIDTH)}
        for _ in range(LAYERS)
    ]
    return {"embed": 8 * draw(VOCABULARY, WIDTH), "layers": layers}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def hidden(params: Any, tokens: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
    """The last layer's output of tokens `[R, T]`, with a replaceable attention."""
    x = params["embed"][tokens]
    for layer, w in enumerate(params["layers"]):
        y = norm(x)
        q, k, v = ((y @ w[name]).reshape(*tokens.shape, -1, SIZE) for name in "qkv")
        q, k = (ROPE.rotate(heads, positions) for heads in (q, k))
        x = x + attend(layer, q, k, v).reshape(x.shape) @ w["out"]
        x = x + jax.nn.silu(norm(x) @ w["up"]) @ w["down"]
    return norm(x)


def forward(params: Any, step: jaxkv.Step) -> tuple:
    """The model on a cache."""
    caches = [step]

    def attend(layer: int, *qkv: jax.Array) -> jax.Array:
        step, out = jaxkv.attend(caches.pop(), layer, *qkv)
        caches.append(step)
        return out

    x = hidden(params, step.tokens, step.positions, attend).reshape(-1, WIDTH)
    return caches[0], x[step.outputs] @ params["embed"].T


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)[..., 0]


def loss_of_repeated(params: Any, prompt: jax.Array, answers: jax.Array, gains: jax.Array):
    """The policy loss with the prompt in front of each answer."""
    start = jnp.broadcast_to(prompt, (len(answers), len(prompt)))
    tokens = jnp.concatenate([start, answers], axis=1)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def attend(_: int, *qkv: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*qkv, is_causal=True)

    x = hidden(params, tokens, positions, attend)[:, len(prompt) - 1 : -1]
    return -jnp.mean(jnp.sum(logprobs_of(x @ params["embed"].T, answers), axis=1) * gains)


def loss_of_shared(params: Any, prompt: jax.Array, answers: jax.Array, gains: jax.Array):
    """The policy loss by `jaxkv.score`, on the mesh of `jax.set_mesh` if there is one."""
    rules = None if jax.sharding.get_abstract_mesh().empty else jaxkv.sharding.ShardingRules()
    scores = jaxkv.score(
        forward, params, answers, prompts=prompt[None], spec=SPEC, sharding_rules=rules
    )
    return -jnp.mean(jnp.sum(scores, axis=1) * gains)


@partial(jax.jit, static_argnames=("group", "num_tokens", "is_shared"))
def sample_by_hand(
    params: Any, prompt: jax.Array, key: jax.Array, *, group: int, num_tokens: int, is_shared: bool
) -> jax.Array:
    """G samples from arrays `[G, N, K, D]`, with the prompt computed once or G times."""
    rows, length = 1 if is_shared else group, len(prompt)
    cells = length + num_tokens
    caches = [[jnp.zeros((group, cells, KV_HEADS, SIZE))] * 2 for _ in range(LAYERS)]

    def attend_from(start: jax.Array, layer: int, q: jax.Array, *kv: jax.Array) -> jax.Array:
        for i, new in enumerate(kv):
            new = jnp.broadcast_to(new, (group, *new.shape[1:]))
            caches[layer][i] = jax.lax.dynamic_update_slice(caches[layer][i], new, (0, start, 0, 0))
        if q.shape[1] > 1:
            return jax.nn.dot_product_attention(q, *kv, is_causal=True)
        mask = (jnp.arange(cells) <= start)[None, None, None]
        return jax.nn.dot_product_attention(q, *caches[layer], mask=mask)

    def draw(x: jax.Array, i: jax.Array | int) -> jax.Array:
        logits = jnp.broadcast_to(x[:, -1] @ params["embed"].T, (group, VOCABULARY))
        return jax.random.categorical(jax.random.fold_in(key, i), logits)

    tokens = jnp.broadcast_to(prompt, (rows, length))
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    token = draw(hidden(params, tokens, positions, partial(attend_from, 0)), 0)

    def step(carry: tuple, i: jax.Array) -> tuple:
        caches[:], token = carry[0], carry[1]
        at = length + i
        positions = jnp.full((group, 1), at)
        x = hidden(params, token[:, None], positions, partial(attend_from, at))
        return (list(caches), draw(x, i + 1)), token

    (_, last), others = jax.lax.scan(step, (list(caches), token), jnp.arange(num_tokens - 1))
    return jnp.concatenate([others.T, last[:, None]], axis=1)


def samplers_of(params: Any, prompt: jax.Array, group: int, num_tokens: int) -> dict[str, Callable]:
    """Functions that return G samples of a prompt, by name."""
    options = {"group": group, "num_tokens": num_tokens}
    by_hand = partial(sample_by_hand, params, prompt, jax.random.key(0), **options)
    tokens, sampler = np.asarray(prompt), jaxkv.generation.make_sampler(temperature=1.0)
    ours = partial(
        jaxkv.generate, forward, params, spec=SPEC, max_new_tokens=num_tokens, sampler=sampler
    )
    return {
        "jaxkv, num_samples": lambda: ours([tokens], num_samples=group).tokens,
        "jaxkv, prompt repeated": lambda: ours([tokens] * group).tokens,
        "by hand, prompt once": partial(by_hand, is_shared=True),
        "by hand, prompt repeated": partial(by_hand, is_shared=False),
    }


def gradients_of(params: Any, prompt: jax.Array, group: int, num_tokens: int) -> dict[str, Any]:
    """Jitted functions of the params that return a loss and its gradient, by name."""
    rng = np.random.default_rng(1)
    answers = jnp.asarray(rng.integers(0, VOCABULARY, (group, num_tokens)), jnp.int32)
    gains = jnp.asarray(rng.normal(size=group), jnp.float32)
    losses = {"jaxkv.score": loss_of_shared, "by hand, prompt repeated": loss_of_repeated}
    return {
        name: jax.jit(
            jax.value_and_grad(partial(loss, prompt=prompt, answers=answers, gains=gains))
        )
        for name, loss in losses.items()
    }


def main() -> None:
    """Print the milliseconds of samples and of gradients, and the temporaries of gradients."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--tokens", type=int, default=64, help="of each sample")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    machine.main()
    params = make_params()
    for length in args.prompts:
        prompt = np.random.default_rng(0).integers(0, VOCABULARY, length).astype(np.int32)
        for group in args.groups:
            print(f"prompt of {length}, {group} samples of {args.tokens} tokens")
            print(" samples:")
            sides = samplers_of(params, jnp.asarray(prompt), group, args.tokens)
            timed = {name: turns.milliseconds(side) for name, side in sides.items()}
            turns.table(turns.take_turns(timed, args.rounds), own=list(sides)[:1])
            print(" gradients:")
            sides = gradients_of(params, jnp.asarray(prompt), group, args.tokens)
            (loss, ours), (_, theirs) = (side(params) for side in sides.values())
            error = jax.tree.map(
                lambda a, b: jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)), ours, theirs
            )
            timed = {name: turns.milliseconds(partial(f, params)) for name, f in sides.items()}
            turns.table(turns.take_turns(timed, args.rounds), own=list(sides)[:1])
            bytes_of = [
                side.lower(params).compile().memory_analysis().temp_size_in_bytes
                for side in sides.values()
            ]
            print(
                f"  temporaries {bytes_of[0] / 1e6:.0f} MB and {bytes_of[1] / 1e6:.0f} MB, "
                f"{bytes_of[0] / bytes_of[1]:.2f}; loss {loss:.3f}, gradients differ by at most "
                f"{max(jax.tree.leaves(error)):.1e}"
            )


if __name__ == "__main__":
    main()
