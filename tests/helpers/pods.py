"""Steps of a plain model with two layers on meshes, as shapes to compile."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import sharding
from jaxkv.cache import merge
from jaxkv.sharding.make import shardings
from tests.helpers.caches import attention_cache

LAYERS = 2
RULES = sharding.ShardingRules(cells="cells")
MESSAGES = 9
"""The maximal number of small messages of a step: those of a plan, and the rows of the logits."""


@dataclass(frozen=True)
class Pod:
    """A cache on a mesh, and a model with no feed-forward whose weights are split by key head.

    axes: of the mesh, with their sizes.
    sequences, streams, cells, window: of the cache.
    kv_heads, group, head_dim, width, vocabulary, dtype: of the model.
    """

    axes: tuple[tuple[str, int], ...]
    sequences: int = 8
    streams: int = 1
    cells: int = 8192
    window: int | None = None
    kv_heads: int = 8
    group: int = 2
    head_dim: int = 32
    width: int = 64
    vocabulary: int = 32
    dtype: str = "float32"

    @property
    def devices(self):
        return math.prod(size for _, size in self.axes)

    @property
    def heads(self):
        return self.kv_heads * self.group

    def mesh(self, devices):
        types = (jax.sharding.AxisType.Auto,) * len(self.axes)
        sizes, names = [size for _, size in self.axes], tuple(name for name, _ in self.axes)
        return jax.sharding.Mesh(devices[: self.devices].reshape(sizes), names, axis_types=types)

    def make(self):
        window = None if self.window is None else jaxkv.Window.sliding(self.window)
        sizes = dict(cells=self.cells, sequences=self.sequences, streams=self.streams)
        sizes |= dict(layers=LAYERS, kv_heads=self.kv_heads, head_dim=self.head_dim)
        rope = jaxkv.Rope.make(self.head_dim)
        return attention_cache(**sizes, window=window, dtype=self.dtype, rope=rope)

    def cache(self):
        return sharding.shapes(self.make, jax.sharding.get_mesh(), RULES)

    def layout(self):
        mesh = jax.sharding.get_mesh()
        return sharding.device_bytes(jax.eval_shape(self.make), mesh, RULES, heads=self.heads)

    def params(self):
        heads, group, size, width = self.kv_heads, self.group, self.head_dim, self.width
        tensor = "tensor" if "tensor" in dict(self.axes) else None
        layer = {
            "qkv": shape((heads, (group + 2) * size, width), self.dtype, tensor),
            "out": shape((heads, group * size, width), self.dtype, tensor),
        }
        return {"embed": shape((self.vocabulary, width), self.dtype), "layers": [layer] * LAYERS}

    def ubatch(self, tokens):
        """The shapes of a ubatch in the layout of a plan."""
        (ubatch,) = jaxkv.init_full(self.cache(), ubatch_size=tokens).ubatches
        streams = RULES.split(jax.sharding.get_mesh(), streams=self.streams)["streams"]
        specs = jaxkv.ubatch.ubatch_partition_specs(ubatch, streams)
        return jax.tree.map(lambda x, spec: shape(x.shape, x.dtype, *spec), ubatch, specs)

    def new(self, ubatch):
        """The shapes of a layer's queries, keys and values."""
        names = dict(self.axes)
        rows = "data" if ubatch.row_is_sequence and self.streams > 1 and "data" in names else None
        tensor = "tensor" if "tensor" in names else None

        def of(heads):
            new = (*ubatch.valid.shape, heads, self.head_dim)
            return shape(new, self.dtype, rows, None, tensor)

        return of(self.heads), of(self.kv_heads), of(self.kv_heads)

    def forward(self, params, step):
        x = params["embed"][step.tokens]
        for layer, w in enumerate(params["layers"]):
            y = jnp.einsum("rtw,knw->rtkn", x, w["qkv"])
            y = y.reshape(*y.shape[:3], self.group + 2, self.head_dim)
            q, k, v = y[..., : self.group, :], y[..., -2, :], y[..., -1, :]
            q = q.reshape(*q.shape[:2], self.heads, self.head_dim)
            step, out = jaxkv.attend(step, layer, q, k, v)
            out = out.reshape(*out.shape[:2], self.kv_heads, -1)
            x = x + jnp.einsum("rtkn,knw->rtw", out, w["out"])
        return step, x.reshape(-1, self.width)[step.outputs] @ params["embed"].T

    def step(self, params, cache, tokens, valid):
        plan = jaxkv.plan_step(cache, tokens, active=valid)
        step, logits = self.forward(params, jaxkv.apply(cache, plan))
        return step.cache, logits, plan.ok

    def lower_step(self, platform="cpu"):
        """Lower a step of all sequences on the current mesh; the cache is donated."""
        tokens = [shape((self.sequences,), dtype) for dtype in ("int32", "bool")]
        step = jax.jit(self.step, donate_argnums=1)
        traced = step.trace(self.params(), self.cache(), *tokens)
        return traced.lower(lowering_platforms=(platform,))

    def lower_attention(self, tokens, platform="cpu"):
        """Lower a layer of a step on the current mesh; the step is donated."""
        cache, ubatch = self.cache(), self.ubatch(tokens)
        step = jax.eval_shape(jaxkv.apply, cache, ubatch)
        streams = RULES.split(jax.sharding.get_mesh(), streams=self.streams)["streams"]
        specs = jaxkv.step.step_partition_specs(step, streams)
        stale = shape(step.is_stale.shape, "bool", *specs.is_stale)
        step = replace(
            step, table=cache.table, buffers=cache.buffers, ubatch=ubatch, is_stale=stale
        )

        def attend(step, q, k, v):
            step, out = jaxkv.attend(step, 0, q, k, v)
            return step.buffers, out

        traced = jax.jit(attend, donate_argnums=0).trace(step, *self.new(ubatch))
        return traced.lower(lowering_platforms=(platform,))


def place_on_mesh(cache, rules=RULES):
    """The same cache on the current mesh, which several processes may share."""
    table, buffers = cache.table, cache.buffers
    cache = merge(table.with_sharding_rules(rules), buffers)
    where = shardings(cache, jax.sharding.get_mesh(), rules)
    return jax.device_put(jax.tree.map(np.asarray, cache), where)


def shape(sizes, dtype, *spec):
    where = NamedSharding(jax.sharding.get_mesh(), P(*spec))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)


_SIZES = {"group": 4, "head_dim": 128, "width": 4096, "vocabulary": 256, "dtype": "bfloat16"}

_STREAMS = {"sequences": 16, "streams": 16, **_SIZES}
# By topology and axes: layers like those of a model of 8B, for TPUs.
OF_8B = {
    "v5e:4x4 data=2 tensor=8": Pod((("data", 2), ("tensor", 8)), **_STREAMS),
    "v5e:4x4 data=16": Pod((("data", 16),), **_STREAMS),
    "v5e:4x4 tensor=8 cells=2": Pod((("tensor", 8), ("cells", 2)), sequences=16, **_SIZES),
    "v5e:16x16 data=32 tensor=8": Pod(
        (("data", 32), ("tensor", 8)), sequences=32, streams=32, **_SIZES
    ),
}
