"""A tiny model and its caches, for one device, meshes and several processes."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.hybrid import compose_hybrid_cache
from tests.helpers.caches import attention_cache, recurrent_cache

KINDS = {
    "striped": ("a", {"placement": "striped:2"}),
    "groups": ("a", {"streams": 2, "window": jaxkv.Window.sliding(6)}),
    "hybrid": ("ar", {"streams": 4}),
}
"""The layers of the model, see `make_tiny`, and options of the cache."""


def make_tiny(layers, *, sequences=4, streams=1, **attention):
    """Make a cache of layers with attention, `a`, or recurrent states, `r`."""
    sizes = {"sequences": sequences, "streams": streams}
    places = {kind: [i for i, one in enumerate(layers) if one == kind] for kind in sorted(layers)}
    parts = []
    for kind, own in places.items():
        if kind == "a":
            options = {"cells": 16, "kv_heads": 2, "head_dim": 4, "rope": None, **attention}
            part = attention_cache(layers=len(own), **options, **sizes)
        else:
            states = {"states": {"x": ((4,), jnp.float32)}, "shard_dims": {"x": (0, 4)}}
            part = recurrent_cache(layers=len(own), max_rollback=1, **states, **sizes)
        parts.append((part, tuple(own)))
    return parts[0][0] if len(parts) == 1 else compose_hybrid_cache(*parts)


def params():
    return np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def replicate(x):
    """Replicate arrays on each device, as a model with explicit axes must."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.sharding.reshard(x, P()) if AxisType.Explicit in mesh.axis_types else x


@functools.cache
def model_of(layers):
    """Return the forward function of the model, the same one for the same layers."""

    def forward(params, step):
        x = params[replicate(step.tokens)]
        for layer, kind in enumerate(layers):
            if kind == "a":
                heads = jnp.stack([x, x[..., ::-1]], axis=2)
                step, out = jaxkv.attend(step, layer, heads, heads, heads)
                x = x + jnp.sum(replicate(out), axis=2)
                continue
            before = replicate(jaxkv.read_states(step, layer)["x"])
            every = jnp.cumsum(jnp.where(replicate(step.valid)[..., None], x, 0), axis=1)
            every = before[:, None] + jnp.pad(every, [(0, 0), (1, 0), (0, 0)])
            keep = replicate(step.state_write_steps(layer))
            states = jnp.take_along_axis(every, keep[..., None], axis=1)
            step = jaxkv.write_states(step, layer, {"x": states})
            x = x + every[:, 1:]
        return step, x.reshape(-1, 4)[replicate(step.outputs)] @ params.T

    return forward


def assert_close(got, wanted, name="", atol=1e-4):
    """Compare this process's shards of a tree with another tree: floats nearly, else exactly."""
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, one), other in pairs:
        shards = one.addressable_shards if isinstance(one, jax.Array) else []
        for data, index in [(shard.data, shard.index) for shard in shards] or [(one, ...)]:
            data, where = np.asarray(data), f"{name}{jax.tree_util.keystr(path)}"
            same = np.testing.assert_array_equal
            if data.dtype.kind == "f":
                same = partial(np.testing.assert_allclose, rtol=atol, atol=atol)
            same(data, np.asarray(other)[index], err_msg=where)
