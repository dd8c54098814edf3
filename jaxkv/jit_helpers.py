"""Compilation of functions of tables, with output shardings on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkv.core.donation import check_not_donated, explain_donation_errors
from jaxkv.core.partitioning import Partitioned, ShardingRules, current_mesh, keep_explicit_axes
from jaxkv.table import CacheTable

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.core.types import AnyMesh

R = TypeVar("R")


def jit_table(fun: Callable[..., R], **options: Any) -> Callable[..., R]:
    """Compile a function of tables; `options` are keyword arguments of `jax.jit`.

    On a mesh, an output that is `Partitioned` is split by its method `partition_by`. Other outputs
    are replicated.
    """

    @partial(jax.jit, **options)
    @wraps(fun)
    def run(*args: PyTree, **kwargs: PyTree) -> PyTree:
        args, kwargs = jax.tree.map(_to_jax_array, (args, kwargs))
        tables = [x for x in _partitioned_leaves((args, kwargs)) if isinstance(x, CacheTable)]
        check_not_batched(*tables)
        rules = next((table.sharding_rules for table in tables), None)
        mesh = current_mesh(rules)
        if rules is None or mesh is None:
            return fun(*args, **kwargs)

        def constrain_outputs(*args: PyTree, **kwargs: PyTree) -> PyTree:
            out = fun(*args, **kwargs)
            return jax.lax.with_sharding_constraint(out, _output_partition_specs(out, rules, mesh))

        if AxisType.Explicit not in mesh.axis_types:
            return constrain_outputs(*args, **kwargs)
        # With explicit shardings each operation would need an output sharding.
        types = (AxisType.Auto,) * len(mesh.axis_names)
        with jax.sharding.use_abstract_mesh(mesh.update(axis_types=types)):
            out = jax.eval_shape(
                partial(fun, **kwargs), *jax.tree.map(_shape_without_sharding, args)
            )
        where = jax.tree.map(
            lambda spec: keep_explicit_axes(spec, mesh), _output_partition_specs(out, rules, mesh)
        )
        return jax.sharding.auto_axes(constrain_outputs, out_sharding=where)(*args, **kwargs)

    return explain_donation_errors(run)


def jit_method(method: Callable[..., R], **options: Any) -> Callable[..., R]:
    """Compile a method of `CacheTable`; if a subclass overrides it, call the override."""

    def call(table: CacheTable, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return getattr(table, method.__name__)(*args, **kwargs)

    return jit_table(wraps(method, updated=())(call), **options)


def check_not_batched(*tables: CacheTable) -> None:
    """Raise ValueError if a table belongs to a batch of caches."""
    if any(table.is_batch for table in tables):
        raise ValueError(
            "expected one cache, got a batch of them; go over it with jax.vmap, or take one, "
            "as jax.tree.map(lambda x: x[0], cache)"
        )


def check_concrete_cache(table: CacheTable, buffers: PyTree = ()) -> None:
    """Raise TypeError for shapes without values, ValueError for a donated or batched cache."""
    if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves((table, buffers))):
        raise TypeError("expected a cache with values, got the shapes of one; make it first")
    check_not_donated(table, buffers)
    check_not_batched(table)


def replicate(table: CacheTable, answers: PyTree) -> PyTree:
    """Replicate arrays on the mesh of a table, so that every process can read the arrays.

    Compiled functions without output shardings must call `replicate`: XLA may split their outputs.
    """
    mesh = current_mesh(table.sharding_rules)
    if mesh is None:
        return answers
    if AxisType.Explicit in mesh.axis_types:
        answers = jax.tree.map(lambda x: jax.sharding.reshard(x, P()), answers)
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, P()), answers)


def _output_partition_specs(out: PyTree, sharding_rules: ShardingRules, mesh: AnyMesh) -> PyTree:
    """Return a `PartitionSpec` for each output; only `Partitioned` outputs can be split."""

    def spec_of_output(x: object) -> PyTree:
        return x.partition_by(sharding_rules, mesh) if isinstance(x, Partitioned) else P()

    return jax.tree.map(spec_of_output, out, is_leaf=_is_partitioned)


def _to_jax_array(x: PyTree) -> PyTree:
    """Convert an array of NumPy, which a function gets from its caller under `disable_jit`."""
    return jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x


def _partitioned_leaves(tree: PyTree) -> list[PyTree]:
    return jax.tree.leaves(tree, is_leaf=_is_partitioned)


def _is_partitioned(x: object) -> bool:
    return isinstance(x, Partitioned)


def _shape_without_sharding(x: PyTree) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jax.numpy.shape(x), jax.numpy.result_type(x))
