"""Files with correct checksums and other content: each raises one sentence, or is loaded as it is.

Sizes that a file states are compared with limits before anything is allocated.
"""

import functools
import hashlib
import itertools
import json
import operator
import random
import re
import resource
import tracemalloc
from functools import partial, reduce

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import snapshot
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.snapshot.file import file_bytes, open_file
from tests.helpers.caches import assert_identical, parse_cache
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_batch, apply_plan
from tests.models.test_hostile_files import mutate
from tests.models.tiny_files import DATA
from tests.snapshot.saved import (
    change_metadata,
    make_recurrent,
    make_small,
    parts_of_file,
    randomize,
)

pytestmark = pytest.mark.core
VALUES = [-(2**31), -1, 0, 4, 2**31 - 1]


def replace_values(data, changes):
    """A file with other arrays, or values at paths of its description, and correct checksums."""
    said, arrays = parts_of_file(data)
    for path, value in changes.items():
        if path.startswith(("table.", "buffers.")):
            arrays[path] = np.asarray(value).astype(arrays.get(path, np.zeros(0, np.int32)).dtype)
        else:
            *places, last = (int(one) if one.isdigit() else one for one in path.split("."))
            reduce(operator.getitem, places, said)[last] = value
    return file_bytes(said, arrays)


@functools.cache
def save_each_kind():
    """A hybrid cache with a window, states, shared cells and a source, and its file."""
    sizes = {"sequences": 4, "streams": 2}
    text = make_small(window=jaxkv.Window.sliding(3), rope=None, **sizes)
    states = make_recurrent(max_rollback=1, **sizes)
    spec = jaxkv.CacheSpec.cross_attention(layers=1, kv_heads=2, head_dim=4)
    sources = jaxkv.make_cache(spec, cells=6, **sizes)
    cache = compose_hybrid_cache((text, (0, 1)), (states, (2, 3)), (sources, (4,)))
    for tokens in ([[1], [2]], [[3], [4]], [[5], [6]]):
        cache = apply_batch(cache, tokens, sequences=[0, 2])
    source = jaxkv.init_batch(cache, jaxkv.make_batch([[6, 7]]), encoder=True)
    cache = apply_plan(cache, source.check())
    cache = jaxkv.seq_add(jaxkv.seq_cp(cache, 0, 1).cache, 2, 0, -1, delta=2).cache
    return randomize(cache), snapshot.save(randomize(cache), sequences=[0, 1, 2])


