"""Models on meshes give what one device gives, hold their shares alone, and send no weight."""

import json
from collections import Counter
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
import models
from jaxkv.hybrid import parts_of
from jaxkv.kv.cells import Cells
from jaxkv.mesh import Rules
from models.cli.arguments import InputError, parser
from models.cli.main import main
from models.families import llama
from models.families.memories import Attends, make_memory
from models.meshes import RULES, WHOLE, Split, make_mesh
from models.model import functional, splits_of
from models.room import make_with_room
from tests.cases import in_lanes
from tests.hlo import collectives

DATA = Path(__file__).parent.parent / "data"
FAMILIES = [
    "llama_tied",
    "qwen2",
    "qwen3_window",
    "gemma3",
    "mamba2",
    "granite_hybrid",
    "granite_hybrid_experts",
    "recurrent_gemma",
    "lfm2",
    "falcon_h1",
    "deepseek_v3",
]
TENSOR, DATA_TENSOR = {"tensor": 2}, {"data": 2, "tensor": 2}
over_families = pytest.mark.parametrize(
    "name", in_lanes(FAMILIES, fast=["llama_tied"], core=["granite_hybrid_experts", "deepseek_v3"])
)


# -------------------------------------------------------------------------- arguments, and splits


def test_make_mesh_of_too_many_devices_raises():
    with pytest.raises(models.ModelError, match="takes 64 devices.*JAX_NUM_CPU_DEVICES=64"):
        make_mesh({"data": 8, "tensor": 8})


def test_mesh_argument_is_read_as_axes_and_sizes():
    args = parser().parse_args(["generate", "hello", "--mesh", "data=2,tensor=4"])
    assert args.mesh == {"data": 2, "tensor": 4}
    for text in ("", "4", "tensor", "tensor=0", "tensor=x", "a=2,a=2", "=2", "a=2,"):
        with pytest.raises(InputError, match="such as data=2,tensor=2"):
            parser().parse_args(["generate", "hello", "--mesh", text])


@pytest.mark.parametrize(("kv_heads", "times"), [(4, 1), (3, 2)])
def test_make_with_room_counts_whole_arrays_on_each_device(kv_heads, times):
    """Three heads are whole on both devices; tables are too."""
    cells, size, mesh = 10**9, 8_000, make_mesh(TENSOR)

    def allocated(**options):
        layer = Attends(kv_heads=kv_heads, head_dim=size, rope=None)
        return jaxkv.sharding.allocate(partial(make_memory, [layer], **options), mesh)

    buffers, table = 2 * 4 * size * kv_heads * cells, 16 * cells
    wanted = f"{(times * buffers + 2 * table) / 1e9:,.1f}"
    with jax.set_mesh(mesh), pytest.raises(models.ModelError) as error:
        make_with_room(allocated, cells=cells)
    assert f"takes {wanted} GB and the 2 devices have" in str(error.value)


def test_make_with_room_streams_that_do_not_divide_raise():
    def allocated(**options):
        layer = Attends(kv_heads=1, head_dim=8, rope=None)
        make = partial(make_memory, [layer], sequences=3, **options)
        return jaxkv.sharding.allocate(make, make_mesh({"data": 2}))

    with pytest.raises(models.ModelError, match="streams that 2 devices divide.*got 3: take 4"):
        make_with_room(allocated, cells=16, streams=3)


ALL = jax.sharding.AbstractMesh((2, 2, 4), ("data", "tensor", "cells"))
BOTH = Rules(kv_heads=("data", "tensor"))
UNSPLIT, CELLS_ALONE = Rules(kv_heads=None), Rules(kv_heads=None, cells="cells")


@pytest.mark.parametrize(
    ("parts", "with_cells", "rules", "axes", "why"),
    [
        (4, False, Rules(), ("tensor",), None),
        (4, False, BOTH, ("data", "tensor"), None),
        (3, False, Rules(), None, "3 heads, which 2 devices do not divide"),
        (1, False, Rules(), None, "1 head, which 2 devices do not divide"),
        (4, False, UNSPLIT, None, "no axis of the mesh splits weights"),
        (4, False, CELLS_ALONE, None, "no axis of the mesh splits heads"),
        (24, True, RULES, ("tensor", "cells"), None),
        (24, True, Rules(), ("tensor",), None),
        (24, False, RULES, ("tensor",), None),
        (6, True, RULES, ("tensor",), None),
        (3, True, RULES, None, "3 heads, which 8 devices do not divide"),
    ],
)
def test_split_takes_axes_that_divide_its_parts(parts, with_cells, rules, axes, why):
    split = Split(axis=1, parts=parts, of="heads", with_cells=with_cells)
    assert split.over(ALL, rules).spec == (P() if axes is None else P(None, axes))
    assert split.why_whole(ALL, rules) == why
    for some in (RULES, CELLS_ALONE):
        assert WHOLE.why_whole(ALL, some) == "every device needs all of it"


