"""Constraints on the next token, such as a grammar, for all or some sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import is_concrete
from jaxkv.core.pytree import pytree_dataclass, static_field
from jaxkv.generation.padding import select_per_sequence
from jaxkv.generation.sampler import Sampler, check_sampler

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int32, PyTree


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraint:
    """State machine, such as a grammar, that restricts the next token.

    The method `constrain` applies the constraint to all sequences of a sampler. An `Engine` applies
    its constraint only to requests that have a `constraint_state`. Use the same two function
    objects in every `Constraint`, since loops are compiled again for other functions. To use
    several grammars in an engine, concatenate their transition tables. Then pass the first state of
    a grammar as the `constraint_state` of each request with this grammar.

    first: State before the first generated token, a pytree of arrays; it does not depend on the
      prompt. All states have the shapes of `first`.
    allowed: Pure function that maps a state to a mask `[V]` of the tokens that may come next.
    advance: Pure function from a state and a token to the next state.
    """

    first: PyTree
    allowed: Callable[[PyTree], Bool[Array, " V"]]
    advance: Callable[[PyTree, Int32[Array, ""]], PyTree]

    def constrain(self, sampler: Sampler) -> ConstrainedSampler:
        """Return a sampler that samples only allowed tokens.

        If no token is allowed for a sequence, the sequence ends. The functions `allowed` and
        `advance` must never raise. Loops also call these functions for ended sequences and rejected
        draft tokens, and discard the results. If no token is allowed, `advance` gets token 0.

        Args:
          sampler: Sampler that chooses among the allowed tokens.

        Raises:
          ValueError: If the first state has no array, `allowed` does not return a bool mask `[V]`,
            or `advance` changes the shapes or dtypes of a state.

        Examples:
          Only tokens above the last token are allowed:

          >>> rising = generation.Constraint(
          ...     first=jnp.int32(-1),
          ...     allowed=lambda last: jnp.arange(4) > last,
          ...     advance=lambda last, token: token,
          ... ).constrain(generation.make_sampler())
          >>> state = rising.init(np.zeros((1, 0), np.int32))
          >>> state = rising.update(state, jnp.array([1]))
          >>> rising.adjust(jnp.zeros((1, 4)), state).tolist()
          [[-inf, -inf, 0.0, 0.0]]
        """
        rule = check_constraint(self)
        return ConstrainedSampler(
            sampler=check_sampler(sampler),
            first=rule.first,
            bound=None,
            allowed=rule.allowed,
            advance=rule.advance,
        )


@pytree_dataclass
class ConstrainedSampler(Sampler):
    """Sampler restricted to allowed tokens, made by `Constraint.constrain`.

    first: Initial states of Z sequences; without `bound`, one state for all sequences.
    bound: Mask of the constrained sequences; None if all sequences are constrained.
    """

    sampler: Sampler
    first: PyTree
    bound: Bool[Array | np.ndarray, " Z"] | None
    allowed: Callable[[PyTree], Bool[Array, " V"]] = static_field()
    advance: Callable[[PyTree, Int32[Array, ""]], PyTree] = static_field()

    @property
    def is_random(self) -> bool:
        """Whether the wrapped sampler is random."""
        return self.sampler.is_random

    def init(self, prompts: Int[Array | np.ndarray, "Z n"]) -> PyTree:
        """Return the states of the constraint and of the wrapped sampler."""
        if self.bound is not None:
            return self.first, self.sampler.init(prompts)
        count = len(prompts)
        first = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), self.first)
        return first, self.sampler.init(prompts)

    def adjust(self, logits: Float[Array, "Z V"], state: PyTree) -> Float[Array, "Z V"]:
        """Set logits of disallowed tokens to -inf, then call `adjust` of the wrapped sampler."""
        rule, rest = state
        allowed = jax.vmap(self.allowed)(rule)
        if allowed.shape != logits.shape:
            raise ValueError(
                f"expected bool {logits.shape[1:]} from allowed, got {allowed.shape[1:]}; return "
                "one bool for each token"
            )
        if self.bound is not None:
            allowed |= ~self.bound[:, None]
        return self.sampler.adjust(jnp.where(allowed, logits, -jnp.inf), rest)

    def update(self, state: PyTree, tokens: Int32[Array, " Z"]) -> PyTree:
        """Update the states of the wrapped sampler and of the constraint."""
        rule, rest = state
        advanced = jax.vmap(self.advance)(rule, jnp.maximum(tokens, 0))
        rule = select_per_sequence(tokens >= 0, advanced, rule)
        return rule, self.sampler.update(rest, tokens)


def check_constraint(constraint: object) -> Constraint:
    """Return a checked constraint with NumPy arrays; raise as `Constraint.constrain` does."""
    if not isinstance(constraint, Constraint):
        raise TypeError(
            f"expected a Constraint, got {type(constraint)}; make one with generation.Constraint"
        )
    for name in ("allowed", "advance"):
        if not callable(getattr(constraint, name)):
            raise TypeError(
                f"expected a function {name}, got {type(getattr(constraint, name))}; pass a "
                "function"
            )
    first = jax.tree.map(_to_jax_dtype, constraint.first)
    if not jax.tree.leaves(first):
        raise ValueError("expected at least one array in first, got none; make it a 0, say")
    allowed = jax.eval_shape(constraint.allowed, first)
    if getattr(allowed, "ndim", None) != 1 or allowed.dtype != bool:
        raise ValueError(
            f"expected [V] bool from allowed, got {_describe_shapes(allowed)!r}; return one bool "
            "for each token"
        )
    after = jax.eval_shape(constraint.advance, first, np.int32(0))
    if _describe_shapes(after) != _describe_shapes(first):
        raise ValueError(
            f"expected the shapes and dtypes of first from advance, {_describe_shapes(first)!r}, "
            f"got {_describe_shapes(after)!r}; return the same shapes and dtypes"
        )
    return Constraint(first=first, allowed=constraint.allowed, advance=constraint.advance)


def check_initial_state(constraint: Constraint | None, state: PyTree) -> PyTree:
    """Return the checked `constraint_state` of a request as NumPy arrays; None stays None."""
    if state is None:
        return None
    if constraint is None:
        raise ValueError(
            "expected no constraint_state without a constraint, got one; make the engine with "
            "constraint="
        )
    state = jax.tree.map(_to_jax_dtype, state)
    if _describe_shapes(state) != _describe_shapes(constraint.first):
        raise ValueError(
            f"expected a constraint_state with the shapes and dtypes of the first state of the "
            f"constraint, {_describe_shapes(constraint.first)!r}, got "
            f"{_describe_shapes(state)!r}; pass a state like constraint.first"
        )
    return state


def make_constrained_sampler(
    constraint: Constraint, sampler: Sampler, states: Sequence[PyTree]
) -> ConstrainedSampler:
    """Return a sampler for Z sequences; a state of None leaves a sequence unconstrained."""
    filled = [constraint.first if state is None else state for state in states]
    return ConstrainedSampler(
        sampler=sampler,
        first=jax.tree.map(lambda *leaves: np.stack(leaves), *filled),
        bound=np.array([state is not None for state in states]),
        allowed=constraint.allowed,
        advance=constraint.advance,
    )


def _to_jax_dtype(x: ArrayLike) -> Array | np.ndarray:
    """Cast to a dtype that JAX supports; return a concrete array as a NumPy array."""
    return np.asarray(jnp.asarray(x)) if is_concrete(x) else jnp.asarray(x)


def _describe_shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
