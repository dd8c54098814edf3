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
from tests.cases import mostly_nightly
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
MESHES = {"tensor": {"tensor": 2}, "data-tensor": {"data": 2, "tensor": 2}}

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def test_a_mesh_of_too_many_devices_is_a_sentence():
    with pytest.raises(models.ModelError, match="takes 64 devices.*JAX_NUM_CPU_DEVICES=64"):
        make_mesh({"data": 8, "tensor": 8})


def test_sizes_of_a_mesh_are_read():
    args = parser().parse_args(["generate", "hello", "--mesh", "data=2,tensor=4"])
    assert args.mesh == {"data": 2, "tensor": 4}


@pytest.mark.parametrize(
    "text", ["", "4", "tensor", "tensor=0", "tensor=x", "a=2,a=2", "=2", "a=2,"]
)
def test_other_texts_are_no_mesh(text):
    with pytest.raises(InputError, match="such as data=2,tensor=2"):
        parser().parse_args(["generate", "hello", "--mesh", text])


@pytest.mark.parametrize(("kv_heads", "times"), [(4, 1), (3, 2)])
def test_what_each_device_has_whole_counts_for_each_of_them(kv_heads, times):
    """Three heads are whole on both devices; tables are too."""
    cells, size, mesh = 10**9, 8_000, make_mesh({"tensor": 2})

    def allocated(**options):
        layer = Attends(kv_heads=kv_heads, head_dim=size, rope=None)
        return jaxkv.sharding.allocate(partial(make_memory, [layer], **options), mesh)

    buffers, table = 2 * 4 * size * kv_heads * cells, 16 * cells
    wanted = f"{(times * buffers + 2 * table) / 1e9:,.1f}"
    with jax.set_mesh(mesh), pytest.raises(models.ModelError) as error:
        make_with_room(allocated, cells=cells)
    assert f"takes {wanted} GB and the 2 devices have" in str(error.value)


def test_sizes_that_do_not_fit_the_mesh_are_a_sentence():
    def allocated(**options):
        layer = Attends(kv_heads=1, head_dim=8, rope=None)
        make = partial(make_memory, [layer], sequences=3, **options)
        return jaxkv.sharding.allocate(make, make_mesh({"data": 2}))

    with pytest.raises(models.ModelError, match="streams that 2 devices divide.*got 3: take 4"):
        make_with_room(allocated, cells=16, streams=3)


def test_a_split_that_devices_do_not_divide_is_none():
    mesh = make_mesh({"data": 2, "tensor": 2})
    three, four = (Split(axis=1, parts=parts, of="heads") for parts in (3, 4))
    assert four.over(mesh, Rules()).spec == P(None, ("tensor",))
    assert four.over(mesh, Rules(kv_heads=("data", "tensor"))).spec == P(None, ("data", "tensor"))
    assert three.over(mesh, Rules()).spec == four.over(mesh, Rules(kv_heads=None)).spec == P()
    assert three.why_whole(mesh, Rules()) == "3 heads, which 2 devices do not divide"
    one = Split(axis=0, parts=1, of="groups of heads")
    assert one.why_whole(mesh, Rules()) == "1 group of heads, which 2 devices do not divide"
    assert four.why_whole(mesh, Rules(kv_heads=None)) == "no axis of the mesh splits weights"
    assert four.why_whole(mesh, Rules()) is None


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


@pytest.mark.parametrize("name", FAMILIES)
def test_each_device_has_its_share_of_the_same_weights(name):
    """In bfloat16, so that the host rounds as a device would."""
    plain = models.load(DATA / name, dtype=jnp.bfloat16)
    model = models.load(DATA / name, dtype=jnp.bfloat16, mesh=make_mesh(MESHES["data-tensor"]))
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