# --------------------------------------------------------------------------------------- weights


@cache
def on_data_tensor(name):
    """A model in bfloat16, so that the host rounds as a device would."""
    return models.load(DATA / name, dtype=jnp.bfloat16, mesh=make_mesh(DATA_TENSOR))


@over_families
def test_load_on_mesh_gives_each_device_its_share(name):
    plain, model = models.load(DATA / name, dtype=jnp.bfloat16), on_data_tensor(name)
    whole = model.whole_weights()
    for (path, wanted), got in zip(
        jax.tree_util.tree_leaves_with_path(plain.weights),
        jax.tree.leaves(model.weights),
        strict=True,
    ):
        key = models.model.name_of(path)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(got, wanted, err_msg=key)
        devices = 1 if key in whole else 2
        assert all(x.data.size * devices == wanted.size for x in got.addressable_shards), key


@over_families
def test_load_shapes_of_a_config_match_load(name, tmp_path):
    (tmp_path / "config.json").write_text((DATA / name / "config.json").read_text())
    sizes = dict(cells=64, sequences=2, streams=2, ubatch_size=8)
    model = on_data_tensor(name)
    shapes = models.load_shapes(tmp_path, dtype=jnp.bfloat16)
    shapes = models.on_mesh(shapes, make_mesh(DATA_TENSOR), Rules())
    pairs = (
        (shapes.weights, model.weights),
        (shapes.memory_shapes(**sizes), model.make_memory(**sizes)),
    )
    for some, others in pairs:
        assert jax.tree.structure(some) == jax.tree.structure(others)
        for shape, array in zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True):
            assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
            assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)
    assert shapes.whole_weights() == model.whole_weights()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "without vocab_size"),
        ({"vocab_size": 40, "model_type": "bert"}, "is a 'bert' model; known are deepseek_v2"),
    ],
)
def test_load_shapes_of_too_little_config_raises(config, message, tmp_path):
    known = json.loads((DATA / "llama_tied" / "config.json").read_text())
    del known["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(known | config))
    with pytest.raises(models.ModelError, match=message):
        models.load_shapes(tmp_path)


def test_whole_weights_say_why_they_are_whole():
    model = models.on_mesh(models.load_shapes(DATA / "gemma3"), make_mesh(TENSOR), Rules())
    whole = model.whole_weights()
    heads = "1 key/value head, which 2 devices do not divide"
    assert whole["blocks.0.attention.qkv.weight"] == heads
    assert whole["norm.weight"] == "every device needs all of it"
    assert "blocks.0.feed.down.weight" not in whole and "vocabulary.head" not in whole
    with pytest.raises(ValueError, match="got one without"):
        models.load_shapes(DATA / "gemma3").whole_weights()


# ----------------------------------------------------------------------------------------- steps


def step(forward, weights, memory, tokens):
    """A decode step of two sequences."""
    ubatch, _ = jaxkv.plan_step(memory, tokens, jnp.arange(2), jnp.ones(2, bool))
    return forward(weights, jaxkv.apply(memory, ubatch), ubatch)


def sent_by(compiled):
    """How often a program calls each collective instruction."""
    return Counter(one.name for one in collectives(compiled))


@pytest.mark.parametrize("name", in_lanes(FAMILIES, fast=[], core=["llama_tied"]))
def test_model_step_on_mesh_matches_and_sends_sums(name):
    """A sum for each part of a layer that is split, and that of the embedding."""
    mesh = make_mesh(TENSOR)
    plain, model = models.load(DATA / name), models.load(DATA / name, mesh=mesh)
    run = jax.jit(partial(step, model.forward), donate_argnums=1)
    sizes = dict(cells=64, sequences=2, streams=2, ubatch_size=8)
    wanted = plain.make_memory(**sizes)
    tokens = jax.device_put(jnp.array([5, 12]), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        memory = model.make_memory(**sizes)
        compiled = run.lower(model.weights, memory, tokens).compile()
    counts = sent_by(compiled)
    layers = len(model.family.layers_of(model.config, model.dtype))
    assert set(counts) == {"all-reduce"} and counts["all-reduce"] <= 2 * layers + 1
    for turn in range(3):
        tokens = jax.device_put(jnp.array([5, 12]) + turn, tokens.sharding)
        wanted, logits = run(plain.weights, wanted, np.asarray(tokens))
        memory, got = compiled(model.weights, memory, tokens)
        np.testing.assert_allclose(got, logits, atol=1e-4)


@pytest.mark.core
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (dict(heads=8, kv_heads=4, bias=True, norms=True, tied=False), 2),  # attention and feed
        (dict(heads=4, kv_heads=1), 1),  # feed alone: heads that do not divide are whole
    ],
    ids=["heads divide", "heads are whole"],
)
def test_llama_step_sends_a_sum_for_each_split_part(sizes, parts):
    """One for each of these in each layer, and one for the embedding."""
    mesh = make_mesh({"tensor": 4})
    config = llama.Config(
        width=64,
        hidden=128,
        head_dim=16,
        vocabulary=256,
        eps=1e-5,
        rope=jaxkv.make_rope(16),
        windows=(None, None),
        **sizes,
    )
    forward, shapes = functional(llama, config, jnp.float32)
    weights = jax.tree.map(
        lambda shape, split: shape.update(sharding=split.over(mesh, Rules())),
        shapes,
        splits_of(llama, config),
    )
    make = partial(
        make_memory, llama.layers_of(config, jnp.float32), cells=64, sequences=2, streams=2
    )
    memory = jaxkv.sharding.shapes(make, mesh, Rules())
    tokens = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        run = jax.jit(partial(step, forward), donate_argnums=1)
        compiled = run.lower(weights, memory, tokens).compile()
    assert sent_by(compiled) == {"all-reduce": 2 * parts + 1}
    assert sum("linear" in one.purpose for one in collectives(compiled)) == 2 * parts


