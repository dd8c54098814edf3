"""Ahead-of-time compilation of programs, and counts of compiled programs."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.generation.model_step import compiled_step

Progress = Callable[[int, int], None]
"""Function of the number of finished parts of the work, and the number of all parts."""


def lower_steps(
    model: Any, cache: Any, plans: Sequence[jaxkv.Plan]
) -> tuple[list[Callable[[], Any]], list[jax.Array]]:
    """Lower a program for each ubatch of the plans; ubatches of equal shapes share a program.

    Returns functions that compile the programs, as jobs for `compile_all`. Also returns, for each
    plan, an array of zeros with the shape of the plan's logits.
    """
    step, jobs, blanks = compiled_step(model.forward), [], {}
    for ubatch in [ubatch for plan in plans for ubatch in plan.ubatches]:
        if _shape(ubatch) not in blanks:
            # `jit` caches lowered programs by arguments, so later calls use the compiled programs.
            lowered = step.lower(model.params, cache.table, cache.buffers, ubatch)
            jobs.append(lowered.compile)
            out = lowered.out_info[2]
            blanks[_shape(ubatch)] = jnp.zeros(out.shape, out.dtype, device=model.logits_sharding)
    logits = [
        plan.gather_outputs([blanks[_shape(ubatch)] for ubatch in plan.ubatches]) for plan in plans
    ]
    return jobs, logits


def _shape(ubatch: jaxkv.Ubatch) -> tuple:
    return ubatch.tokens.shape, ubatch.outputs.shape


def compile_all(
    jobs: Sequence[Callable[[], Any]], on_progress: Progress | None = None
) -> list[Any]:
    """Run compilation jobs in threads, and return their results in the order of the jobs.

    Threads use several cores, since XLA compiles a program mostly on one core. The parts
    of `on_progress` are the jobs.
    """
    on_progress = on_progress or (lambda done, total: None)
    on_progress(0, len(jobs))
    mesh = jax.sharding.get_mesh()  # new threads have no mesh

    def run(job: Callable[[], Any]) -> Any:
        # JAX does not reuse a trace under an empty mesh where no mesh is set.
        with nullcontext() if mesh.empty else jax.set_mesh(mesh):
            return job()

    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            on_progress(done, len(jobs))
    return [future.result() for future in futures]


@contextmanager
def counting(*, traces: bool = False) -> Iterator[Callable[[], int]]:
    """While the context is active, count programs that are compiled or read from disk.

    Yields a function that returns the count. If `traces` is True, traced functions are counted too.
    """
    # JAX sends `backend_compile_duration` also for programs from the cache on disk.
    counted = ("backend_compile_duration", "jaxpr_trace_duration")[: 1 + traces]
    events: list[str] = []

    def listen(event: str, duration: float, **tags: Any) -> None:
        del duration, tags
        if event in [f"/jax/core/compile/{name}" for name in counted]:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: len(events)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
