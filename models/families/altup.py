"""Alternating updates (AltUp) of Gemma 3n: several vectors per token, of which layers read one."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.families.layers import Linear, RMSNorm
from models.families.linear import linear, matrix
from models.families.sources import Sources


class AltUp(nnx.Module):
    """Predictor and corrector of the A vectors of each token.

    active: index of the vector that the layer reads and writes.
    scale: factors of the corrected active vector.
    """

    def __init__(
        self, count: int, active: int, width: int, eps: float, dtype: jnp.dtype, rngs: nnx.Rngs
    ):
        self.active = active
        self.norm = RMSNorm(width, eps, dtype)
        self.router = Linear(width, count, dtype, rngs)
        self.prediction = Linear(count, (count, count), dtype, rngs)
        self.correction = Linear(count, count, dtype, rngs)
        self.scale = nnx.Param(jnp.ones(width, dtype))

    def _route(self, x: jax.Array) -> jax.Array:
        """Map `x`, `[R, T, width]`, to numbers from -1 to 1, `[R, T, A]`."""
        routed = self.router(self.norm(x))
        return jnp.tanh(routed.astype(jnp.float32)).astype(routed.dtype)

    def predict(self, x: jax.Array) -> jax.Array:
        """Return the vectors `[A, R, T, width]` that are expected after the layer."""
        shares = self.prediction(self._route(x[self.active]))
        return x + jnp.einsum("rtji,irtd->jrtd", shares, x)

    def correct(self, predicted: jax.Array, found: jax.Array) -> jax.Array:
        """Return `predicted`, `[A, R, T, width]`, corrected by the found active vector."""
        shares = jnp.moveaxis(self.correction(self._route(found)) + 1, -1, 0)
        return predicted + shares[..., None] * (found - predicted[self.active])[None]

    def scaled(self, x: jax.Array) -> jax.Array:
        """Return the active one of the vectors `x`, multiplied by the factors."""
        return x[self.active] * self.scale[...].reshape(1, 1, -1)


class Expansion(nnx.Module):
    """Maps of one vector of each token to A vectors, and back; all keep its magnitude."""

    def __init__(self, count: int, width: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.into, self.back = (
            matrix(rngs, (count - 1, width, width), dtype) for _ in ("into", "back")
        )

    def expand(self, x: jax.Array) -> jax.Array:
        """Map `x`, `[R, T, width]`, to `[A, R, T, width]`."""
        return jnp.stack([x, *(_of_magnitude(linear(x, one), x) for one in self.into[...])])

    def merge(self, x: jax.Array) -> jax.Array:
        """Map `x`, `[A, R, T, width]`, to `[R, T, width]`."""
        pairs = zip(x[1:], self.back[...], strict=True)
        return jnp.mean(
            jnp.stack([x[0], *(_of_magnitude(linear(one, to), x[0]) for one, to in pairs)]), axis=0
        )


def _of_magnitude(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return `x`, `[R, T, width]`, multiplied such that its vectors have the length of `other`."""
    sizes = (jnp.mean(y.astype(jnp.float32) ** 2, axis=-1, keepdims=True) for y in (other, x))
    wanted, found = sizes
    factor = jnp.sqrt(wanted) / jnp.sqrt(jnp.maximum(found, 1e-5))
    return (x * factor).astype(x.dtype)


def altup_weights(
    source: Sources, name: str, *, count: int, width: int, scaled: bool
) -> dict[str, Any]:
    """Return the tensors for an `AltUp`. All factors `scale` are 1 unless `scaled`."""
    scale = source.tensor(
        f"{name}.correct_output_scale", arrange=None if scaled else lambda x: x * 0 + 1
    )
    return {
        "norm": source.norm(f"{name}.router_norm"),
        "router": source.linear(f"{name}.modality_router", arrange=lambda x: x / width),
        "prediction": source.linear(f"{name}.prediction_coefs", parts=count),
        "correction": source.linear(f"{name}.correction_coefs"),
        "scale": scale,
    }


def expansion_weights(source: Sources, count: int) -> dict[str, Any]:
    """Return the tensors for an `Expansion`; the checkpoint has one for each map, or for all."""

    def all_of(name: str) -> Any:
        if (whole := f"model.{name}.weight") in source.checkpoint.tensors:
            return source.tensor(whole)
        names = (f"model.{name}.{i}.weight" for i in range(count - 1))
        return source.tensor(*names, parts=1)

    return {"into": all_of("altup_projections"), "back": all_of("altup_unembed_projections")}
