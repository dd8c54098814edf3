"""The command `plan`: its numbers equal those of existing models."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

import models
from jaxkv.cache import split
from jaxkv.core.array_utils import nbytes
from models.cli.main import main
from models.costs import abstract_mesh, costs_of, most_sequences
from models.meshes import RULES, make_mesh
from models.model import load_shapes, on_mesh
from tests.helpers.parametrize import mark_cases
from tests.models.tiny_files import DATA

NAMES = ["granite_hybrid", "gemma3", "llama_tied", "recurrent_gemma"]


def shapes_on(name, axes, **options):
    return on_mesh(load_shapes(DATA / name, **options), abstract_mesh(axes), RULES)


def bytes_on_a_device(tree):
    shapes = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


@pytest.mark.parametrize("name", mark_cases(NAMES, fast=NAMES[:1], core=NAMES[1:2]))
def test_plan_bytes_equal_those_of_loaded_model(name, capsys):
    sizes = {"sequences": 4, "streams": 2, "cells": 64}
    options = [str(x) for one, size in sizes.items() for x in (f"--{one}", size)]
    plan = ["plan", "--model", str(DATA / name), "--json", "--mesh", "data=2,tensor=2", *options]
    assert main(plan) == 0
    printed = json.loads(capsys.readouterr().out)
    model = models.load(DATA / name, mesh=make_mesh(printed["mesh"]), rules=RULES)
    table, buffers = split(model.make_cache(**sizes))
    assert printed["cache"] == sizes
    assert printed["weights"] == sum(x.size for x in jax.tree.leaves(model.params))
    assert printed["layout"]["params"] == bytes_on_a_device(model.params)
    assert printed["layout"]["table"] == bytes_on_a_device(table)
    assert printed["layout"]["buffers"] == bytes_on_a_device(buffers)
    assert printed["layout"]["total"] == sum(map(bytes_on_a_device, (model.params, table, buffers)))
    assert sum(part["on_device"] for part in printed["parts"]) == printed["layout"]["buffers"]
    assert sum(part["layers"] for part in printed["parts"]) == table.num_layers(buffers)
    assert set(printed["whole"]) == set(model.whole_weights().values())


def test_costs_of_cache_dtype_equal_those_of_cache():
    sizes = {"sequences": 2, "streams": 2, "cells": 64}
    layout = costs_of(shapes_on("granite_hybrid", {"data": 1}, cache_dtype="int8"), **sizes).layout
    cache = models.load(DATA / "granite_hybrid", cache_dtype="int8").make_cache(**sizes)
    table, buffers = cache.table, cache.buffers
    assert (layout.buffers, layout.table) == (nbytes(buffers), table.nbytes)


@pytest.mark.parametrize("name", NAMES)
def test_costs_of_one_sequence_equal_its_own_cache(name):
    costs = costs_of(shapes_on(name, {"data": 1}), cells=600, sequences=1, streams=1)
    shapes = load_shapes(DATA / name).cache_shapes(cells=600)
    assert costs.a_sequence(600) == nbytes(shapes.buffers)


@pytest.mark.parametrize("name", ["llama_tied", "recurrent_gemma"])
def test_most_sequences_one_more_would_not_fit(name):
    model = shapes_on(name, {"data": 2, "tensor": 2}, dtype=jnp.bfloat16)
    length = 50 if name == "llama_tied" else None

    def takes(sequences):
        cells = None if length is None else sequences // 2 * length
        return costs_of(model, sequences=sequences, streams=2, cells=cells).layout.total

    room = takes(12)
    same = dict(length=length, streams=2)
    assert most_sequences(model, room=room, **same) == 12
    assert most_sequences(model, room=room - 1, **same) == 10
    assert most_sequences(model, room=takes(2) - 1, **same) == 0


def test_most_sequences_stream_has_fewer_than_2_to_30_cells():
    model = shapes_on("llama_tied", {"tensor": 1}, dtype=jnp.bfloat16)
    assert most_sequences(model, room=2**60, length=2**29, streams=1) == 1
    assert most_sequences(model, room=2**60, length=2**30, streams=1) == 0
