"""Compiling ahead, and counting what is compiled."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.generation.model_step import compiled_step


def lower_steps(
    model: Any, cache: Any, plans: Sequence[jaxkv.Plan]
) -> tuple[list[Callable[[], Any]], list[jax.Array]]:
    """Lower the programs that prompts need, each once.

    Args:
      model: see `models.Model`.
      cache: what the plans are of.
      plans: one for each batch of prompts.

    Returns:
      What compiles the programs, for `compile_all`; and for each plan zeros like its logits.
    """
    step, jobs, blanks = compiled_step(model.forward), [], {}
    for ubatch in [ubatch for plan in plans for ubatch in plan.ubatches]:
        if _shape(ubatch) not in blanks:
            # jit finds what is compiled here: it keeps what it lowered for equal arguments.
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
    jobs: Sequence[Callable[[], Any]], tell: Callable[[int, int], None] | None = None
) -> list[Any]:
    """Run jobs that compile, side by side: XLA compiles a program on one core, mostly.

    Args:
      jobs: each compiles one program.
      tell: called with the number of jobs that are done and of those there are.

    Returns:
      What the jobs return, in their order.
    """
    tell = tell or (lambda done, total: None)
    tell(0, len(jobs))
    mesh = jax.sharding.get_mesh()  # each thread has its own, at first none

    def run(job: Callable[[], Any]) -> Any:
        # To programs that are traced, an empty mesh is another one than none.
        with nullcontext() if mesh.empty else jax.set_mesh(mesh):
            return job()

    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            tell(done, len(jobs))
    return [future.result() for future in futures]


@contextmanager
def counting(*, traces: bool = False) -> Iterator[Callable[[], int]]:
    """Count the programs of this process that are compiled, or read from disk, in this context.

    Args:
      traces: count functions that are traced, too.

    Yields:
      A function that returns how many they are by now.
    """
    # The first is also sent when the program comes from the cache on disk: it is a new one here.
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