@pytest.mark.parametrize("part", mark_cases([0, 1], fast=[1]))
def test_load_of_changed_content_raises_or_is_what_the_file_says(part):
    cache, data = save_each_kind()
    before, refused = jax.tree.map(np.asarray, cache), set()
    with open_file(data) as file:
        arrays = {n: file[n] for n in file.arrays if n.startswith(f"table.parts.{part}.")}
    places = [(n, i) for n, x in arrays.items() for i in {0, x.size // 2, x.size - 1}]
    for (name, i), value in itertools.product(places, VALUES):
        new = arrays[name].astype(np.int64)
        new.reshape(-1)[i] = value
        there = replace_values(data, {name: new})
        try:
            loaded = snapshot.load(there)
        except ValueError as error:
            assert str(error).startswith("expected ") and "\n" not in str(error)
            if name not in refused:
                with pytest.raises(ValueError, match="expected "):
                    snapshot.load(there, into=cache, donate=True)
            refused.add(name)
            continue
        assert not any(map(int, loaded.check().values())), (name, i, value)
        again = snapshot.save(loaded, sequences=[0, 1, 2])
        with open_file(again) as one, open_file(there) as other:
            assert all(np.array_equal(one[n], other[n]) for n in arrays), (name, i, value)
    assert refused == {name for name in arrays if not name.endswith("content")}
    assert_identical(cache, before)


def test_load_of_content_that_no_cache_has_raises():
    cache, data = save_each_kind()
    for changes, message in json.loads((DATA / "snapshots_refused.json").read_text()):
        for load in (snapshot.load, partial(snapshot.load, into=cache)):
            with pytest.raises(ValueError, match=message) as caught:
                load(replace_values(data, changes))
            assert of_jaxkv(caught.value), changes


def test_load_of_an_evicted_position_without_a_window_raises():
    """A plan would refuse each batch of the sequence."""
    cache = make_small()
    marks = np.zeros(cache.table.evicted_below.shape, np.int32)
    marks[0] = 1
    with pytest.raises(ValueError, match=r"expected evicted_below of 0 \(no window\), got 1"):
        snapshot.load(replace_values(snapshot.save(cache), {"table.evicted_below": marks}))


def of_jaxkv(error):
    """Whether a message is a sentence of jaxkv, and so is the cause in it."""
    *_, cause = str(error).partition(" describes a cache, got one that does not (")
    causes = "a key is missing or unknown, or a value has another type|expected .*; .*"
    return not cause or re.fullmatch(rf"({causes})\); it was not written by jaxkv.snapshot", cause)


def change_description(data, change):
    """A file with the result of `change` as its description, and a correct checksum."""
    return rewrite_description(data, lambda text: json.dumps(change(json.loads(text))))


def rewrite_description(data, change):
    """A file with another text as its description, and a correct checksum."""

    def write(metadata):
        text = change(metadata["description"])
        metadata |= {"description": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}

    return change_metadata(data, write)


def test_load_of_description_without_a_key_raises():
    cache = make_small()
    data = snapshot.save(cache)
    with open_file(data) as file:
        keys, entry = [*file.description], next(iter(file.arrays))

    def without(*path):
        def change(said):
            del reduce(operator.getitem, path[:-1], said)[path[-1]]
            return said

        return change

    changes = [without(key) for key in keys if key != "notes"]
    changes += [without("arrays", entry, key) for key in ("dtype", "shape", "sha256")]
    changes += [lambda said: said | {"arrays": [1]}, lambda said: [said]]

    def with_dtype(dtype):
        return lambda said: said["arrays"][entry].update(dtype=dtype) or said

    changes += [with_dtype(dtype) for dtype in ("9" * 5000, None, [1])]
    for change in changes:
        for load in (snapshot.load, snapshot.inspect, partial(snapshot.load, into=cache)):
            with pytest.raises(ValueError, match="that describes a cache, got") as caught:
                load(change_description(data, change))
            assert of_jaxkv(caught.value)
    snapshot.load(change_description(data, without("notes")))  # older files have no notes


@pytest.mark.parametrize("new", ["NaN", "-Infinity", "1e999", "[" * 100 + "]" * 100, "[" * 10**5])
def test_load_of_text_that_save_never_writes_raises(new):
    cache = make_small()
    data = snapshot.save(cache, model_id=0.25)
    for use in (snapshot.load, snapshot.inspect, partial(snapshot.load, into=cache)):
        with pytest.raises(ValueError, match="expected a snapshot that describes a cache, got"):
            use(
                rewrite_description(
                    data, lambda text: text.replace('"model": 0.25', f'"model": {new}')
                )
            )


def test_load_of_booleans_other_than_0_and_1_raises():
    cache, data = save_each_kind()
    name = "table.parts.1.written"
    with open_file(data) as file:
        found = file[name].view(np.uint8)
    found.reshape(-1)[0] = 2
    for use in (snapshot.load, partial(snapshot.load, into=cache)):
        with pytest.raises(ValueError, match="expected bytes of 0 and 1 in table.parts.1.written"):
            use(replace_values(data, {name: found.view(bool)}))


def grown_bytes(call):
    """Bytes of memory that a call took at most, from NumPy and Python, and from all else."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return max(peak, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


def change_sizes(data, **sizes):
    return change_description(data, lambda said: said | {"cache": said["cache"] | sizes})


def test_load_of_large_sizes_raises_before_it_allocates():
    data = snapshot.save(make_small())

    def refused():
        for changes in ({"cells": 2**22}, {"sequences": 2**28, "streams": 2**27}):
            large = change_sizes(data, **changes)
            need = snapshot.inspect(large).cache.nbytes
            with pytest.raises(ValueError, match=f"expected a cache of at most {2**26} bytes in a"):
                snapshot.load(large)
            with pytest.raises(ValueError, match=f"pass max_bytes={need}, or"):
                snapshot.load(large, max_bytes=need - 1)

        states = change_description(save_each_kind()[1], many_layers)
        with pytest.raises(ValueError, match=f"expected 2 layers, as saved, got {2**12}"):
            snapshot.inspect(states)

    def many_layers(said):
        said["cache"]["parts"][1]["layers"] = 2**12
        return said

    save_each_kind()
    assert grown_bytes(refused) < 2**25


def test_load_allows_sizes_up_to_max_bytes():
    few = randomize(parse_cache("0{0} 1{0}"))
    data, size = snapshot.save(few), few.nbytes
    assert snapshot.load(data, max_bytes=size).nbytes == size
    with pytest.raises(ValueError, match=f"of at most {size - 1} bytes .* got one of {size}"):
        snapshot.load(data, max_bytes=size - 1)
    with pytest.raises(ValueError, match="expected max_bytes of at least 1"):
        snapshot.load(data, max_bytes=0)
    large = change_sizes(data, cells=2**16)
    assert snapshot.load(large).table.num_cells == 2**16  # less than 64 MiB


def test_load_into_allocates_nothing_of_the_saved_sizes():
    cache = make_small(streams=2)
    data = snapshot.save(randomize(apply_batch(cache, [[1, 2], [3]])))
    large = change_sizes(data, sequences=2**30, streams=2**30, cells=2**25)
    wanted, found = snapshot.load(data, into=cache), []
    assert grown_bytes(lambda: found.append(snapshot.load(large, into=cache))) < 2**25
    assert_identical(found[0].buffers, wanted.buffers)


DESCRIPTIONS = [range(12), range(12, 60), range(60, 3000)]


@pytest.mark.parametrize("seeds", mark_cases(DESCRIPTIONS, fast=(), core=DESCRIPTIONS[:1]), ids=str)
def test_load_of_changed_description_raises_or_is_saved_alike(seeds):
    """Three of four changes are in the part that describes the cache."""
    cache, data = save_each_kind()
    refused = 0

    def change(said, rng):
        if rng.random() < 0.25:
            return mutate(said, rng)
        return said | mutate({key: said[key] for key in ("cache", "sequences", "tokens")}, rng)

    def described_cache(data):
        with open_file(data) as file:
            return json.dumps(file.description["cache"], sort_keys=True)

    for seed in seeds:
        there = change_description(data, lambda said, seed=seed: change(said, random.Random(seed)))
        try:
            loaded = snapshot.load(there)
        except ValueError as error:
            assert re.fullmatch("expected .* got .*", str(error)) and of_jaxkv(error), seed
            assert len(str(error)) < 1000, seed
            refused += 1
            continue
        assert not any(map(int, loaded.check().values())), seed
        assert described_cache(snapshot.save(loaded)) == described_cache(there), seed
    assert refused > len(seeds) / 2
