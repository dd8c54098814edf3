"""Rules that say which tokens may come next, such as a grammar: for all texts, or for some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import is_concrete
from jaxkv.generation.padding import select_per_text
from jaxkv.generation.sampler import Sampler, check_sampler

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Bool, Float, Int, Int32, PyTree


@dataclass(frozen=True, kw_only=True, eq=False)
class Constraint:
    """What tokens may come next, such as by a grammar: two pure functions of one text's state.

    So the tables of a grammar library, or a call of it (`jax.pure_callback`), can be plugged in.
    `constrain` gives it to a sampler, for all texts; an `Engine` takes it for the requests that
    have a state of it.

    first: the state when a text begins, a tree of arrays; prompts are no part of it. Those of all
      requests have its shapes.
    allowed: the tokens that may come next.
    advance: `(state, token) -> state`. Pass the same functions every time: others are another
      program.

    Several rules are one whose state says which: `allowed=lambda state: tables[state]`, where the
    tables of all grammars lie one behind another, and a request begins where its own does.
    """

    first: PyTree
    allowed: Callable[[PyTree], Bool[Array, " V"]]
    advance: Callable[[PyTree, Int32[Array, ""]], PyTree]

    def constrain(self, sampler: Sampler) -> ConstrainedSampler:
        """Return a sampler that chooses only among tokens that are allowed.

        A text that is allowed no token ends. All texts are computed together, so both functions are
        called for those that have ended, too, and `advance` with tokens that are not picked: those
        of guesses that do not hold, or 0 where no token is allowed. What they return there is
        dropped, but a matcher that raises must not do so.

        Args:
          sampler: of what is allowed.

        Raises:
          TypeError: when it is no sampler, or `allowed` or `advance` are no functions.
          ValueError: when `first` has no array, `allowed` gives no `[V]` bool, or `advance` a state
            of other shapes or dtypes.

        Examples:
          Tokens that rise:

          >>> rising = generation.Constraint(
          ...     first=jnp.int32(-1),
          ...     allowed=lambda last: jnp.arange(4) > last,
          ...     advance=lambda last, token: token,
          ... ).constrain(generation.make_sampler())
          >>> state = rising.init(np.zeros((1, 0), np.int32))
          >>> state = rising.update(state, jnp.array([1]))
          >>> rising.adjust(jnp.zeros((1, 4)), state).tolist()
          [[-inf, -inf, 0.0, 0.0]]

          The same, asked of a library on the host:

          >>> def allowed(last):
          ...     mask = jax.ShapeDtypeStruct((4,), bool)
          ...     ask = lambda last: np.arange(4) > last
          ...     return jax.pure_callback(ask, mask, last, vmap_method="sequential")
          >>> asking = generation.Constraint(
          ...     first=jnp.int32(-1), allowed=allowed, advance=lambda last, token: token
          ... ).constrain(generation.make_sampler())
          >>> asking.adjust(jnp.zeros((1, 4)), state).tolist()
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, eq=False)
class ConstrainedSampler(Sampler):
    """A sampler that is shown only the tokens that a rule allows; `Constraint.constrain` makes one.

    sampler: of what is allowed.
    first: a tree of arrays, the state of the rule when a text begins; or, where `bound` is given,
      `[T, ...]`, the states of T texts, whose tokens so far they know.
    bound: the texts that the rule is for; None for all.
    allowed: see `Constraint`, static.
    advance: see `Constraint`, static.
    """

    sampler: Sampler
    first: PyTree
    bound: Bool[Array | np.ndarray, " T"] | None
    allowed: Callable[[PyTree], Bool[Array, " V"]] = field(metadata={"static": True})
    advance: Callable[[PyTree, Int32[Array, ""]], PyTree] = field(metadata={"static": True})

    @property
    def is_random(self) -> bool:
        """Whether the sampler of what is allowed does."""
        return self.sampler.is_random

    def init(self, prompts: Int[Array | np.ndarray, "T n"]) -> PyTree:
        """Return the states of the rule, which prompts are no part of, and of the sampler."""
        if self.bound is not None:
            return self.first, self.sampler.init(prompts)
        count = len(prompts)
        first = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), self.first)
        return first, self.sampler.init(prompts)

    def adjust(self, logits: Float[Array, "T V"], state: PyTree) -> Float[Array, "T V"]:
        """Hide what is not allowed of logits, float32, then adjust the rest."""
        rule, rest = state
        allowed = jax.vmap(self.allowed)(rule)
        if allowed.shape != logits.shape:
            raise ValueError(
                f"expected bool {logits.shape[1:]} from allowed, got {allowed.shape[1:]}"
            )
        if self.bound is not None:
            allowed |= ~self.bound[:, None]
        return self.sampler.adjust(jnp.where(allowed, logits, -jnp.inf), rest)

    def update(self, state: PyTree, tokens: Int32[Array, " T"]) -> PyTree:
        """Advance the rule and the sampler by tokens; the rule stays where there is none."""
        rule, rest = state
        advanced = jax.vmap(self.advance)(rule, jnp.maximum(tokens, 0))
        rule = select_per_text(tokens >= 0, advanced, rule)
        return rule, self.sampler.update(rest, tokens)


