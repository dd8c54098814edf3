"""`Rope`: the rotary position embedding of a layer, for models and for caches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.array_utils import stack_unfused

if TYPE_CHECKING:
    from jaxtyping import Array, ArrayLike, Float, Int


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding. Hashable, without arrays.

    frequencies: angle of each pair of numbers in radians per position. The numbers of a head after
      the last pair are not rotated.
    interleaved: If True, pairs are (0, 1), (2, 3) and so on. If False, the n pairs are (0, n), (1,
      n + 1) and so on, as in Hugging Face models.
    attention_factor: factor by which rotated queries and keys are multiplied (YaRN).
    """

    frequencies: tuple[float, ...]
    interleaved: bool = False
    attention_factor: float = 1.0

    def __post_init__(self):
        if not np.all(np.isfinite((*self.frequencies, self.attention_factor))):
            raise ValueError(
                "expected finite frequencies and a finite attention_factor, got "
                f"{self.frequencies} and {self.attention_factor}; check the model's config"
            )

    @staticmethod
    def make(size: int, *, base: float = 10000.0, interleaved: bool = False) -> Rope:
        """Make an unscaled rotary embedding.

        Args:
          size: number of rotated numbers of a head, even, at most D.
          base: base of the frequencies; the slowest pair turns about 1 / base radians per position.
          interleaved: see `Rope`.

        Raises:
          ValueError: If the size is odd or below 2, or the base is not above 0.

        Examples:
          >>> Rope.make(4, base=100.0).frequencies
          (1.0, 0.1)

        llama.cpp: `rope_freq_base`.
        """
        if size % 2 or size < 2:
            raise ValueError(f"expected an even size, got {size}; numbers are rotated in pairs")
        if not base > 0:
            raise ValueError(f"expected a base above 0, got {base}; pass base=10000.0")
        frequencies = tuple(float(base ** (-pair / size)) for pair in range(0, size, 2))
        return Rope(frequencies=frequencies, interleaved=interleaved)

    def rotate(
        self,
        x: Float[Array | np.ndarray, "*n H D"],
        positions: Int[ArrayLike, "*n"] | Int[ArrayLike, "*n axes"],
        axes: Sequence[int] | None = None,
    ) -> Float[Array, "*n H D"]:
        """Rotate queries or keys to their positions. The result has the dtype of `x`.

        Sines and products are float32. Angles are exact to 1e-6 radians at every position.

        Args:
          x: queries or keys.
          positions: position of each token, or its positions on several axes, such as time, height
            and width in an image.
          axes: for positions on several axes, the axis of each pair, static; None for one position.
            A shift of the cache moves a key by the same amount on all axes, so the rope of the
            cache's spec needs no axes.

        Raises:
          ValueError: If shapes do not match, or a head has fewer numbers than the rope rotates.
          ValueError: If `axes` does not have an axis of `positions` for each pair.

        Examples:
          >>> quarter = Rope(frequencies=(math.pi / 2,))  # a quarter turn per position
          >>> quarter.rotate(jnp.array([[1.0, 0.0]]), jnp.array(1)).round(3) + 0.0
          Array([[0., 1.]], dtype=float32)

          Sections of pairs, as in Qwen2-VL, and alternating pairs, as in Qwen3.5:

          >>> rope, x, positions = Rope.make(64), jnp.ones((1, 1, 64)), jnp.array([[5, 2, 3]])
          >>> sections = rope.rotate(x, positions, [0] * 8 + [1] * 12 + [2] * 12)
          >>> alternating = rope.rotate(x, positions, [0, 1, 2] * 10 + [0, 1])

        llama.cpp: `ggml_rope_ext`; for several axes `ggml_rope_multi`.
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"expected queries or keys of floats, got {x.dtype}; cast them")
        if not jnp.issubdtype(jnp.result_type(positions), jnp.integer):
            raise TypeError(
                f"expected positions of int32, got {jnp.result_type(positions)}; pass "
                "ubatch.positions"
            )
        pairs = len(self.frequencies)
        if axes is not None:
            axes = _check_axes(tuple(axes), positions, x.shape, pairs)
        elif np.shape(positions) != x.shape[:-2]:
            raise ValueError(
                f"expected positions of shape {x.shape[:-2]} for x of {x.shape}, got "
                f"{np.shape(positions)}; pass ubatch.positions, and x [R, T, H, D]"
            )
        if x.shape[-1] < 2 * pairs:
            raise ValueError(
                f"expected heads of at least {2 * pairs} for a rope of {pairs} pairs, got "
                f"{x.shape[-1]}; make the rope for the head"
            )
        return _rotate(self, axes, x, jnp.asarray(positions))

    def linear(self, *, factor: float) -> Rope:
        """Divide all frequencies by `factor`, the new context length over the original length.

        A `factor` that is not above 0 raises ValueError.

        >>> Rope.make(4, base=100.0).linear(factor=2.0).frequencies
        (0.5, 0.05)

        llama.cpp: `LLAMA_ROPE_SCALING_TYPE_LINEAR`.
        """
        return self.divide([factor] * len(self.frequencies))

    def divide(self, factors: Sequence[float]) -> Rope:
        """Divide the frequency of pair i by `factors[i]`; some checkpoints store such factors.

        A wrong number of factors, or a factor that is not above 0, raises ValueError.

        >>> Rope.make(4, base=100.0).divide([1.0, 4.0]).frequencies
        (1.0, 0.025)

        llama.cpp: `rope_freqs`.
        """
        if len(factors) != len(self.frequencies):
            raise ValueError(
                f"expected {len(self.frequencies)} factors, one a pair, got {len(factors)}; pass "
                "one for each pair"
            )
        if not all(factor > 0 for factor in factors):
            raise ValueError(
                f"expected factors above 0, got {list(factors)}; pass 1 to leave a pair unchanged"
            )
        pairs = zip(self.frequencies, factors, strict=True)
        return replace(self, frequencies=tuple(float(f / by) for f, by in pairs))

    def llama3(
        self, *, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
    ) -> Rope:
        """Divide low frequencies by a factor, as in Llama 3.1.

        A frequency is unchanged if its pair turns more than `high_freq_factor` times within
        `original` positions. A frequency is divided by `factor` if its pair turns fewer than
        `low_freq_factor` times. Frequencies between the two limits are interpolated; if the limits
        are equal, there are none (Llama 4).

        Raises ValueError if `factor` or `original` is not above 0, or `high_freq_factor` is below
        `low_freq_factor`.

        >>> plain = Rope.make(4, base=1e8)
        >>> slowed = plain.llama3(
        ...     factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original=8192
        ... )
        >>> [old / new for old, new in zip(plain.frequencies, slowed.frequencies)]
        [1.0, 8.0]
        """
        _check_above(0, factor=factor, original=original)
        if not low_freq_factor <= high_freq_factor < math.inf:
            raise ValueError(
                f"expected a finite high_freq_factor of at least {low_freq_factor}, got "
                f"{high_freq_factor}; check the model's config"
            )
        frequencies = np.asarray(self.frequencies)
        # `fast` is 1 for unchanged frequencies and 0 for divided ones, linear in the number of
        # turns, or a step if the limits are equal.
        rotations = original * frequencies / (2 * math.pi)
        width = high_freq_factor - low_freq_factor
        ahead = rotations - low_freq_factor
        fast = np.clip(ahead / width, 0.0, 1.0) if width else (ahead > 0).astype(float)
        return replace(
            self, frequencies=tuple((frequencies * (fast + (1 - fast) / factor)).tolist())
        )

    def yarn(
        self,
        *,
        factor: float,
        original: int,
        base: float,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float | None = None,
        truncate: bool = True,
    ) -> Rope:
        """Scale low frequencies and the logits of attention by YaRN (arXiv 2309.00071).

        Args:
          factor: ratio of the new context length to the original one.
          original: number of positions of the original context.
          base: base of the unscaled rope, see `Rope.make`.
          beta_fast: if a pair turns more than `beta_fast` times within the original context, its
            frequency is unchanged.
          beta_slow: if a pair turns fewer than `beta_slow` times within the original context, its
            frequency is divided by `factor`. Frequencies between the limits are interpolated.
          attention_factor: see `Rope`. None means 0.1 ln(`factor`) + 1, or 1 for factors up to 1.
          truncate: `beta_fast` and `beta_slow` are converted to indices of pairs. If True, the
            index of `beta_fast` is rounded down, and the index of `beta_slow` up. Pass False for
            gpt-oss.

        Raises:
          ValueError: If `base` is not above 1, or another number is not above 0 or not finite.

        >>> plain = Rope.make(4, base=1e6)
        >>> slowed = plain.yarn(factor=4.0, original=2048, base=1e6)
        >>> [old / new for old, new in zip(plain.frequencies, slowed.frequencies)]
        [1.0, 4.0]

        llama.cpp: `LLAMA_ROPE_SCALING_TYPE_YARN`.
        """
        _check_above(0, factor=factor, original=original, beta_fast=beta_fast, beta_slow=beta_slow)
        _check_above(1, base=base)
        frequencies = np.asarray(self.frequencies)
        pairs = len(frequencies)

        def pair_index_at(rotations: float) -> float:
            # Pair i has the frequency base ** (-i / pairs), so it turns original *
            # base ** (-i / pairs) / (2 pi) times. This equation is solved for i.
            return pairs * math.log(original / (rotations * 2 * math.pi)) / math.log(base)

        low, high = pair_index_at(beta_fast), pair_index_at(beta_slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        # The bound of `high` and the 0.001, which prevents a division by 0, are those of llama.cpp
        # and Hugging Face.
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        slow = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0.0, 1.0)
        if attention_factor is None:
            attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return replace(
            self,
            frequencies=tuple((frequencies * (1 - slow + slow / factor)).tolist()),
            attention_factor=attention_factor,
        )


@dataclass(frozen=True)
class NotGiven:
    """Rope of a cache made without the argument `rope`; keys of the cache cannot be shifted."""


NOT_GIVEN = NotGiven()


def _check_above(limit: float, **numbers: float) -> None:
    for name, number in numbers.items():
        if not limit < number < math.inf:
            raise ValueError(
                f"expected a finite {name} above {limit}, got {number}; check the model's config"
            )


def _check_axes(
    axes: tuple[int, ...], positions: ArrayLike, shape: tuple[int, ...], pairs: int
) -> tuple[int, ...]:
    """Return the axis of each pair as integers; raise if they do not fit to the positions."""
    *tokens, count = np.shape(positions) or (0,)
    if tuple(tokens) != shape[:-2] or np.ndim(positions) != len(shape) - 1:
        raise ValueError(
            f"expected positions of shape {shape[:-2]} and one more axis for x of {shape} and "
            f"axes, got {np.shape(positions)}; leave out axes for one position of each token"
        )
    if len(axes) != pairs or not all(0 <= axis < count for axis in axes):
        raise ValueError(
            f"expected {pairs} axes from 0 to {count - 1}, one a pair, got {list(axes)}; pass the "
            "axis of each pair"
        )
    return tuple(int(axis) for axis in axes)


# A program with many layers contains this function once for each shape.
@partial(jax.jit, static_argnames=("rope", "axes"))
def _rotate(
    rope: Rope,
    axes: tuple[int, ...] | None,
    x: Float[Array | np.ndarray, "*n H D"],
    positions: Int[Array, "*n"] | Int[Array, "*n axes"],
) -> Float[Array, "*n H D"]:
    pairs = len(rope.frequencies)
    positions = positions[..., None] if axes is None else positions[..., np.array(axes, np.int32)]
    angles = jnp.expand_dims(_angles(positions, rope.frequencies), -2)  # [..., 1, pairs]
    # XLA fuses a pair axis of (a, b) and (b, a) into one loop; concatenated halves are slower.
    both = -1 if rope.interleaved else -2
    cos, sin = (rope.attention_factor * f(angles) for f in (jnp.cos, jnp.sin))
    cos, sin = jnp.split(stack_unfused([cos, -sin, sin], both), [1], axis=both)
    turned, rest = x[..., : 2 * pairs].astype(jnp.float32), x[..., 2 * pairs :]
    ab = turned.reshape(*x.shape[:-1], *((pairs, 2) if rope.interleaved else (2, pairs)))
    # A pair (a, b) becomes (a cos - b sin, b cos + a sin). `sin` has both signs on the axis of
    # pairs.
    turned = (ab * cos + jnp.flip(ab, both) * sin).reshape(turned.shape)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def _angles(
    positions: Int[Array, "*n 1"] | Int[Array, "*n pairs"], frequencies: tuple[float, ...]
) -> Float[Array, "*n pairs"]:
    """Return the angle of each pair in float32, with full turns removed.

    The last axis of `positions` has the position of each pair, or one position for all pairs.

    A float32 product of position and frequency has an error of position * 2**-24. Each frequency is
    therefore converted to an integer of 64 bits, in units of 2**-64 turns. The upper 32 bits are
    multiplied by the position in int32. If this product overflows, only full turns are lost.
    """
    fractions = [_fraction_of_a_turn(frequency) for frequency in frequencies]
    upper = np.array([f >> 32 for f in fractions], np.uint32).astype(np.int32)
    lower = np.array([(f & 0xFFFFFFFF) * 2.0**-64 for f in fractions], np.float32)
    positions = positions.astype(jnp.int32)
    upper, lower = (x.reshape((1,) * (positions.ndim - 1) + x.shape) for x in (upper, lower))
    # `upper` is in units of 2**-32 turns, and `lower` is in turns.
    rotations = (positions * upper).astype(jnp.float32) * np.float32(2.0**-32)
    return (rotations + positions.astype(jnp.float32) * lower) * np.float32(2 * math.pi)


_INVERSE_OF_TWO_PI = 0x28BE60DB9391054A7F09D5F47D4D3770
"""2**128 / (2 pi)."""


def _fraction_of_a_turn(frequency: float) -> int:
    """Return the fraction of a turn per position, multiplied by 2**64."""
    numerator, denominator = frequency.as_integer_ratio()
    return (numerator * _INVERSE_OF_TWO_PI // denominator >> 64) % 2**64
