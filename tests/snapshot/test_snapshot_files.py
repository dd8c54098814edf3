"""Files of snapshots: damaged, foreign, of another cache; each raises one sentence, in bounded
memory.

Random damage is always detected, since a checksum covers the whole file.
"""

import fcntl
import functools
import hashlib
import itertools
import json
import operator
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tracemalloc
from functools import partial, reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import jaxkv
from jaxkv import snapshot
from jaxkv.cache import merge, split
from jaxkv.hybrid import compose_hybrid_cache
from jaxkv.snapshot import file as file_module
from jaxkv.snapshot.file import MAX_NESTING, UNFINISHED, file_bytes, open_file
from tests.helpers import edit_sequences
from tests.helpers.caches import (
    assert_identical,
    attention_cache,
    delete_copy,
    parse_cache,
    recurrent_cache,
)
from tests.helpers.mistakes import assert_raises, mistakes
from tests.helpers.parametrize import mark_cases
from tests.helpers.steps import apply_batch, apply_plan
from tests.models.test_hostile_files import mutate
from tests.models.tiny_files import DATA
from tests.snapshot.saved import damage, randomize

pytestmark = pytest.mark.core
ROOT = Path(__file__).parents[2]

OVERHEAD = 200_000
SEEDS = [range(10), range(10, 100), range(1000, 2000)]
VALUES = [-(2**31), -1, 0, 4, 2**31 - 1]
"""Bytes that reading may need in addition to the file: its parsed header, and messages."""


@pytest.fixture(scope="module")
def saved():
    """A cache of bfloat16 with 600 kB of used cells, and its file."""
    sizes = dict(cells=64, dtype=jnp.bfloat16, sequences=2)
    cache = attention_cache(layers=3, kv_heads=8, head_dim=128, **sizes)
    cache = randomize(apply_batch(cache, [[1] * 30, [2] * 20]))
    return cache, snapshot.save(cache, tokens={0: [1] * 30}, model_id={"name": "tiny"})


def change_metadata(data, change):
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


def check_refused(cache, data, words):
    """Each way of loading raises one line, in no more memory than the file takes."""
    for load in (snapshot.load, lambda data: snapshot.load(data, into=cache)):
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=words) as caught:
                load(data)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
        room = os.path.getsize(data) if isinstance(data, os.PathLike) else 2 * len(data)
        assert peak < room + OVERHEAD


