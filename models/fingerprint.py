"""Identity of a model, to check that a saved cache was computed by the same model."""

import hashlib
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.model import Model, name_of


def fingerprint(model: Model) -> dict[str, Any]:
    """Return an identity of a model for `jaxkv.snapshot`, as JSON values.

    The identity contains the architecture, the dtype, and one digest of the config and the
    params. For each param, the digest covers the name, the shape, the dtype, and the values at
    index 0 of all axes except the last. It also covers all fields of the config except
    `implementation`, `return_mass` and `return_features`.
    """
    found = hashlib.sha256()
    sizes = asdict(model.config)
    for name in ("implementation", "return_mass", "return_features"):
        sizes.pop(name, None)
    found.update(repr(sorted(sizes.items())).encode())
    for path, weight in jax.tree_util.tree_leaves_with_path(model.params):
        found.update(f"{name_of(path)} {weight.shape} {weight.dtype}".encode())
        first = np.asarray(weight[(0,) * (weight.ndim - 1)])
        found.update(first.tobytes())
    return {
        "architecture": model.checkpoint.architecture,
        "dtype": jnp.dtype(model.dtype).name,
        "digest": found.hexdigest()[:16],
    }
