"""One of several processes that hold a memory together; `test_processes.py` starts them.

`python -m tests.sharding.process_worker SCENARIO NUMBER COUNT PORT FOLDER`. What the first process
computes alone, on one device and without a mesh, is what all want of what they compute together; so
numbers are compared in each process, each the shards that it holds.
"""

import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv import loops, make_batch, sharding
from jaxkv.loops.batching import Engine, Request
from jaxkv.sharding import Rules

HEADS, SIZE, WIDTH, VOCABULARY = 4, 4, 32, 16
ROPE = jaxkv.make_rope(SIZE, base=100.0)
RULES = Rules(cells="cells")
SAMPLER = loops.sampling.make_sampler(temperature=0.7)
HEARTBEAT = 10
"""Seconds without a sign of life after which a process counts as dead."""


# ------------------------------------------------------------------------------------ the model


def random_weights(layers: int = 2) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / shape[-2] ** 0.5).astype(np.float32)

    square = {name: normal(layers, WIDTH, WIDTH) for name in ("q", "out", "state")}
    narrow = {name: normal(layers, WIDTH, HEADS * SIZE) for name in "kv"}
    return {"embedding": normal(VOCABULARY, WIDTH) * 4, **square, **narrow}


@partial(jax.tree_util.register_static)
@dataclass(frozen=True)
class Model:
    """A tiny model; of its layers `a` attends and `r` is recurrent."""

    kinds: str

    def forward(self, weights: Any, memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
        x = weights["embedding"][ubatch.tokens]
        for layer, kind in enumerate(self.kinds):
            step = self._attend if kind == "a" else self._remember
            memory, out = step(weights, memory, layer, ubatch, x)
            x = jnp.tanh(x + out @ weights["out"][layer])
        x = x.reshape(-1, WIDTH)[ubatch.outputs]
        return memory, x @ weights["embedding"].T

    def _attend(self, weights, memory, layer, ubatch, x):
        q, k, v = (
            (x @ weights[name][layer]).reshape(*ubatch.valid.shape, -1, SIZE) for name in "qkv"
        )
        q, k = (jaxkv.rotate(heads, ubatch.positions, ROPE) for heads in (q, k))
        memory, out = jaxkv.attend(memory, layer, ubatch, q, k, v)
        return memory, out.reshape(x.shape)

    def _remember(self, weights, memory, layer, ubatch, x):
        before = jaxkv.read_states(memory, layer, ubatch)["x"]

        def step(state, column):
            new, valid = column
            state = jnp.where(valid[:, None], state / 2 + new, state)
            return state, state

        new = jnp.swapaxes(x @ weights["state"][layer], 0, 1)
        _, after = jax.lax.scan(step, before, (new, ubatch.valid.T))
        after = jnp.swapaxes(after, 0, 1)  # [R, T, d]
        states = jnp.concatenate([before[:, None], after], axis=1)
        last = jaxkv.steps_to_keep(ubatch, jaxkv.rollback_of(memory, layer) + 1)
        kept = jnp.take_along_axis(states, last[..., None], axis=1)
        return jaxkv.write_states(memory, layer, ubatch, {"x": kept}), after


def make(kinds: str, *, cells: int, sequences: int, streams: int, window: Any = None) -> Any:
    sizes = dict(sequences=sequences, streams=streams)
    parts = {
        "a": lambda layers: jaxkv.make_kv_cache(
            layers=layers,
            cells=cells,
            kv_heads=HEADS,
            head_dim=SIZE,
            window=window,
            rope=ROPE,
            **sizes,
        ),
        "r": lambda layers: jaxkv.make_recurrent_cache(
            layers=layers, states={"x": ((WIDTH,), jnp.float32)}, rollback=2, **sizes
        ),
    }
    if len(set(kinds)) == 1:
        return parts[kinds[0]](len(kinds))
    layers = {kind: [i for i, one in enumerate(kinds) if one == kind] for kind in sorted({*kinds})}
    made = [parts[kind](len(mine)) for kind, mine in layers.items()]
    return jaxkv.make_hybrid_cache(*zip(made, layers.values(), strict=True))


# ------------------------------------------------------------------------------------ the story


class Story:
    """A memory that is led through every verb; what came of each step is noted by its name."""

    def __init__(self, sizes: dict, memory: Any, weights: Any, watch: Any) -> None:
        self.model, self.memory, self.weights = Model(sizes["kinds"]), memory, weights
        self.cells = sizes["cells"]
        self.forward = self.model.forward
        self.facts = jaxkv.split(memory)[0].facts
        self.watch = watch

    def tell(self, *texts: list[int], sequences: Any = None) -> jax.Array:
        """Prompts, in ubatches of 4."""
        batch = make_batch([*texts], sequences=sequences)
        self.memory, logits = jaxkv.prefill(
            self.forward, self.weights, self.memory, batch, ubatch_size=4
        )
        return logits

    def do(self, name: str, verb: Any, *args: Any) -> None:
        """A verb; one that is refused says why and changes nothing."""
        try:
            found = verb(self.memory, *args)
        except jaxkv.RefusedError as error:
            self.watch(f"{name}, refused", self.memory, str(error))
            return
        self.memory, *rest = found if isinstance(found, tuple) else (found,)
        self.watch(name, self.memory, rest)

    def ask(self, name: str) -> None:
        """Everything that can be asked."""
        memory, last = self.memory, self.facts.sequences - 1
        ids = [*range(self.facts.sequences)]
        answers = {
            "min": jaxkv.seq_pos_min(memory, ids),
            "max": jaxkv.seq_pos_max(memory, ids),
            "used": jaxkv.used(memory),
            "rm": jaxkv.can_seq_rm(memory, 0, 2),
            "add": jaxkv.can_seq_add(memory, 0, 1, -1, 2),
            "cp": jaxkv.can_seq_cp(memory, 0, [1, last]),
            "select": jaxkv.can_seq_select(memory, [last, 0], [0, last]),
            "resume": jaxkv.can_resume(memory, 0, 3),
            "faults": jaxkv.check_invariants(memory),
            "bytes": jaxkv.nbytes(memory),
            "drawing": jaxkv.show(memory),
        }
        assert not any(map(int, answers["faults"].values())), answers["faults"]
        self.watch(f"answers {name}", memory, answers)

    def update(self, memory: Any) -> Any:
        return jaxkv.apply(memory, jaxkv.init_update(memory))

    def defrag(self, memory: Any) -> Any:
        return jaxkv.apply(memory, jaxkv.defrag_plan(memory))

    def run(self) -> None:
        last = self.facts.sequences - 1
        texts = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11], [12, 13, 14, 15]]
        logits = self.tell(*texts, sequences=[0, 1, 2, last])
        self.watch("prompts", self.memory, logits)
        self.ask("after prompts")
        self.refuse()
        self.generate(logits)
        old, _ = jaxkv.split(self.memory)
        self.watch("more", self.memory, self.tell([1, 2], [3], sequences=[1, last]))
        self.do("go_back", lambda memory: jaxkv.go_back(old, memory))
        self.do("cut", jaxkv.seq_rm, 0, 8)
        self.do("cuts", jaxkv.seq_rm, [0, last], [7, -1], [-1, -1])
        self.ask("after cuts")
        self.do("cp inside", jaxkv.seq_cp, 0, 1)
        self.do("cp between", jaxkv.seq_cp, 1, last)
        self.do("cp of a range", jaxkv.seq_cp, 0, [2, last], 0, 3)
        self.ask("after copies")
        self.do("select", jaxkv.seq_select, [last, 0], [0, last])
        self.watch("told", self.memory, self.tell([5, 6], sequences=[last]))
        self.do("cut out", jaxkv.seq_rm, last, 1, 3)
        self.do("add", jaxkv.seq_add, last, 3, -1, -2)
        self.refuse()
        self.do("update", self.update)
        self.do("no update", self.update)
        self.do("defrag", self.defrag)
        self.do("no defrag", self.defrag)
        self.ask("after a defrag")
        self.watch("one more", self.memory, self.tell([7], sequences=[last]))
        self.do("div", jaxkv.seq_div, last, 2, -1, 2)
        self.do("update", self.update)
        self.do("room", self.room)
        self.do("keep", jaxkv.seq_keep, last)
        self.ask("after keep")
        self.do("clear", jaxkv.clear)
        self.watch("anew", self.memory, self.tell([1, 2, 3], sequences=[0]))
        for seq in (0, last):
            self.do(f"fill {seq}", self.filled, seq)
        self.do("cp to little room", jaxkv.seq_cp, 0, last - 1)

    def refuse(self) -> None:
        """Plans that are refused say why, in every process alike."""
        last = self.facts.sequences - 1
        for name, batch in {
            "a gap": make_batch([0, 1], positions=[50, 51]),
            "no room": make_batch([[0] * 70, [1]], sequences=[0, last]),
            "an update": make_batch([1], sequences=last),
        }.items():
            plan = jaxkv.init_batch(self.memory, batch, ubatch_size=4)
            try:
                said = plan.check() and "not refused"
            except jaxkv.RefusedError as error:
                said = str(error)
            assert "NOT_NEXT" in said or name != "a gap", said
            self.watch(f"refused for {name}", self.memory, (said, plan.fits, plan.reason))

    def filled(self, memory: Any, seq: int) -> Any:
        """More than half of a stream."""
        batch = make_batch([1] * max(self.cells * 5 // 8, 2), sequences=seq)
        return jaxkv.prefill(self.forward, self.weights, memory, batch, ubatch_size=4)

    def room(self, memory: Any) -> tuple:
        memory, plan, helped = jaxkv.make_room(memory, make_batch([1, 2]))
        return memory, plan.ok, helped

    def generate(self, logits: jax.Array) -> None:
        """A loop by itself, and one in a program of the caller's."""
        ids = [0, 1, 2, self.facts.sequences - 1]
        state, first = loops.begin(SAMPLER, self.memory, logits, sequences=ids, limit=7)
        self.watch("begun", self.memory, first)
        self.memory, state, picked = jaxkv.decode(
            self.forward, SAMPLER, self.weights, self.memory, state, steps=3
        )
        self.watch("decoded", self.memory, (picked, state.active, state.reason))

        @jax.jit
        def loop(weights: Any, memory: Any, state: Any) -> Any:
            return jaxkv.decode(self.forward, SAMPLER, weights, memory, state, steps=2)

        memory, _, inside = loop(self.weights, self.memory, state)
        self.memory, state, picked = jaxkv.decode(
            self.forward, SAMPLER, self.weights, self.memory, state, steps=2
        )
        self.watch("decoded on", self.memory, picked)
        self.watch("decoded in one program", memory, inside)


def same(got: Any, wanted: Any, name: str) -> None:
    """Raise unless what this process holds of some arrays is what is wanted."""
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, one), other in pairs:
        where = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(one, str):
            assert one == other, f"{where}: wanted {other}, got {one}"
            continue
        shards = one.addressable_shards if isinstance(one, jax.Array) else []
        pieces = [(shard.data, shard.index) for shard in shards] or [(one, ...)]
        for data, index in pieces:
            pair = np.asarray(data), np.asarray(other)[index]
            if pair[0].dtype.kind == "f":
                np.testing.assert_allclose(*pair, atol=1e-4, err_msg=where)
            else:
                np.testing.assert_array_equal(*pair, err_msg=where)


def placed(memory: Any) -> Any:
    """The same memory on the mesh at hand."""
    table, buffers = jaxkv.split(memory)
    memory = jaxkv.join(table.with_rules(RULES), buffers)
    where = sharding.shardings(memory, jax.sharding.get_mesh(), RULES)
    return jax.device_put(jax.tree.map(np.asarray, memory), where)


def replicated(tree: Any) -> Any:
    return jax.device_put(tree, NamedSharding(jax.sharding.get_mesh(), P()))


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    """All devices, the first axis over processes; -1 is what is left."""
    shape = np.array([*axes.values()])
    shape[shape < 0] = jax.device_count() // math.prod(shape[shape > 0].tolist())
    mesh = jax.make_mesh((*shape.tolist(),), (*axes,), (AxisType.Auto,) * len(axes))
    for number, part in enumerate(mesh.devices.reshape(jax.process_count(), -1)):
        assert {device.process_index for device in part.flat} == {number}
    return mesh


CASES = {
    "data": (dict(kinds="aa", cells=24, sequences=4, streams=4), dict(data=-1, tensor=2)),
    "tensor": (dict(kinds="aa", cells=64, sequences=4, streams=1), dict(tensor=-1, cells=2)),
    "cells": (dict(kinds="aa", cells=64, sequences=4, streams=1), dict(cells=-1, tensor=2)),
    "cells and data": (dict(kinds="aa", cells=24, sequences=4, streams=4), dict(cells=-1, data=2)),
    "groups": (dict(kinds="aa", cells=40, sequences=8, streams=4), dict(data=-1, tensor=2)),
    "window": (
        dict(kinds="aa", cells=24, sequences=4, streams=4, window=jaxkv.window.sliding(4)),
        dict(data=-1, cells=2),
    ),
    "recurrent": (dict(kinds="rr", cells=0, sequences=4, streams=4), dict(data=-1, tensor=2)),
    "hybrid": (dict(kinds="ar", cells=40, sequences=8, streams=4), dict(data=-1, tensor=2)),
}


def verbs(name: str) -> None:
    """Every verb, together and then alone.

    In this order, since a process may wait 30 seconds for another one and no longer, where it meets
    that one for the first time in some group of devices.
    """
    sizes, axes = CASES[name]
    weights, memory = random_weights(), make(**sizes)

    def told(memory: Any, weights: Any) -> list:
        noted = []

        def note(step: str, memory: Any, answers: Any) -> None:
            noted.append((step, memory, jax.device_get(answers)))  # or JAX raises

        Story(sizes, memory, weights, note).run()
        return noted

    with jax.set_mesh(mesh_of(**axes)):
        together = told(placed(memory), replicated(weights))
    alone = of_first(lambda: jax.device_get(told(memory, weights)))
    for (step, *got), (wanted_step, *wanted) in zip(together, alone, strict=True):
        assert step == wanted_step, f"wanted {wanted_step}, got {step}"
        same(got, wanted, f"{name}: {step}, memory and answers")


def of_first(compute: Callable[[], Any]) -> Any:
    """Return what the first process computes, for all of them, which wait for its file."""
    folder = Path(sys.argv[-1])
    file, ready = folder / "alone", folder / "alone is written"
    if jax.process_index() == 0:
        file.write_bytes(pickle.dumps(compute()))
        ready.touch()
    while not ready.exists():
        time.sleep(0.1)
    return pickle.loads(file.read_bytes())


# ------------------------------------------------------------------------------- other scenarios


def requests() -> None:
    """Requests that arrive at process 0 have the same results in all, and as in one alone."""
    sizes, axes = CASES["groups"]
    arrived = [
        Request(
            prompt=[*range(1, 2 + i % 5)],
            limit=2 + i % 7,
            seed=i,
            sampling=dict(temperature=0.8) if i % 2 else {},
            tag=i,
        )
        for i in range(20)
    ]

    def served(memory: Any, weights: Any, requests: list[Request]) -> dict:
        model = Model("aa")
        memory = loops.warm_up(model.forward, weights, memory, ubatch_size=4)
        engine = Engine(model.forward, weights, memory, stop=[3], chunk=8)
        engine.warm_up()
        for request in requests:
            engine.submit(request)
        results = {result.request.tag: result for result in engine.results()}
        assert not jaxkv.used(engine.memory)
        return {tag: (one.tokens, one.logprobs, one.reason) for tag, one in results.items()}

    weights = random_weights()
    given = sharding.broadcast(arrived if jax.process_index() == 0 else None)
    with jax.set_mesh(mesh_of(**axes)):
        got = served(placed(make(**sizes)), replicated(weights), given)
    wanted = of_first(lambda: served(make(**sizes), weights, arrived))
    assert list(got) == list(wanted) and len(got) == 20
    same(got, wanted, "requests")


def broadcasts() -> None:
    """A batch of process 0 comes to all, whatever its shape and dtypes."""
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(3, 500)).astype(jnp.bfloat16)
    for sent in (
        make_batch([[1, 2, 3], [4]], sequences=[3, 1]),
        make_batch(embeddings=embeddings, outputs=[True, False, True], positions=[4, 5, 6]),
        make_batch(np.arange(8).reshape(2, 4)),
    ):
        got = sharding.broadcast(sent if jax.process_index() == 0 else None)
        assert jax.tree.structure(got) == jax.tree.structure(sent)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(sent), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def disagreement(name: str) -> None:
    """Processes that were given different batches are told, in each of them, who is another."""
    sizes, axes = CASES[name]
    count, number = jax.process_count(), jax.process_index()
    texts = [[1, 2, 3, 4 + (number == count - 1)], [5, 6]]
    with jax.set_mesh(mesh_of(**axes)):
        memory = placed(make(**sizes))
        same_batch, other_batch = make_batch([[1, 2], [3]]), make_batch(texts)
        memory = planned(memory, same_batch)
        sharding.agree(memory)
        sharding.agree(memory, same_batch)
        told = []
        for args in [(memory, other_batch)] + [(planned(memory, other_batch),)] * (name != "data"):
            try:
                sharding.agree(*args)
            except RuntimeError as error:
                told.append(str(error))
                assert f"in processes [{count - 1}] than in process 0" in told[-1], told
            else:
                raise AssertionError("wanted to be told that a process was given another batch")
        sharding.agree(memory, same_batch)  # nothing is broken by it


