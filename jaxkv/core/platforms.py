"""A choice between implementations by platform, made when JAX lowers a program.

`jax.lax.platform_dependent` traces the implementations for all platforms. The primitive of this
module traces only the one that the program contains: the kernels for TPUs and GPUs take longer to
trace than the rest of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax.interpreters import mlir

if TYPE_CHECKING:
    from jaxtyping import PyTree


def by_platform(
    empty_result: Callable[..., PyTree], **implementations: Callable[..., PyTree]
) -> Callable[..., PyTree]:
    """Return a function that runs the implementation for the platform of the compiled program.

    The returned function has neither derivatives nor a rule for `vmap`.

    Args:
      empty_result: a function of the same arguments, whose result has the same shapes and dtypes.
        It is traced, and never runs.
      implementations: an implementation for each of "cpu", "cuda" and "tpu", or for some of them,
        and "default" for all other platforms.
    """
    choices = (("empty result", empty_result), *implementations.items())

    def run_on_platform(*args: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(args)
        tree = jax.tree.structure(jax.eval_shape(empty_result, *args))
        out = run_on_platform_p.bind(*leaves, treedef=treedef, choices=choices)
        return jax.tree.unflatten(tree, out)

    return run_on_platform


def _run(*leaves: jax.Array, name: str, treedef: Any, choices: tuple) -> list:
    """Run the implementation with this name, or the default, on flat arguments."""
    by_name = dict(choices)
    run = by_name[name if name in by_name else "default"]
    return jax.tree.leaves(run(*jax.tree.unflatten(treedef, leaves)))


# The import of `jax.extend.core.Primitive`, which is the same class, would import Pallas.
run_on_platform_p = type(jax.lax.add_p)("run_on_platform")
run_on_platform_p.multiple_results = True


@run_on_platform_p.def_abstract_eval
def _result_types(*leaves: jax.ShapeDtypeStruct, **params: object) -> list:
    return jax.make_jaxpr(partial(_run, name="empty result", **params))(*leaves).out_avals


@run_on_platform_p.def_impl
def _compile_and_run(*leaves: jax.Array, **params: object) -> list:
    with jax.disable_jit(False):
        return jax.jit(partial(run_on_platform_p.bind, **params))(*leaves)


mlir.register_lowering(run_on_platform_p, mlir.lower_fun(partial(_run, name="default")))
for platform in ("cpu", "cuda", "tpu"):
    mlir.register_lowering(
        run_on_platform_p, mlir.lower_fun(partial(_run, name=platform)), platform=platform
    )
