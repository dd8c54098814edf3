"""One of several processes that share a cache; `test_processes.py` starts them.

`python -m tests.sharding.process_worker SCENARIO NUMBER COUNT PORT FOLDER`. The first process
computes the expected results alone, on one device and without a mesh; each process compares its
shards with them.
"""

import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import generation, make_batch, sharding, snapshot
from jaxkv.core import array_utils
from jaxkv.serving.engine import Engine, Request
from tests.helpers.pods import place_on_mesh
from tests.helpers.steps import apply_plan
from tests.sharding import tiny

SAMPLER = generation.make_sampler(temperature=0.7)
HEARTBEAT = 10
"""Seconds without a heartbeat after which a process counts as dead."""

NEAR = jaxkv.Window.sliding(4)
CASES = {
    "tensor": ("aa", dict(cells=64), dict(tensor=-1, cells=2)),
    "cells": ("aa", dict(cells=64), dict(cells=-1, tensor=2)),
    "cells and data": ("aa", dict(cells=24, streams=4), dict(cells=-1, data=2)),
    "window": ("aa", dict(cells=24, streams=4, window=NEAR), dict(data=-1, cells=2)),
    "hybrid": ("ar", dict(cells=40, sequences=8, streams=4), dict(data=-1, tensor=2)),
}
"""Layers, sizes of the cache, and axes of the mesh; -1 means the remaining devices."""


def make_case_cache(name: str) -> Any:
    layers, sizes, _ = CASES[name]
    return tiny.make_tiny(layers, rope=jaxkv.Rope.make(4, base=100.0), **sizes)


def params() -> jax.Array:
    return jax.device_put(tiny.params(), NamedSharding(jax.sharding.get_mesh(), P()))


def mesh_of(name: str) -> jax.sharding.Mesh:
    """All devices, the first axis over processes."""
    *_, axes = CASES[name]
    shape = np.array([*axes.values()])
    shape[shape < 0] = jax.device_count() // math.prod(shape[shape > 0].tolist())
    mesh = jax.make_mesh((*shape.tolist(),), (*axes,), (AxisType.Auto,) * len(axes))
    for number, part in enumerate(mesh.devices.reshape(jax.process_count(), -1)):
        assert {device.process_index for device in part.flat} == {number}
    return mesh


def apply_batch(cache: Any, batch: jaxkv.Batch) -> Any:
    return apply_plan(cache, jaxkv.init_batch(cache, batch).check())


def share_result(compute: Callable[[], Any]) -> Any:
    """Return the result of the first process in all processes, which wait for its file."""
    folder = Path(sys.argv[-1])
    file, ready = folder / "alone", folder / "alone is written"
    if jax.process_index() == 0:
        file.write_bytes(pickle.dumps(compute()))
        ready.touch()
    while not ready.exists():
        time.sleep(0.1)
    return pickle.loads(file.read_bytes())


def answers(cache: Any) -> dict[str, Any]:
    count = cache.table.spec.sequences
    ids, last = [*range(count)], count - 1
    faults = cache.check()
    assert not any(map(int, faults.values())), faults
    return {
        "min": cache.seq_pos_min(ids),
        "max": cache.seq_pos_max(ids),
        "used": cache.num_used_cells(),
        "rm": jaxkv.seq_rm(cache, 0, 2)[1],
        "add": cache.can_seq_add(0, 1, -1, delta=2),
        "cp": jaxkv.seq_cp(cache, 0, [1, last]).ok,
        "select": jaxkv.seq_select(cache, [last, 0], [0, last]).ok,
        "resume": cache.can_resume(0, 3),
        "bytes": cache.nbytes,
        "drawing": jaxkv.show(cache),
    }


