"""Picking the next token from logits, on the device."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class Sampler:
    """Picks a token for each sequence; call it with logits. Make one with `make_sampler`.

    A tree of arrays, so that a new seed or temperature is no new program.

    seed: `[]` uint32, of all draws.
    temperature: `[]` float32, what logits are divided by.
    top_p: `[]` float32, only the best tokens with this much probability together may be drawn.
    min_p: `[]` float32, only tokens with this share of the best one's probability may be drawn.
    greedy: whether the best token is always picked; static.
    top_k: only the k best tokens may be drawn, 0 for all; static.
    sorts: whether `top_p` leaves anything out, which takes a sort; static.
    """

    seed: jax.Array  # []
    temperature: jax.Array  # []
    top_p: jax.Array  # []
    min_p: jax.Array  # []
    greedy: bool = field(metadata={"static": True})
    top_k: int = field(metadata={"static": True})
    sorts: bool = field(metadata={"static": True})

    def __call__(self, logits: jax.Array, sequences: jax.Array, positions: jax.Array) -> jax.Array:
        """Pick tokens.

        Args:
          logits: `[T, V]` float32.
          sequences: `[T]` int32, whose logits they are.
          positions: `[T]` int32, where the tokens will stand.

        Returns:
          `[T]` int32. A draw depends on the seed, the sequence and the position, and on nothing
          else: not on the other sequences of the batch.
        """
        return jax.vmap(self._pick)(logits, sequences, positions)

    def _pick(self, logits: jax.Array, sequence: jax.Array, position: jax.Array) -> jax.Array:
        if self.greedy:
            return jnp.argmax(logits).astype(jnp.int32)
        ids, vocabulary = None, logits.shape[0]
        if self.top_k and self.top_k < vocabulary:
            logits, ids = jax.lax.top_k(logits, self.top_k)
        elif self.sorts:
            logits, ids = jax.lax.top_k(logits, vocabulary)
        if self.sorts:  # a token stays if those before it have not enough together
            share = jax.nn.softmax(logits)
            logits = jnp.where(jnp.cumsum(share) - share < self.top_p, logits, -jnp.inf)
        logits = jnp.where(logits >= jnp.max(logits) + jnp.log(self.min_p), logits, -jnp.inf)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), sequence), position)
        # Noise belongs to a token and not to its rank, so that two which change places by rounding
        # do not change the draw.
        noise = jax.random.gumbel(key, (vocabulary,))
        drawn = jnp.argmax(logits / self.temperature + (noise if ids is None else noise[ids]))
        return (drawn if ids is None else ids[drawn]).astype(jnp.int32)


def make_sampler(
    *,
    seed: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Sampler:
    """Make a sampler.

    Args:
      seed: of all draws.
      temperature: what logits are divided by; 0 always picks the best token.
      top_k: only the k best tokens may be drawn; 0 for all.
      top_p: only the best tokens may be drawn that have this much probability together.
      min_p: only tokens may be drawn that have this share of the best one's probability.

    Returns:
      The sampler. Its filters apply in the order of the arguments, each to what the one before it
      left, and the temperature after them, as in llama.cpp.

    Raises:
      ValueError: when a number is out of its range.

    Examples:
      >>> pick = make_sampler()
      >>> pick(jnp.array([[0.1, 0.7, 0.2]]), jnp.array([0]), jnp.array([5])).tolist()
      [1]
    """
    wanted = {
        "seed": (0 <= seed < 2**32, "from 0 to 4294967295", seed),
        "temperature": (temperature >= 0, "at least 0", temperature),
        "top_k": (top_k >= 0, "at least 0", top_k),
        "top_p": (0 < top_p <= 1, "above 0 and at most 1", top_p),
        "min_p": (0 <= min_p <= 1, "from 0 to 1", min_p),
    }
    for name, (ok, span, got) in wanted.items():
        if not ok:
            raise ValueError(f"{name} must be {span}, got {got}")
    return Sampler(
        seed=jnp.asarray(seed, jnp.uint32),
        temperature=jnp.asarray(temperature, jnp.float32),
        top_p=jnp.asarray(top_p, jnp.float32),
        min_p=jnp.asarray(min_p, jnp.float32),
        greedy=temperature == 0,
        top_k=top_k,
        sorts=top_p < 1,
    )