def test_what_is_whole_is_told():
    mesh = make_mesh(MESHES["tensor"])
    whole = models.load(DATA / "gemma3", mesh=mesh).whole_weights()
    heads = "1 key/value head, which 2 devices do not divide"
    assert whole["blocks.0.attention.qkv.weight"] == heads
    assert whole["norm.weight"] == "every device needs all of it"
    assert "blocks.0.feed.down.weight" not in whole and "vocabulary.head" not in whole
    with pytest.raises(ValueError, match="got one without"):
        models.load(DATA / "gemma3").whole_weights()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "mesh"),
    mostly_nightly(
        [
            (name, mesh)
            for mesh in MESHES
            for name in (FAMILIES if mesh == "data-tensor" else ["gemma3", "granite_hybrid"])
        ],
        few=[
            ("gemma3", "tensor"),
            ("qwen3_window", "data-tensor"),
            ("mamba2", "data-tensor"),
            ("granite_hybrid_experts", "data-tensor"),
            ("recurrent_gemma", "data-tensor"),
        ],
    ),
)
def test_a_mesh_gives_what_one_device_gives(name, mesh):
    sizes = MESHES[mesh]
    logits, tokens = one_device(name)
    mesh = make_mesh(sizes)
    model = models.load(DATA / name, mesh=mesh)
    with jax.set_mesh(mesh):
        got, picked = run(model)
    np.testing.assert_allclose(got, logits, atol=1e-4)
    np.testing.assert_array_equal(picked, tokens)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("axes", "size"), [("tensor=3", "179.4 MB"), ("tensor=1,cells=2", "322.2 MB")]
)
def test_the_command_line_on_a_mesh(axes, size, capsys):
    """Key/value heads of SmolLM2 are three; nothing is compiled after the warm-up."""
    command = ["generate", "--json", "--max-tokens", "10", "The capital of France is", "One, two,"]
    assert main(command) == 0
    wanted = capsys.readouterr().out
    assert main([*command, "--mesh", axes]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == [
        json.loads(line)["tokens"] for line in wanted.splitlines()
    ]
    assert f"mesh {axes}: {size} of weights on each device" in err
    assert "compiles after warm-up: 0" in err


# ------------------------------------------------------------------------------ what a step sends


def step_on(mesh, **sizes):
    """A decode step of two layers of the Llama family."""
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
    rules = Rules()
    forward, shapes = functional(llama, config, jnp.float32)
    weights = jax.tree.map(
        lambda shape, split: shape.update(sharding=split.over(mesh, rules)),
        shapes,
        splits_of(llama, config),
    )
    make = partial(
        make_memory, llama.layers_of(config, jnp.float32), cells=64, sequences=2, streams=2
    )
    return compiled_step(forward, weights, jaxkv.sharding.allocate(make, mesh, rules), mesh)


def compiled_step(forward, weights, memory, mesh):
    """A decode step of two sequences."""

    def step(weights, memory, tokens):
        ubatch, _ = jaxkv.plan_step(memory, tokens, jnp.arange(2), jnp.ones(2, bool))
        return forward(weights, jaxkv.apply(memory, ubatch), ubatch)

    tokens = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        return jax.jit(step, donate_argnums=1).lower(weights, memory, tokens).compile()


def test_a_step_sums_twice_a_layer_and_moves_no_weight():
    """The outcomes of attention and of the feed-forward part, and once what tokens stand for."""
    compiled = step_on(
        make_mesh({"tensor": 4}), heads=8, kv_heads=4, bias=True, norms=True, tied=False
    )
    sent = collectives(compiled)
    assert Counter(one.name for one in sent) == {"all-reduce": 2 * 2 + 1}
    assert sum("linear" in one.purpose for one in sent) == 2 * 2


def test_key_value_heads_that_do_not_divide_are_whole_and_send_nothing():
    """What is left are the sums of the feed-forward parts and of the embedding."""
    compiled = step_on(make_mesh({"tensor": 4}), heads=4, kv_heads=1)
    assert Counter(one.name for one in collectives(compiled)) == {"all-reduce": 2 + 1}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        FAMILIES, few=["gemma3", "granite_hybrid_experts", "recurrent_gemma", "deepseek_v3"]
    ),
)
def test_a_step_of_no_family_sends_more_than_sums(name):
    """One for each part of a layer that is split, and that of the embedding."""
    mesh = make_mesh({"tensor": 2})
    model = models.load(DATA / name, mesh=mesh)
    memory = model.make_memory(cells=64, sequences=2, streams=2, ubatch_size=8)
    compiled = compiled_step(model.forward, model.weights, memory, mesh)
    counts = Counter(one.name for one in collectives(compiled))
    assert set(counts) == {"all-reduce"}
    layers = len(model.family.layers_of(model.config, model.dtype))
    assert counts["all-reduce"] <= 2 * layers + 1


