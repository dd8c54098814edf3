"""What a sampler is to a loop, which draws from the logits that it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Int32, Key, PyTree


class Sampler:
    """Adjusts logits; make one with `make_sampler` or `Constraint.constrain`, or write a subclass.

    A subclass is a registered dataclass (`jax.tree_util.register_dataclass`). It says what it does
    in three methods, all pure: of T texts at once, and the same for each text whatever the others
    are.
    """

    @property
    def is_random(self) -> bool:
        """Whether a token is drawn from what is left; if not, the best one is taken."""
        return True

    def init(self, prompts: Int[Array | np.ndarray, "T n"]) -> PyTree:
        """Return the state of T texts.

        Args:
          prompts: the ends of their prompts, as far as they are known; -1 pads, and comes first.

        Returns:
          A tree of arrays `[T, ...]`; by default nothing.
        """
        del prompts
        return ()

    def adjust(self, logits: Float[Array, "T V"], state: PyTree) -> Float[Array, "T V"]:
        """Return what is drawn from: logits, -inf for a token that may not come.

        Args:
          logits: float32.
          state: of the texts.
        """
        del state
        return logits

    def update(self, state: PyTree, tokens: Int32[Array, " T"]) -> PyTree:
        """Return the state after one more token of each text; -1 where none came.

        Loops drop what it returns for a text that no token is picked for.
        """
        del tokens
        return state


def check_sampler(sampler: object) -> Sampler:
    """Return a sampler, or raise a TypeError when it is none."""
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"expected a sampler, such as generation.make_sampler(), got {type(sampler)}"
        )
    return sampler


def adjust_logits(
    sampler: Sampler, logits: Float[Array, "T V"], state: PyTree
) -> Float[Array, "T V"]:
    """Return what a sampler leaves of logits; NaN for a text whose logits are broken.

    A filter could hide a NaN, and the text would go on with what its model has no answer to.
    """
    return jnp.where(has_invalid_logits(logits)[:, None], jnp.nan, sampler.adjust(logits, state))


def has_invalid_logits(logits: Float[Array, "*n V"]) -> Bool[Array, "*n"]:
    """Return for which texts logits hold NaN or +inf."""
    return jnp.any(jnp.isnan(logits) | (logits == jnp.inf), axis=-1)


def make_draw_keys(
    key: Key[Array, " T"], numbers: Int32[Array, " T"], use: int = 0
) -> Key[Array, " T"]:
    """Return the keys of draws by their numbers: of tokens 0, acceptance 1, guesses 2."""
    keys = jax.vmap(jax.random.fold_in)(key, numbers)
    return keys if use == 0 else jax.vmap(jax.random.fold_in, (0, None))(keys, use)


def sample_tokens(
    sampler: Sampler, adjusted: Float[Array, "T V"], keys: Key[Array, " T"]
) -> Int32[Array, " T"]:
    """Draw a token of each text.

    Args:
      sampler: what adjusted the logits.
      adjusted: float32.
      keys: one for each draw.

    Returns:
      The tokens, -1 where none is allowed, and where a logit is NaN.

    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> best = generation.make_sampler()
    >>> logits = jnp.array([[0.1, 0.7], [-jnp.inf, -jnp.inf], [0.1, jnp.nan]])
    >>> generation.sampler.sample_tokens(best, logits, keys).tolist()
    [1, -1, -1]
    """
    if sampler.is_random:
        # Noise belongs to a token and not to its rank, so that two which change places by rounding
        # do not change the draw.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, adjusted.shape[1:]))(keys)
        adjusted = adjusted + noise
    token = jnp.argmax(adjusted, axis=1).astype(jnp.int32)
    return jnp.where(jnp.max(adjusted, axis=1) > -jnp.inf, token, -1)
