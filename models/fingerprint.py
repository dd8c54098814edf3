"""Identity of a model, to check that a saved cache belongs to it."""

import hashlib
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.model import Model, name_of


def fingerprint(model: Model) -> dict[str, Any]:
    """Return an identity of a model for `jaxkv.snapshot`, as JSON values.

    The identity contains the architecture, the dtype, and a digest of config and params. The digest
    covers the fields of the config except `implementation`, and the name, shape, dtype and first
    vector of each param.
    """
    found = hashlib.sha256()
    sizes = asdict(model.config)
    sizes.pop("implementation", None)
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
