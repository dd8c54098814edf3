"""A short name for what a model computes, to tell whether a cache is of the same model."""

import hashlib
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.model import Model, name_of


def fingerprint(model: Model) -> dict[str, Any]:
    """Return what names a model, for `jaxkv.snapshot`: other weights or sizes have another digest.

    Of each weight the first vector is looked at, and not all of it, so that it takes no time. How
    attention is computed does not count.

    Returns:
      The architecture, the dtype and a digest, as JSON holds them.
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