@pytest.mark.parametrize("seeds", mark_cases(SEEDS, SEEDS[:2]), ids=str)
def test_load_of_damaged_file_raises(seeds, saved, tmp_path):
    cache, data = saved
    stops = 8 + int.from_bytes(data[:8], "little"), len(data)  # in the header as often as after it
    for seed in seeds:
        damaged = damage(data, random.Random(seed), stops[seed % 2]) + bytes(seed % 3 // 2)
        (path := tmp_path / "damaged").write_bytes(damaged)
        for source in (path, damaged) if damaged != data else ():
            check_refused(cache, source, "expected .* got ")


def test_load_of_foreign_or_newer_file_raises(saved, tmp_path):
    cache, data = saved
    check_refused(
        cache, change_metadata(data, lambda known: known.update(version="1")), "version 2"
    )
    foreign = safetensors.numpy.save({"x": np.zeros(3)})
    check_refused(cache, foreign, "with the format jaxkv.snapshot")
    for content in (b"", b"a", bytes(8), b"GGUF" + bytes(100), b"\xff" * 100):
        check_refused(cache, content, "expected a snapshot, got")
        (tmp_path / "foreign").write_bytes(content)
        check_refused(cache, tmp_path / "foreign", "expected a snapshot, got")


def test_load_into_donates_where_nothing_is_refused(saved):
    cache, data = saved
    damaged = bytes([*data[:-1], data[-1] ^ 1])
    assert snapshot.inspect(damaged).model_id == {"name": "tiny"}
    with pytest.raises(ValueError, match="checksum .* the snapshot is damaged"):
        snapshot.load(damaged, into=cache, donate=True)
    full = parse_cache(" ".join(f"{i}{{0}}" for i in range(12)))
    with pytest.raises(jaxkv.PlanRefusedError):
        snapshot.load(snapshot.save(full, sequences=[0]), into=full, sequences=[1], donate=True)
    assert not any(x.is_deleted() for x in jax.tree.leaves((cache, full)))
    kept = snapshot.load(snapshot.save(full, sequences=0), into=full, sequences=0, donate=True)
    assert full.buffers.k[0].is_deleted() and kept.num_used_cells() == 12


def test_save_is_read_by_safetensors(tmp_path):
    cache = randomize(parse_cache("0{0} 1{0} . 0{1}"))
    snapshot.save(cache, path=tmp_path / "cache")
    arrays = safetensors.numpy.load_file(tmp_path / "cache")
    assert arrays["table.position"].tolist() == [0, 1, 0]
    wanted = np.asarray(cache.buffers.v[1])[0].swapaxes(0, 1)[[0, 1, 3]]
    assert_identical(arrays["buffers.v.1"], wanted)


def make(**changes):
    sizes = {"layers": 2, "cells": 8, "kv_heads": 2, "head_dim": 4, "sequences": 2}
    return attention_cache(**{**sizes, **changes})


def recurrent(**changes):
    sizes = {"layers": 2, "states": edit_sequences.STATES, "sequences": 2}
    return recurrent_cache(**{**sizes, **changes})


def hybrid(layers=(0, 1), **changes):
    return compose_hybrid_cache((make(**changes), layers), (recurrent(), (2, 3)))


def test_load_compares_models_where_both_are_known():
    cache = make()
    data, unnamed = snapshot.save(cache, model_id=("a", 1)), snapshot.save(cache)
    for model in (None, ["a", 1], ("a", 1)):
        snapshot.load(data, model_id=model)
        snapshot.load(unnamed, into=cache, model_id=model)
    for load in (snapshot.load, lambda *args, **names: snapshot.load(*args, into=cache, **names)):
        with pytest.raises(ValueError, match="expected a snapshot of the model 'b', got one of"):
            load(data, model_id="b")
    for named in (partial(snapshot.save, cache), partial(snapshot.load, data)):
        with pytest.raises(TypeError, match="expected model_id that JSON holds"):
            named(model_id=object())


def test_inspect_reads_files_from_before_notes():
    data = snapshot.save(make(), model_id="old")
    with open_file(data) as file:
        said = {name: file.description[name] for name in ("cache", "sequences", "tokens", "model")}
        data = file_bytes(said, {name: file[name] for name in file.arrays})
    assert snapshot.inspect(data).notes is None and snapshot.inspect(data).model_id == "old"
    snapshot.load(data)


def test_load_of_states_without_first_positions_sets_them_to_0():
    cache = recurrent_cache(1, edit_sequences.STATES)
    data = snapshot.save(apply_batch(cache, [1, 2], positions=[5, 6]))
    assert jaxkv.seq_rm(snapshot.load(data), 0, 5).ok
    with open_file(data) as file:
        arrays = {name: file[name] for name in file.arrays if not name.endswith("first_position")}
        assert len(arrays) == len(file.arrays) - 1
        said = {name: value for name, value in file.description.items() if name != "arrays"}
    old = file_bytes(said, arrays)
    for loaded in (snapshot.load(old), snapshot.load(old, into=cache)):
        assert loaded.seq_pos_max(0) == 6
        assert not jaxkv.seq_rm(loaded, 0, 5).ok and jaxkv.seq_rm(loaded, 0).ok


def replace_values(data, changes):
    """A file with other arrays, or values at paths of its description, and correct checksums."""
    with open_file(data) as file:
        arrays = {name: file[name] for name in file.arrays}
    said = {name: value for name, value in file.description.items() if name != "arrays"}
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
    text = make(window=jaxkv.Window.sliding(3), rope=None, **sizes)
    states = recurrent(max_rollback=1, **sizes)
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
    cache = make()
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
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header["__metadata__"]
    text = change(metadata["description"])
    metadata |= {"description": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + data[end:]


def test_load_of_description_without_a_key_raises():
    cache = make()
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
    cache = make()
    data = snapshot.save(cache, model_id=0.25)
    for use in (snapshot.load, snapshot.inspect, partial(snapshot.load, into=cache)):
        with pytest.raises(ValueError, match="expected a snapshot that describes a cache, got"):
            use(
                rewrite_description(
                    data, lambda text: text.replace('"model": 0.25', f'"model": {new}')
                )
            )


def test_save_of_nested_notes_raises_or_is_loaded():
    cache, notes = make(), 0
    for _ in range(MAX_NESTING):
        notes = [notes]
    snapshot.load(data := snapshot.save(cache, notes=notes, model_id=notes))
    assert snapshot.inspect(data).notes == notes
    for deeper in ([notes], {"a": notes}, eval("[" * 99 + "]" * 99)):
        with pytest.raises(ValueError, match="expected notes with at most 64 levels of lists and"):
            snapshot.save(cache, notes=deeper)


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
    data = snapshot.save(make())

    def refused():
        for changes in ({"cells": 2**22}, {"sequences": 2**28, "streams": 2**27}):
            large = change_description(
                data, lambda said, new=changes: said | {"cache": said["cache"] | new}
            )
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
    cache = make(streams=2)
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


def load_into(cache, saved, **options):
    return snapshot.load(snapshot.save(saved), into=cache, **options)


def save(cache=None, **options):
    snapshot.save(make() if cache is None else cache, path="/nowhere/file", **options)


def make_deleted():
    return merge(hybrid().table, delete_copy(hybrid().buffers))


def on_a_mesh():
    table, buffers = split(make())
    return merge(table.with_sharding_rules(jaxkv.sharding.ShardingRules()), buffers)


@pytest.mark.parametrize(("call", "outcome"), mistakes("snapshots"))
def test_snapshot_bad_argument_raises(call, outcome):
    assert_raises(call, outcome, globals())


def test_load_of_64_bits_needs_x64():
    with jax.enable_x64(True):
        cache = make(dtype="float64")
        data = snapshot.save(cache)
        assert_identical(snapshot.load(data), cache)
    for use in (snapshot.load, partial(snapshot.load, into=make()), snapshot.inspect):
        with pytest.raises(ValueError, match="buffers.k.0 of float64 as saved, got a JAX without"):
            use(data)


def test_save_follows_links_and_leaves_devices(tmp_path):
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    link.symlink_to(target)
    for name in ("first", "second"):
        snapshot.save(make(), path=link, model_id=name)
        assert snapshot.inspect(target).model_id == name
    os.mkfifo(pipe)
    for use in (lambda path: snapshot.save(make(), path=path), snapshot.load, snapshot.inspect):
        for path in (pipe, tmp_path):
            with pytest.raises(OSError, match=f"expected the path of a file, got {path}, a folder"):
                use(path)
    assert link.is_symlink() and pipe.is_fifo() and len([*tmp_path.iterdir()]) == 3


def test_save_on_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    snapshot.save(make(), path=path, model_id="old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=f"expected to write {path}"):
            snapshot.save(make(), path=path, model_id="new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert snapshot.inspect(path).model_id == "old" and [*tmp_path.iterdir()] == [path]


KILLED = """
import os, signal, sys
import jaxkv
from jaxkv import snapshot
spec = jaxkv.CacheSpec.attention(layers=1, kv_heads=1, head_dim=2)
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
snapshot.save(jaxkv.make_cache(spec, cells=4), path=sys.argv[1])
"""


def test_save_removes_folders_of_killed_saves_and_no_others(tmp_path):
    path, old = tmp_path / "file", tmp_path / f".old{UNFINISHED}"
    snapshot.save(make(), path=path, model_id="old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    old.touch()  # as an earlier version left it
    (left,) = {*tmp_path.iterdir()} - {path, old}
    (inner,) = left.iterdir()
    assert snapshot.inspect(path).model_id == "old" and snapshot.inspect(inner).model_id is None
    lock = os.open(left, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a running save
    snapshot.save(make(), path=tmp_path / "other")
    assert inner.exists() and not old.exists()
    os.close(lock)
    snapshot.save(make(), path=tmp_path / "other")
    assert {*tmp_path.iterdir()} == {path, tmp_path / "other"}


@pytest.mark.parametrize("moment", [(safetensors.numpy, "save_file"), (os, "replace")])
def test_save_during_another_save_into_the_folder_removes_none_of_its_files(
    tmp_path, monkeypatch, moment
):
    """At each moment; safetensors itself writes a file and renames it."""
    real, left = getattr(*moment), [tmp_path / "second"]

    def interrupted(*args):
        while left:
            snapshot.save(make(), path=left.pop())
        return real(*args)

    monkeypatch.setattr(*moment, interrupted)
    snapshot.save(make(), path=tmp_path / "first")
    assert {*tmp_path.iterdir()} == {tmp_path / "first", tmp_path / "second"}


def test_save_whose_folder_is_removed_before_it_is_locked_makes_another(tmp_path, monkeypatch):
    real, other = file_module._lock, [tmp_path]

    def late(path, *, wait):
        while wait and other:
            file_module._remove_abandoned_files(other.pop())
        return real(path, wait=wait)

    monkeypatch.setattr(file_module, "_lock", late)
    snapshot.save(make(), path=tmp_path / "file")
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_save_takes_the_longest_name_of_a_file(tmp_path):
    path = tmp_path / ("n" * 255)
    snapshot.save(make(), path=path)
    assert [*tmp_path.iterdir()] == [path] and snapshot.load(path)


@pytest.mark.parametrize("ids", [["a", 1], [0.0], [True], [None]])
def test_load_of_saved_ids_that_are_no_integers_says_so(ids):
    sequences = {seq: i for i, seq in enumerate(ids)}
    with pytest.raises(TypeError, match="expected integers for saved sequence ids, got"):
        snapshot.load(snapshot.save(make()), into=make(), sequences=sequences)


def test_save_without_safetensors_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)  # marks it as missing
    with pytest.raises(ImportError, match="got none; pip install safetensors"):
        snapshot.save(make())
