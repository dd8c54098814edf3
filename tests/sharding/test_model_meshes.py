"""Models on meshes: the results of one device, a share of arrays on each, weights not sent."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
import models
from jaxkv.core.partitioning import ShardingRules
from jaxkv.kv.cells import Cells
from jaxkv.sharding.make import make_sharded
from models.cli.arguments import InputError, parser
from models.cli.main import main
from models.families.caches import Attends, make_cache
from models.meshes import RULES, WHOLE, Split, make_mesh
from models.room import make_with_room
from tests.generation.tiny import init_state
from tests.helpers.hlo import collectives
from tests.helpers.parametrize import mark_cases

DATA = Path(__file__).parent.parent / "data"
FAMILIES = (
    *("llama_tied", "qwen2", "qwen3_window", "gemma3", "deepseek_v3", "mamba2", "recurrent_gemma"),
    *("granite_hybrid", "granite_hybrid_experts", "lfm2", "falcon_h1", "gpt_oss", "qwen3_next"),
    *("qwen3_5", "qwen3_5_moe", "gemma3n", "gemma4", "llama4", "nemotron_h", "deepseek_v32"),
)
TENSOR, DATA_TENSOR = {"tensor": 2}, {"data": 2, "tensor": 2}
ALL = jax.sharding.AbstractMesh((2, 2, 4), ("data", "tensor", "cells"))
NOTHING, CELLS_ALONE = ShardingRules(kv_heads=None), ShardingRules(kv_heads=None, cells="cells")
over_families = pytest.mark.parametrize(
    "name",
    mark_cases(FAMILIES, fast=["llama_tied"], core=["granite_hybrid_experts", "deepseek_v3"]),
)


def test_mesh_argument_is_read_as_axes_and_sizes():
    args = parser().parse_args(["generate", "hello", "--mesh", "data=2,tensor=4"])
    assert args.mesh == {"data": 2, "tensor": 4}
    for text in ("", "4", "tensor", "tensor=0", "tensor=x", "a=2,a=2", "=2", "a=2,"):
        with pytest.raises(InputError, match="such as data=2,tensor=2"):
            parser().parse_args(["generate", "hello", "--mesh", text])
    with pytest.raises(models.ModelError, match="expected 64 devices.*JAX_NUM_CPU_DEVICES=64"):
        make_mesh({"data": 8, "tensor": 8})


@pytest.mark.parametrize(
    ("axes", "kv_heads", "sizes", "message"),
    [
        ({"tensor": 2}, 4, {"cells": 10**9}, "takes 256,040.0 GB and the 2 devices have"),
        ({"tensor": 2}, 3, {"cells": 10**9}, "takes 384,040.0 GB and the 2 devices have"),
        ({"data": 2}, 1, {"cells": 16, "streams": 3}, "streams that 2 devices divide.*3; take 4"),
    ],
)
def test_make_with_room_counts_whole_arrays_on_each_device(axes, kv_heads, sizes, message):
    """Three heads are whole on both devices; tables are too."""

    def allocated(**options):
        layer = Attends(kv_heads=kv_heads, head_dim=8_000, rope=None)
        make = partial(make_cache, [layer], sequences=options.get("streams", 1), **options)
        return make_sharded(make, mesh)

    mesh = make_mesh(axes)
    with jax.set_mesh(mesh), pytest.raises(models.ModelError, match=message):
        make_with_room(allocated, **sizes)


@pytest.mark.parametrize(
    ("parts", "with_cells", "rules", "axes", "why"),
    [
        (4, False, ShardingRules(), "tensor", None),
        (4, False, ShardingRules(kv_heads=("data", "tensor")), ("data", "tensor"), None),
        (1, False, ShardingRules(), None, "1 head, which 2 devices do not divide"),
        (4, False, NOTHING, None, "no axis of the mesh splits weights"),
        (4, False, CELLS_ALONE, None, "no axis of the mesh splits heads"),
        (24, True, RULES, ("tensor", "cells"), None),
        (24, False, RULES, "tensor", None),
        (6, True, RULES, "tensor", None),
        (3, True, RULES, None, "3 heads, which 8 devices do not divide"),
    ],
)
def test_split_takes_axes_that_divide_its_parts(parts, with_cells, rules, axes, why):
    split = Split(axis=1, parts=parts, of="heads", with_cells=with_cells)
    assert split.over(ALL, rules).spec == (P(None, axes) if axes else P())
    assert split.why_whole(ALL, rules) == why
    assert WHOLE.why_whole(ALL, RULES) == "every device needs all of it"


@over_families
def test_load_on_mesh_gives_each_device_its_share(name, tmp_path):
    """In bfloat16, so that the CPU rounds as a device would; a config gives the same sizes."""
    plain, mesh = models.load(DATA / name, dtype=jnp.bfloat16), make_mesh(DATA_TENSOR)
    model = models.load(DATA / name, dtype=jnp.bfloat16, mesh=mesh)
    whole = model.whole_weights()
    leaves = jax.tree.leaves_with_path(plain.params)
    for (path, wanted), got in zip(leaves, jax.tree.leaves(model.params), strict=True):
        key = models.model.name_of(path)
        np.testing.assert_array_equal(got, wanted, err_msg=key, strict=True)
        devices = 1 if key in whole else 2
        assert all(x.data.size * devices == wanted.size for x in got.addressable_shards), key

    (tmp_path / "config.json").write_text((DATA / name / "config.json").read_text())
    shapes = models.on_mesh(models.load_shapes(tmp_path, dtype=jnp.bfloat16), mesh, ShardingRules())

    def alike(shape, array):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
        assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)

    sizes = dict(cells=64, sequences=2, streams=2, ubatch_size=8)
    jax.tree.map(alike, shapes.params, model.params)
    jax.tree.map(alike, shapes.cache_shapes(**sizes), model.make_cache(**sizes))
    assert shapes.whole_weights() == whole


def test_whole_weights_say_why_they_are_whole():
    model = models.on_mesh(models.load_shapes(DATA / "gemma3"), make_mesh(TENSOR), ShardingRules())
    whole, heads = model.whole_weights(), "1 key/value head, which 2 devices do not divide"
    assert whole["blocks.0.attention.qkv.weight"] == heads
    assert "blocks.0.feed.down.weight" not in whole and "vocabulary.head" not in whole
    with pytest.raises(ValueError, match="got one without"):
        models.load_shapes(DATA / "gemma3").whole_weights()


@pytest.mark.parametrize("name", mark_cases(FAMILIES, core=["llama_tied", "gemma3"]))
def test_model_step_on_mesh_sends_sums(name):
    """A sum for each split part of a layer, and that of the embedding."""
    mesh = make_mesh(TENSOR)
    model = models.on_mesh(models.load_shapes(DATA / name), mesh, ShardingRules())

    def step(params, cache, tokens):
        after, logits = model.forward(params, jaxkv.apply(cache, jaxkv.plan_step(cache, tokens)))
        return after.cache, logits

    cache = model.cache_shapes(cells=64, sequences=2, streams=2, ubatch_size=8)
    tokens = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        run = jax.jit(step, donate_argnums=1)
        sent = collectives(run.lower(model.params, cache, tokens).compile())
    layers = model.config.layers
    # Attention and feed-forward of each layer; gemma3 has one key head, so its attention is whole.
    exact = {"llama_tied": 2 * layers + 1, "gemma3": layers + 1}
    assert {name for name, _ in sent} == {"all-reduce"}
    others = 1 + (getattr(model.config, "inputs", None) is not None)  # embeddings
    others += 2 * sum(share > 0 for share in getattr(model.config, "sparsity", ()))  # of gates
    assert len(sent) <= 2 * layers + others and len(sent) == exact.get(name, len(sent))


RECURRENT = ["mamba2", "recurrent_gemma", "falcon_h1", "lfm2", "qwen3_next", "qwen3_5"]
RECURRENT += ["nemotron_h"]


@pytest.mark.parametrize("name", mark_cases(RECURRENT, core=["mamba2"]))
def test_step_of_fewer_texts_than_sequences_sends_no_states(name):
    """It sends at most as many bytes as a step of all sequences, which are those of activations."""
    mesh = make_mesh(DATA_TENSOR)
    model = models.on_mesh(models.load_shapes(DATA / name), mesh, ShardingRules())

    def step(params, cache, tokens, sequences):
        plan = jaxkv.plan_step(cache, tokens, sequences=sequences)
        after, logits = model.forward(params, jaxkv.apply(cache, plan))
        return after.cache, logits

    def sent(*shape):
        cache = model.cache_shapes(cells=64, sequences=4, streams=4, ubatch_size=8)
        whole = NamedSharding(mesh, P())
        ids = [jax.ShapeDtypeStruct(x, jnp.int32, sharding=whole) for x in (shape, shape[:1])]
        with jax.set_mesh(mesh):
            found = collectives(jax.jit(step).lower(model.params, cache, *ids).compile())
        return sum(size for _, size in found)

    assert sent(1) <= sent(4) and sent(2, 4) <= sent(4, 4)


def prefill_and_decode(model):
    cache = model.make_cache(cells=64, sequences=2, streams=2, ubatch_size=8)
    prompts = jaxkv.make_batch([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14]])
    cache, logits, *_ = jaxkv.prefill(model.forward, model.params, cache, prompts, ubatch_size=8)
    state = init_state(cache, tokens=jnp.argmax(logits, -1).astype(jnp.int32), max_new_tokens=8)
    picked = jaxkv.decode(model.forward, model.params, cache, state, num_tokens=8)
    return np.asarray(logits), np.asarray(picked.tokens)


MESHES = [(name, DATA_TENSOR) for name in FAMILIES if name not in ("qwen2", "granite_hybrid")]
MESHES += [("gemma3", TENSOR), ("gemma4_experts", DATA_TENSOR)]
MESHES += [(name, {"tensor": 2, "cells": 2}) for name in ("llama_tied", "granite_hybrid_experts")]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "sizes"), MESHES, ids=str)
def test_prompts_and_tokens_on_mesh_match_one_device(name, sizes):
    logits, tokens = prefill_and_decode(models.load(DATA / name))
    mesh = make_mesh(sizes)
    model = models.load(DATA / name, mesh=mesh, rules=RULES)
    if "cells" in sizes:
        down = model.params["blocks"][0]["feed"]["down"]["weight"]
        assert down.addressable_shards[0].data.size * 4 == down.size
        tables = [part.table for part in model.cache_shapes(cells=64).parts]
        dealt = [table.placement.name for table in tables if isinstance(table, Cells)]
        assert dealt == ["striped:2"]
    with jax.set_mesh(mesh):
        got, picked = prefill_and_decode(model)
    np.testing.assert_allclose(got, logits, atol=1e-4)
    np.testing.assert_array_equal(picked, tokens)


@pytest.mark.nightly
def test_generate_on_mesh_writes_the_same_tokens(capsys):
    """SmolLM2 has three key/value heads; nothing compiles after the warm-up."""
    command = ["generate", "--json", "--max-tokens", "10", "The capital of France is", "One, two,"]
    assert main(command) == 0
    wanted = [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]
    for axes, size in (("tensor=3", "179.4 MB"), ("tensor=1,cells=2", "322.2 MB")):
        assert main([*command, "--mesh", axes]) == 0
        out, err = capsys.readouterr()
        assert [json.loads(line)["tokens"] for line in out.splitlines()] == wanted
        assert f"mesh {axes}: {size} of weights on each device" in err
        assert "compiles after warm-up: 0" in err


def test_plan_where_no_axis_splits_streams_has_a_row_for_each_text():
    mesh = make_mesh(TENSOR)
    model = models.on_mesh(models.load_shapes(DATA / "mamba2"), mesh, ShardingRules())
    cache = model.cache_shapes(cells=64, sequences=4, streams=4, ubatch_size=8)
    with jax.set_mesh(mesh):
        plan = jax.eval_shape(jaxkv.plan_step, cache, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert plan.ubatch.tokens.shape == (2, 1)
