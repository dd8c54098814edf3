"""Base class of samplers, and functions that sample tokens from adjusted logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Int32, Key, PyTree


class Sampler:
    """Base class of samplers, which adjust logits before tokens are sampled.

    Make a sampler with `make_sampler` or `Constraint.constrain`, or write a subclass. A subclass is
    a dataclass that is registered with `jax.tree_util.register_dataclass`. Its methods `init`,
    `adjust` and `update` are pure. Each method processes Z sequences independently in one call.
    """

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn at random; if False, the highest logit determines the token."""
        return True

    def init(self, prompts: Int[Array | np.ndarray, "Z n"]) -> PyTree:
        """Return the initial sampler state, a pytree of arrays `[Z, ...]`; empty by default.

        The argument `prompts` has the last tokens of each prompt, padded in front with -1.
        """
        del prompts
        return ()

    def adjust(self, logits: Float[Array, "Z V"], state: PyTree) -> Float[Array, "Z V"]:
        """Return the adjusted logits; a logit of -inf excludes a token.

        Loops pass float32 logits. The argument `state` is the result of `init` or of the last call
        of `update`.
        """
        del state
        return logits

    def update(self, state: PyTree, tokens: Int32[Array, " Z"]) -> PyTree:
        """Return the sampler state after new tokens; a token is -1 if none could be sampled.

        Loops discard the new state of an ended sequence, and of a sequence whose token is -1.
        """
        del tokens
        return state


def check_sampler(sampler: object) -> Sampler:
    """Return a sampler; raise a TypeError if the argument is not a sampler."""
    if not isinstance(sampler, Sampler):
        raise TypeError(
            f"expected a sampler, such as generation.make_sampler(), got {type(sampler)}; make "
            "one with generation.make_sampler()"
        )
    return sampler


def adjust_logits(
    sampler: Sampler, logits: Float[Array, "Z V"], state: PyTree
) -> Float[Array, "Z V"]:
    """Return adjusted logits."""
    # A filter could mask a NaN, and the sequence would continue from invalid logits.
    return jnp.where(has_invalid_logits(logits)[:, None], jnp.nan, sampler.adjust(logits, state))


def has_invalid_logits(logits: Float[Array, "*n V"]) -> Bool[Array, "*n"]:
    """Return which rows of logits contain NaN or +inf."""
    return jnp.any(jnp.isnan(logits) | (logits == jnp.inf), axis=-1)


def make_draw_keys(
    key: Key[Array, " Z"], numbers: Int32[Array, " Z"], use: int = 0
) -> Key[Array, " Z"]:
    """Return random keys; `use` is 0 to draw tokens, 1 to accept drafts, and 2 to draw drafts."""
    keys = jax.vmap(jax.random.fold_in)(key, numbers)
    return keys if use == 0 else jax.vmap(jax.random.fold_in, (0, None))(keys, use)


def sample_tokens(
    sampler: Sampler, adjusted: Float[Array, "Z V"], keys: Key[Array, " Z"]
) -> Int32[Array, " Z"]:
    """Sample a token for each sequence; -1 if no token is allowed or a logit is NaN."""
    if sampler.is_random:
        # Noise is drawn for each token, not for each rank, so a rounding error that swaps two ranks
        # does not change the draw.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, adjusted.shape[1:]))(keys)
        adjusted = adjusted + noise
    token = jnp.argmax(adjusted, axis=1).astype(jnp.int32)
    return jnp.where(jnp.max(adjusted, axis=1) > -jnp.inf, token, -1)