def run_every_edit(name: str, cache: Any, params: Any) -> Iterator[tuple[str, Any, Any]]:
    """Run loops and every edit on a cache: steps, the cache after each, and results."""
    layers, sizes, _ = CASES[name]
    forward, last = tiny.model_of(layers), cache.table.spec.sequences - 1

    def prefill_texts(cache: Any, *texts: list[int], sequences: list[int]) -> Any:
        batch = make_batch([*texts], sequences=sequences)
        return jaxkv.prefill(forward, params, cache, batch, ubatch_size=4)[:2]

    def checked(cache: Any, batch: jaxkv.Batch) -> Any:
        return cache, jaxkv.init_batch(cache, batch, ubatch_size=4).check().reason

    ids = [0, 1, 2, last]
    texts = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11], [12, 13, 14, 15]]
    cache, logits = prefill_texts(cache, *texts, sequences=ids)
    yield "prompts", cache, logits

    options = dict(sampler=SAMPLER, sequences=ids, max_new_tokens=7)
    _, state, *_ = first = generation.init_decode(cache, logits=logits, **options)
    decode = partial(jaxkv.decode, forward, sampler=SAMPLER)
    out = decode(params, cache, state, num_tokens=3)
    cache, state = out.cache, out.state
    yield "decoded", cache, (first[2:4], out[2:4], state.active, state.reason)
    out = jax.jit(partial(decode, num_tokens=2))(params, cache, state)
    yield "decoded in a program of the caller's", out.cache, out[2:4]

    past = cache.table
    full = [1] * (sizes["cells"] * 5 // 8)  # more than half of a stream
    for step, verb in {
        "a gap": lambda m: checked(m, make_batch([0, 1], positions=[50, 51])),
        "no room": lambda m: checked(m, make_batch([[0] * 70, [1]], sequences=[0, last])),
        "more": lambda m: prefill_texts(m, [1, 2], [3], sequences=[1, last]),
        "rewind": lambda m: jaxkv.rewind(m, to=past),
        "cuts": lambda m: jaxkv.seq_rm(m, [0, last], [7, -1], [-1, -1]),
        "cp": lambda m: jaxkv.seq_cp(m, 0, [1, last]),
        "cp of a range": lambda m: jaxkv.seq_cp(m, 0, [2, last], 0, 3),
        "select": lambda m: jaxkv.seq_select(m, [last, 0], [0, last]),
        "more in a copy": lambda m: prefill_texts(m, [5, 6], sequences=[last]),
        "cut out": lambda m: jaxkv.seq_rm(m, last, 1, 3),
        "add": lambda m: jaxkv.seq_add(m, last, 3, -1, delta=-2),
        "update missing": lambda m: checked(m, make_batch([1], sequences=last)),
        "update": lambda m: jaxkv.apply(m, jaxkv.init_update(m)),
        "defrag": lambda m: jaxkv.apply(m, jaxkv.defrag_plan(m)),
        "div": lambda m: jaxkv.seq_div(m, last, 2, -1, divisor=2),
        "another update": lambda m: jaxkv.apply(m, jaxkv.init_update(m)),
        "keep": lambda m: jaxkv.seq_keep(m, last).cache,
        "clear": jaxkv.clear,
        "fill the first": lambda m: prefill_texts(m, full, sequences=[0]),
        "fill the last": lambda m: prefill_texts(m, full, sequences=[last]),
        "cp to little room": lambda m: jaxkv.seq_cp(m, 0, last - 1),
    }.items():
        try:
            found = verb(cache)
        except jaxkv.PlanRefusedError as error:
            yield f"{step}, refused", cache, str(error)
            continue
        cache, *rest = (found,) if isinstance(found, jaxkv.Cache) else found
        yield step, cache, (rest, answers(cache))


def compare_edits(name: str) -> None:
    """Every edit, together and then alone.

    In this order, since a process waits at most 30 seconds for another one when they first use a
    group of devices together.
    """

    def noted(cache: Any, params: Any) -> dict[str, tuple[Any, Any]]:
        steps = run_every_edit(name, cache, params)
        return {step: (cache, jax.device_get(rest)) for step, cache, rest in steps}

    with jax.set_mesh(mesh_of(name)):
        together = noted(place_on_mesh(make_case_cache(name)), params())
    alone = share_result(lambda: jax.device_get(noted(make_case_cache(name), tiny.params())))
    tiny.assert_close(together, alone, name)


def requests() -> None:
    """Requests have the same results in all processes, and as in a single one."""

    def served(cache: Any, params: Any) -> list:
        engine = Engine(tiny.model_of("ar"), params, cache, stop_tokens=[3], prefill_chunk=8)
        engine.warm_up()
        for i in range(20):
            some = dict(sampling=dict(temperature=0.8)) if i % 2 else {}
            prompt = [*range(1, 2 + i % 5)]
            engine.submit(Request(prompt=prompt, max_new_tokens=2 + i % 7, seed=i, tag=i, **some))
        results = list(engine.results())
        assert not engine.cache.num_used_cells() and len(results) == 20
        return [(one.request.tag, one.tokens, one.logprobs, one.reason.name) for one in results]

    with jax.set_mesh(mesh_of("hybrid")):
        got = served(place_on_mesh(make_case_cache("hybrid")), params())
    wanted = share_result(lambda: served(make_case_cache("hybrid"), tiny.params()))
    tiny.assert_close(got, wanted, "requests")


def compare_batches() -> None:
    """Processes with equal batches and tables pass; different ones raise."""
    number = jax.process_index()
    with jax.set_mesh(mesh_of("tensor")):
        cache = apply_batch(place_on_mesh(make_case_cache("tensor")), make_batch([[1, 2], [3]]))
        other_batch = make_batch([[1, 2, 3, 4 + number], [5, 6]])
        sharding.assert_in_sync(cache, make_batch([1]))
        for args in [(cache, other_batch), (apply_batch(cache, other_batch), make_batch([1]))]:
            try:
                sharding.assert_in_sync(*args)
            except (RuntimeError, AssertionError) as error:
                print(error, flush=True)
            else:
                raise SystemExit("expected an error, since processes differ")
        sharding.assert_in_sync(cache, make_batch([1]))  # still works


def global_batches() -> None:
    """Arrays of a batch that are split over processes are not read."""
    mesh = mesh_of("window")
    with jax.set_mesh(mesh):
        cache, alone = place_on_mesh(make_case_cache("window")), make_case_cache("window")
        tokens = np.arange(8, dtype=np.int32).reshape(4, 2)
        where = NamedSharding(mesh, P("data"))
        split = jax.make_array_from_callback(tokens.shape, where, lambda index: tokens[index])
        assert not array_utils.is_concrete(split) and not array_utils.is_traced(split)
        some = np.array([True, False, True, True])
        cache = apply_batch(
            apply_batch(cache, make_batch(split)), make_batch(split).keep_sequences(some)
        )
    alone = apply_batch(
        apply_batch(alone, make_batch(tokens)), make_batch(tokens).keep_sequences(some)
    )
    tiny.assert_close(cache, alone, "split")


def kill_one(who: int) -> None:
    """One process dies while all compute; the others must not wait for ever."""
    with jax.set_mesh(mesh_of("tensor")):
        forward, prompt = tiny.model_of("aa"), make_batch([1, 2, 3])
        cache, logits, *_ = jaxkv.prefill(
            forward, params(), place_on_mesh(make_case_cache("tensor")), prompt
        )
        begun = generation.init_decode(cache, logits=logits, sampler=SAMPLER).state
        for turn in range(10**6):
            picked = jaxkv.decode(forward, params(), cache, begun, num_tokens=8, sampler=SAMPLER)
            np.asarray(picked.tokens)
            if turn == 2 and jax.process_index() == who:
                os.kill(os.getpid(), signal.SIGKILL)


def moves() -> None:
    """Sequences leave a cache and return, over host memory, another mesh, and a file."""

    def fill(cache: Any, params: Any) -> Any:
        batch = make_batch([[1, 2, 3, 4, 5], [6, 7], [8]], sequences=[0, 3, 5])
        return jaxkv.prefill(tiny.model_of("ar"), params, cache, batch).cache

    def insert(cache: Any, source: Any) -> Any:
        return jaxkv.insert(cache, source, [1, 0], [2, 7]).check()

    alone = fill(make_case_cache("hybrid"), tiny.params())
    mesh, count = mesh_of("hybrid"), jax.device_count()
    other_mesh = jax.make_mesh((1, count), ("data", "tensor"), (AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        cache = sharding.move(alone, mesh)
        chats = jaxkv.extract(cache, [0, 5], cells=8).check()
        waiting = sharding.move(chats, mesh, memory_kind="pinned_host")
        in_place = insert(cache, waiting)
        data = snapshot.save(cache, sequences=[0, 5])
        loaded = snapshot.load(data, into=cache, sequences=[7, 2])
    with jax.set_mesh(other_mesh):
        moved = insert(sharding.move(cache, other_mesh), sharding.move(waiting, other_mesh))
    expected = insert(alone, jaxkv.extract(alone, [0, 5], cells=8).check())
    for name, got in {"waiting": in_place, "moved": moved}.items():
        tiny.assert_close(got, jax.device_get(expected), name, atol=0)
    expected = snapshot.load(snapshot.save(alone, sequences=[0, 5]), into=alone, sequences=[7, 2])
    tiny.assert_close(loaded, jax.device_get(expected), "loaded", atol=0)


SCENARIOS = {
    **{name: partial(compare_edits, name) for name in CASES},
    "requests": requests,
    "disagreement": compare_batches,
    "global batches": global_batches,
    "moves": moves,
    "killed 0": partial(kill_one, 0),
    "killed 1": partial(kill_one, 1),
}


def main(scenario: str, number: int, count: int, port: int) -> None:
    jax.distributed.initialize(
        f"localhost:{port}", count, number, heartbeat_timeout_seconds=HEARTBEAT
    )
    assert jax.process_count() == count and jax.device_count() == count * jax.local_device_count()
    SCENARIOS[scenario]()
    print(f"process {number}: {scenario} is as wanted", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
