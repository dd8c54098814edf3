"""Programs with a model function in them, compiled once for each function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.cache import Cache, merge
from jaxkv.core.array_utils import is_traced
from jaxkv.core.compile_cache import cached_program
from jaxkv.core.donation import check_not_donated

if TYPE_CHECKING:
    from jaxtyping import PyTree

    from jaxkv.table import CacheTable

X = TypeVar("X")


class ModelProgram:
    """Compiled form of `run(forward, params, cache, *args, edit=, **options)`.

    The function `run` returns a tuple whose first item is the next cache. It gets `edit` only if
    there is an edit. The names of `options`, which are not arrays, are `static`.
    """

    def __init__(self, run: Callable[..., tuple], *static: str):
        self._run, self._static = run, static

    def __call__(
        self,
        forward: Callable,
        params: PyTree,
        cache: Cache,
        *args: PyTree,
        edit: Callable | None = None,
        donate: bool,
        **options: Any,
    ) -> tuple:
        """Call the program; if an argument is traced, `run` becomes a part of the outer program."""
        if is_traced(params, cache, args):
            options |= {} if edit is None else {"edit": edit}
            return self._run(forward, params, cache, *args, **options)
        table, buffers = own_or_copied_buffers(cache, donate)
        program = self.compiled(forward, edit)
        table, buffers, *rest = program(params, table, buffers, *args, **options)
        return merge(table, buffers), *rest

    def compiled(self, forward: Callable, edit: Callable | None = None) -> jax.stages.Wrapped:
        """Return the jitted function `(params, table, buffers, *args) -> table, buffers, ...`."""
        return cached_program(self._build, forward, edit)

    def _build(
        self, forward: Callable[[], Callable], edit: Callable[[], Callable] | None = None
    ) -> jax.stages.Wrapped:
        def program(
            params: PyTree, table: CacheTable, buffers: PyTree, *args: PyTree, **options: Any
        ) -> tuple:
            options |= {} if edit is None else {"edit": edit()}
            cache, *rest = self._run(forward(), params, merge(table, buffers), *args, **options)
            return cache.table, cache.buffers, *rest

        program.__name__ = self._run.__name__.strip("_")  # as profiles show it
        return jax.jit(program, static_argnames=self._static, donate_argnames="buffers")


def own_or_copied_buffers(cache: Cache, donate: bool) -> tuple[CacheTable, PyTree]:
    """Return the table and buffers of a cache; if `donate` is False, copy the buffers."""
    table, buffers = cache.table, cache.buffers
    check_not_donated(buffers)
    return table, buffers if donate else copy_arrays(buffers)


@jax.jit
def copy_arrays(tree: X) -> X:
    """Copy the arrays of a pytree, so that the copies can be donated."""
    return jax.tree.map(jnp.copy, tree)