def check_constraint(constraint: object) -> Constraint:
    """Return a rule with its first state as NumPy arrays.

    Raises:
      TypeError: when it is no rule, or its functions are none.
      ValueError: when `first` has no array, `allowed` gives no `[V]` bool, or `advance` a state of
        other shapes or dtypes.

    >>> rule = Constraint(
    ...     first=0, allowed=lambda s: jnp.arange(4) > s, advance=lambda s, token: token > 0
    ... )
    >>> check_constraint(rule)
    Traceback (most recent call last):
    ...
    ValueError: expected the shapes and dtypes of first from advance, 'int32[]', got 'bool[]'
    """
    if not isinstance(constraint, Constraint):
        raise TypeError(f"expected a Rule, got {type(constraint)}")
    for name in ("allowed", "advance"):
        if not callable(getattr(constraint, name)):
            raise TypeError(f"expected a function {name}, got {type(getattr(constraint, name))}")
    first = jax.tree.map(_to_jax_dtype, constraint.first)
    if not jax.tree.leaves(first):
        raise ValueError("expected at least one array in first, got none: make it a 0, say")
    allowed = jax.eval_shape(constraint.allowed, first)
    if getattr(allowed, "ndim", None) != 1 or allowed.dtype != bool:
        raise ValueError(f"expected [V] bool from allowed, got {_describe_shapes(allowed)!r}")
    after = jax.eval_shape(constraint.advance, first, np.int32(0))
    if _describe_shapes(after) != _describe_shapes(first):
        raise ValueError(
            f"expected the shapes and dtypes of first from advance, {_describe_shapes(first)!r}, "
            f"got {_describe_shapes(after)!r}"
        )
    return Constraint(first=first, allowed=constraint.allowed, advance=constraint.advance)


def check_initial_state(constraint: Constraint | None, state: PyTree) -> PyTree:
    """Return the state that a request begins with as NumPy arrays; None for a request without one.

    Raises:
      ValueError: when there is no rule, or the state has other shapes or dtypes than its first.
    """
    if state is None:
        return None
    if constraint is None:
        raise ValueError(
            "expected no constraint_state without a constraint: make the engine with constraint="
        )
    state = jax.tree.map(_to_jax_dtype, state)
    if _describe_shapes(state) != _describe_shapes(constraint.first):
        raise ValueError(
            f"expected a constraint_state with the shapes and dtypes of the first state of the "
            f"constraint, {_describe_shapes(constraint.first)!r}, got {_describe_shapes(state)!r}"
        )
    return state


def make_constrained_sampler(
    constraint: Constraint, sampler: Sampler, states: Sequence[PyTree]
) -> ConstrainedSampler:
    """Return the sampler of T texts with their states; None is a text that the rule is not for.

    Tokens that rise, in the first of two texts:

    >>> rule = Constraint(
    ...     first=-1,
    ...     allowed=lambda last: jnp.arange(4) > last,
    ...     advance=lambda last, token: token,
    ... )
    >>> sampler = make_constrained_sampler(
    ...     check_constraint(rule), generation.make_sampler(), [np.int32(1), None]
    ... )
    >>> state = sampler.init(np.zeros((2, 0), np.int32))
    >>> sampler.adjust(jnp.zeros((2, 4)), state).tolist()
    [[-inf, -inf, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    """
    filled = [constraint.first if state is None else state for state in states]
    return ConstrainedSampler(
        sampler=sampler,
        first=jax.tree.map(lambda *leaves: np.stack(leaves), *filled),
        bound=np.array([state is not None for state in states]),
        allowed=constraint.allowed,
        advance=constraint.advance,
    )


def _to_jax_dtype(x: ArrayLike) -> Array | np.ndarray:
    """Return an array of JAX's dtypes, a NumPy one where it is known."""
    return np.asarray(jnp.asarray(x)) if is_concrete(x) else jnp.asarray(x)


def _describe_shapes(tree: PyTree) -> PyTree:
    """Return a tree with the dtype and shape of each array."""
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
