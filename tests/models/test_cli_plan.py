"""The command `plan`: its numbers are those of models that are there, and it says what is wrong."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxkv
import models
from models.cli.main import main
from models.cli.numbers import bytes_of
from models.costs import abstract_mesh, costs_of, most_sequences
from models.meshes import RULES, make_mesh
from models.model import load_shapes, on_mesh

DATA = Path(__file__).parent.parent / "data"
TINY = DATA / "llama_tied"


@pytest.fixture
def plan(capsys):
    """Run the command; the exit code, stdout and stderr."""

    def plan(*options, model=TINY):
        status = main(["plan", "--model", str(model), *map(str, options)])
        return status, *capsys.readouterr()

    return plan


def bytes_on_a_device(tree):
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def as_config(folder, **changes):
    """A folder with a config and nothing else."""
    config = json.loads((TINY / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ------------------------------------------------------------------------------------- its numbers


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "granite_hybrid", "recurrent_gemma"])
def test_bytes_are_those_of_a_model_that_is_there(name, plan):
    sizes = {"sequences": 4, "streams": 2, "cells": 64}
    options = [x for one, size in sizes.items() for x in (f"--{one}", size)]
    status, out, err = plan("--mesh", "data=2,tensor=2", *options, "--json", model=DATA / name)
    assert (status, err) == (0, "")
    told = json.loads(out)
    model = models.load(DATA / name, mesh=make_mesh(told["mesh"]), rules=RULES)
    table, buffers = jaxkv.split(model.make_memory(**sizes))
    assert told["memory"] == sizes
    assert told["weights"] == sum(x.size for x in jax.tree.leaves(model.weights))
    assert told["layout"]["weights"] == bytes_on_a_device(model.weights)
    assert told["layout"]["table"] == bytes_on_a_device(table)
    assert told["layout"]["buffers"] == bytes_on_a_device(buffers)
    assert told["layout"]["total"] == sum(map(bytes_on_a_device, (model.weights, table, buffers)))
    assert sum(part["on_device"] for part in told["parts"]) == told["layout"]["buffers"]
    assert sum(part["layers"] for part in told["parts"]) == table.num_layers(buffers)
    assert set(told["whole"]) == set(model.whole_weights().values())


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float16"])
def test_bytes_of_a_cache_with_a_dtype_of_its_own_are_those_that_it_takes(dtype, plan):
    """Of a hybrid, whose states have no codes."""
    name, sizes = "granite_hybrid", {"sequences": 2, "streams": 2, "cells": 64}
    options = [x for one, size in sizes.items() for x in (f"--{one}", size)]
    status, out, err = plan(*options, "--cache-dtype", dtype, "--json", model=DATA / name)
    assert (status, err) == (0, "")
    told = json.loads(out)
    assert (told["dtype"], told["cache_dtype"]) == ("float32", dtype)
    model = models.load(DATA / name, cache_dtype=dtype)
    memory = model.make_memory(**sizes)
    table, buffers = jaxkv.split(memory)
    assert told["layout"]["buffers"] == jaxkv.nbytes(buffers)
    assert told["layout"]["table"] == jaxkv.nbytes(table)
    assert dtype in {str(x.dtype) for x in jax.tree.leaves(buffers)}
    _, out, _ = plan(*options, "--cache-dtype", dtype, model=DATA / name)
    assert f"weights in float32\n2 sequences in 2 streams of 64 cells, stored as {dtype}\n" in out


def test_each_kind_of_layers_has_its_price(plan):
    _, out, _ = plan("--json", "--cells", 70, model=DATA / "granite_hybrid")
    states, full = json.loads(out)["parts"]
    assert (states["kind"], states["unit"]) == ("recurrent states", "sequence")
    assert (full["kind"], full["unit"]) == ("full attention", "token")
    assert full["each"] * 70 == full["on_device"] and states["each"] == states["on_device"]
    _, out, _ = plan("--json", model=DATA / "gemma3")
    assert {part["kind"] for part in json.loads(out)["parts"]} == {"window of 12", "full attention"}


def test_the_page_fits_a_terminal(plan):
    options = ["--mesh", "data=2,tensor=4", "--sequences", 4, "--room", "16GB"]
    status, out, err = plan(*options)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for line in (
        r"llama, 0\.\dM weights in float32",
        r"4 sequences in 2 streams of \d+ cells",
        r"on each of 8 devices",
        r"data=2 +2 streams",
        r"for these heads take --mesh data=2,tensor=2,cells=2, on each device:",
        r"a sequence of \d+ tokens takes [\d.]+ kB, on all devices together",
        r"into 16 GB on each device fit [\d,]+ sequences of \d+ tokens",
    ):
        assert re.search(f"^{line}$", out, re.M), (line, out)


def test_the_mesh_that_is_proposed_is_one_that_can_be_asked_for(plan):
    status, out, _ = plan("--mesh", "tensor=8", "--json")
    told = json.loads(out)
    assert (status, told["layout"]["whole"]) == (0, ["kv_heads (2) are not split by tensor"])
    axes = ",".join(f"{name}={size}" for name, size in told["fitted"]["mesh"].items())
    assert axes == "tensor=2,cells=4"
    again = json.loads(plan("--mesh", axes, "--json")[1])
    assert {name: again[name] for name in told["fitted"]} == told["fitted"]
    assert again["layout"]["buffers"] * 8 == told["layout"]["buffers"]
    assert again["layout"]["whole"] == [] and again["fitted"] is None


def test_one_device_is_the_default_and_a_memory_has_room_for_the_longest_text(plan):
    _, out, _ = plan("--sequences", 3, "--json")
    told = json.loads(out)
    longest = json.loads((TINY / "config.json").read_text())["max_position_embeddings"]
    assert told["layout"]["devices"] == 1
    assert told["memory"] == {"sequences": 3, "streams": 1, "cells": 3 * longest}


@pytest.mark.parametrize("name", ["llama_tied", "recurrent_gemma"])
def test_one_sequence_more_would_not_fit(name):
    model = load_shapes(DATA / name, dtype=jnp.bfloat16)
    model = on_mesh(model, abstract_mesh({"data": 2, "tensor": 2}), RULES)
    length = 50 if name == "llama_tied" else None

    def takes(sequences):
        cells = None if length is None else sequences // 2 * length
        return costs_of(model, sequences=sequences, streams=2, cells=cells).layout.total

    room = takes(12)
    same = dict(length=length, streams=2)
    assert most_sequences(model, room=room, **same) == 12
    assert most_sequences(model, room=room - 1, **same) == 10
    assert most_sequences(model, room=takes(2) - 1, **same) == 0


def test_no_more_sequences_than_a_stream_has_cells_for():
    model = load_shapes(DATA / "llama_tied", dtype=jnp.bfloat16)
    model = on_mesh(model, abstract_mesh({"tensor": 1}), RULES)
    assert most_sequences(model, room=2**60, length=2**29, streams=1) == 1
    assert most_sequences(model, room=2**60, length=2**30, streams=1) == 0


@pytest.mark.parametrize("name", ["llama_tied", "gemma3", "granite_hybrid", "recurrent_gemma"])
def test_a_sequence_takes_what_a_memory_for_it_alone_would(plan, name):
    """Of a window it is as many tokens as there are cells for, of states one."""
    status, out, _ = plan("--cells", 600, "--sequences", 1, "--json", model=DATA / name)
    told = json.loads(out)
    shapes = load_shapes(DATA / name).memory_shapes(cells=600)
    assert (status, told["sequence"]["bytes"]) == (0, jaxkv.nbytes(jaxkv.split(shapes)[1]))


def test_without_a_room_it_is_that_of_this_machine(plan, monkeypatch):
    """It is told, and refuses nothing: the plan may be for another machine."""
    monkeypatch.setattr("models.cli.plan.limits", lambda devices: iter([10**9, 300_000]))
    status, out, _ = plan("--cells", 100)
    assert status == 0 and "into 300 kB, which this device has, fit " in out
    status, out, err = plan("--cells", 10**6)
    assert (status, err) == (0, "") and "fit 0 sequences of 1,000,000 tokens" in out
    assert json.loads(plan("--json")[1])["fits"]["here"]
    assert json.loads(plan("--mesh", "data=2", "--json")[1])["fits"] is None


def test_a_room_has_units():
    wanted = {
        "12": 12,
        "3B": 3,
        "2kB": 2000,
        "16GB": 16 * 10**9,
        "1.5 GiB": 3 * 2**29,
        "1T": 10**12,
    }
    assert {text: bytes_of(text) for text in wanted} == wanted


def test_no_weight_is_read(plan, tmp_path):
    """There are none: a config of a model of 70B, in a folder of its own."""
    folder = as_config(
        tmp_path,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=2,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    mesh = ["--mesh", "data=4,tensor=8,cells=4", "--dtype", "bfloat16", "--cells", 4096]
    status, out, _ = plan(*mesh, "--json", model=folder)
    told = json.loads(out)
    assert (status, told["layout"]["devices"]) == (0, 128)
    attention, norms = 2 * 8192 * (8192 * 2 + 8 * 128 * 2), 5 * 8192
    inside = 2 * 8192 * 28672 * 3 + 2 * 128256 * 8192
    assert told["weights"] == attention + inside + norms
    assert told["layout"]["weights"] == 2 * (attention // 8 + inside // 32 + norms)
    assert told["splits"] == {
        "data": ["4 streams"],
        "tensor": ["8 kv_heads", "weights"],
        "cells": ["4,096 cells", "weights"],
    }
    assert told["parts"][0]["each"] == 2 * 2 * 8 * 128 * 2


# ------------------------------------------------------------------------------------ what is wrong


def test_too_little_room_is_said_after_the_page(plan):
    status, out, err = plan("--sequences", 8, "--cells", 8000, "--room", "700kB")
    assert status == 2 and "on the device" in out and err.count("\n") == 1
    found = re.search(r"more than --room 700 kB; give --sequences (\d+) --cells (\d+), or", err)
    smaller = ["--sequences", found[1], "--cells", found[2], "--room", "700kB"]
    assert plan(*smaller)[0] == 0
    more = ["--sequences", int(found[1]) + 1, "--cells", int(found[2]) + 1000]
    assert plan(*more, "--room", "700kB")[0] == 2
    uneven = ["--mesh", "cells=3", "--room", "410kB"]  # what is said has to be split by three
    status, _, err = plan(*uneven, "--sequences", 60, "--cells", 6000)
    found = re.search(r"give --sequences (\d+) --cells (\d+), or", err)
    assert status == 2 and int(found[2]) - 3 < int(found[1]) * 100 <= int(found[2])
    assert plan(*uneven, "--sequences", found[1], "--cells", found[2])[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--room", "1kB"], "the weights alone are: give more devices to tensor or cells"),
        (["--room", "700kB", "--cells", 8000], "give fewer --cells, or more devices"),
        (["--room", "16 apples"], "--room: wanted a number of bytes, such as 16GB or 80GiB"),
        (["--room", "0"], "--room: wanted a number of bytes, .*, got '0'"),
        (["--mesh", "model=8"], "--mesh: wanted axes named data, tensor, cells, got 'model=8'"),
        (
            ["--mesh", "data=2", "--streams", 3],
            "streams that 2 devices divide .data., got 3: take 4",
        ),
        (
            ["--mesh", "cells=3", "--cells", 100],
            "cells that 3 shards divide, got 100: take 102",
        ),
        (["--sequences", 6, "--streams", 4], "6 sequences cannot be .* give --sequences 8"),
        (["--cells", 0], "--cells: wanted a whole number from 1"),
        (["--model", "/nowhere"], "No model at '/nowhere'"),
    ],
    ids=str,
)
def test_what_the_user_can_put_right_is_a_sentence(plan, options, message):
    status, _, err = plan(*options)
    assert status == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert re.search(message, err), err


def test_a_mesh_that_fits_is_what_to_change(plan):
    """Two heads on eight devices: the cells would be whole on each."""
    sizes = ["--cells", 80000, "--room", "12MB"]
    status, _, err = plan("--mesh", "tensor=8", *sizes)
    assert status == 2 and "give --mesh tensor=2,cells=4." in err
    assert plan("--mesh", "tensor=2,cells=4", *sizes)[0] == 0


def test_a_model_that_does_not_say_how_long_texts_are(plan, tmp_path):
    folder = as_config(tmp_path, max_position_embeddings=None)
    status, out, err = plan(model=folder)
    assert (status, out) == (2, "") and "how long its texts may be; give --cells" in err


def test_one_head_and_heads_that_have_no_mesh_left(plan):
    _, out, _ = plan("--mesh", "tensor=2", model=DATA / "recurrent_gemma")
    assert "an axis named cells splits the cells of a head that is alone" in out
    status, out, _ = plan("--mesh", "tensor=4,cells=2")
    assert status == 0 and "take tensor=2 and cells=4" in out
    _, out, _ = plan("--mesh", "tensor=3", "--cells", 99)  # they stay whole, and do not "fit"
    assert "for these heads take --mesh tensor=1,cells=3, on each device:" in out