def planned(memory: Any, batch: jaxkv.Batch) -> Any:
    for ubatch in jaxkv.init_batch(memory, batch).check().ubatches:
        memory = jaxkv.apply(memory, ubatch)
    return memory


def global_batches() -> None:
    """Arrays of a batch that are split over processes are not looked at."""
    mesh = mesh_of(data=-1)
    with jax.set_mesh(mesh):
        sizes = dict(kinds="aa", cells=24, sequences=4, streams=4)
        memory, alone = placed(make(**sizes)), make(**sizes)
        tokens = np.arange(8, dtype=np.int32).reshape(4, 2)
        split = jax.make_array_from_callback(
            tokens.shape, NamedSharding(mesh, P("data")), lambda index: tokens[index]
        )
        assert not jaxkv.places.is_concrete(split) and not jaxkv.places.is_traced(split)
        batch = make_batch(split)
        memory = planned(memory, batch)
        memory = planned(memory, batch.only(np.array([True, False, True, True])))
    alone = planned(alone, make_batch(tokens))
    same(memory, planned(alone, make_batch(tokens).only(np.array([1, 0, 1, 1], bool))), "split")


def killed(who: int) -> None:
    """One of them dies while all compute; no other may wait for it for ever."""
    sizes, axes = CASES["tensor"]
    with jax.set_mesh(mesh_of(**axes)):
        weights, memory = replicated(random_weights()), placed(make(**sizes))
        forward = Model("aa").forward
        memory, logits = jaxkv.prefill(forward, weights, memory, make_batch([1, 2, 3]))
        begun, _ = loops.begin(SAMPLER, memory, logits)
        for turn in range(10**6):
            _, _, picked = jaxkv.decode(forward, SAMPLER, weights, memory, begun, steps=8)
            np.asarray(picked.tokens)
            if turn == 2 and jax.process_index() == who:
                print(f"process {who} is killed", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)


SCENARIOS = {
    **{name: partial(verbs, name) for name in CASES},
    "requests": requests,
    "broadcasts": broadcasts,
    "disagreement": partial(disagreement, "tensor"),
    "disagreement of streams": partial(disagreement, "data"),
    "global batches": global_batches,
    "the first is killed": partial(killed, 0),
    "the last is killed": lambda: killed(jax.process_count() - 1),
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