# --------------------------------------------------------------------------------- whole models


@cache
def one_device(name):
    return run(models.load(DATA / name))


def run(model):
    """The logits of two prompts, and eight tokens after each."""
    memory = model.make_memory(cells=64, sequences=2, streams=2, ubatch_size=8)
    prompts = jaxkv.make_batch([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]])
    memory, logits = jaxkv.prefill(
        model.forward, model.weights, memory, prompts, ubatch_size=8, donate=True
    )
    state = jaxkv.loops.start(memory, jnp.argmax(logits, -1).astype(jnp.int32), limit=8)
    greedy, stop = jaxkv.loops.sampling.make_sampler(), np.zeros(0, np.int32)
    _, _, picked = jaxkv.decode(
        model.forward, greedy, model.weights, memory, state, stop, steps=8, donate=True
    )
    return np.asarray(logits), np.asarray(picked.tokens)


TENSOR_CELLS = {"tensor": 2, "cells": 2}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gemma3", TENSOR),
        *((name, DATA_TENSOR) for name in FAMILIES if name not in ("qwen2", "granite_hybrid")),
        ("llama_tied", TENSOR_CELLS),
        ("granite_hybrid_experts", TENSOR_CELLS),
    ],
    ids=str,
)
def test_prompts_and_tokens_on_mesh_match_one_device(name, sizes):
    logits, tokens = one_device(name)
    mesh = make_mesh(sizes)
    model = models.load(DATA / name, mesh=mesh, rules=RULES)
    if "cells" in sizes:
        down = model.weights["blocks"][0]["feed"]["down"]["weight"]
        assert down.addressable_shards[0].data.size * 4 == down.size
        tables = [part.table for part in parts_of(model.memory_shapes(cells=64))]
        dealt = [(table.placement, table.shards) for table in tables if isinstance(table, Cells)]
        assert dealt == [("striped", 2)]
    with jax.set_mesh(mesh):
        got, picked = run(model)
    np.testing.assert_allclose(got, logits, atol=1e-4)
    np.testing.assert_array_equal(picked, tokens)


@pytest.mark.nightly
def test_generate_on_mesh_writes_the_same_tokens(capsys):
    """Key/value heads of SmolLM2 are three; nothing is compiled after the warm-up."""
    command = ["generate", "--json", "--max-tokens", "10", "The capital of France is", "One, two,"]
    assert main(command) == 0
    wanted = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    for axes, size in {"tensor=3": "179.4 MB", "tensor=1,cells=2": "322.2 MB"}.items():
        assert main([*command, "--mesh", axes]) == 0
        out, err = capsys.readouterr()
        assert [json.loads(line)["tokens"] for line in out.splitlines()] == wanted
        assert f"mesh {axes}: {size} of weights on each device" in err
        assert "compiles after warm-up: 0" in err