# ------------------------------------------------------------------------- models without weights


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("qwen2", "gemma3") else pytest.param(name, marks=pytest.mark.nightly)
        for name in FAMILIES
    ],
)
def test_a_config_alone_tells_the_shapes_of_weights_and_memory(name, tmp_path):
    (tmp_path / "config.json").write_text((DATA / name / "config.json").read_text())
    sizes = dict(cells=64, sequences=2, streams=2, ubatch_size=8)
    mesh = make_mesh(MESHES["data-tensor"])
    model = models.load(DATA / name, dtype=jnp.bfloat16, mesh=mesh)
    shapes = models.on_mesh(models.load_shapes(tmp_path, dtype=jnp.bfloat16), mesh, Rules())
    assert_same_places(shapes.weights, model.weights)
    assert_same_places(shapes.memory_shapes(**sizes), model.make_memory(**sizes))
    assert shapes.whole_weights() == model.whole_weights()


def assert_same_places(shapes, arrays):
    assert jax.tree.structure(shapes) == jax.tree.structure(arrays)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(arrays), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "without vocab_size"),
        ({"vocab_size": 40, "model_type": "bert"}, "is a 'bert' model; known are deepseek_v2"),
    ],
)
def test_a_config_alone_may_tell_too_little(config, message, tmp_path):
    known = json.loads((DATA / "llama_tied" / "config.json").read_text())
    del known["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(known | config))
    with pytest.raises(models.ModelError, match=message):
        models.load_shapes(tmp_path)


# ------------------------------------------------------------------------ weights with split cells


def test_devices_that_split_cells_split_what_belongs_to_no_head():
    mesh = jax.sharding.AbstractMesh((2, 4), ("tensor", "cells"))
    split = partial(Split, axis=0, of="things")
    inside, head = split(parts=24, with_cells=True), split(parts=24)
    assert inside.over(mesh, RULES).spec == P(("tensor", "cells"))
    assert inside.over(mesh, Rules()).spec == head.over(mesh, RULES).spec == P(("tensor",))
    assert split(parts=6, with_cells=True).over(mesh, RULES).spec == P(("tensor",))
    three = split(parts=3, with_cells=True)
    assert three.over(mesh, RULES).is_fully_replicated
    assert three.why_whole(mesh, RULES) == "3 things, which 8 devices do not divide"
    mesh = jax.sharding.AbstractMesh((4,), ("cells",))
    assert head.why_whole(mesh, RULES) == "no axis of the mesh splits things"
    assert WHOLE.why_whole(mesh, RULES) == "every device needs all of it"
    assert inside.why_whole(mesh, RULES) is None


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama_tied", "granite_hybrid_experts"])
def test_a_mesh_that_splits_cells_gives_what_one_device_gives(name):
    logits, tokens = one_device(name)
    mesh = make_mesh({"tensor": 2, "cells": 2})
    model = models.load(DATA / name, mesh=mesh, rules=RULES)
    down = model.weights["blocks"][0]["feed"]["down"]["weight"]
    assert down.addressable_shards[0].data.size * 4 == down.size
    tables = [part.table for part in parts_of(model.memory_shapes(cells=64))]
    dealt = [(table.placement, table.shards) for table in tables if isinstance(table, Cells)]
    assert dealt == [("striped", 2)]
    with jax.set_mesh(mesh):
        got, picked = run(model)
    np.testing.assert_allclose(got, logits, atol=1e-4)
    np.testing.assert_array_equal(picked, tokens)
