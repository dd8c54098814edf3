"""Files of snapshots: damaged, foreign, of another cache; each raises one sentence, in bounded
memory.

Random damage is always detected, since a checksum covers the whole file.
"""

import fcntl
import os
import random
import resource
import signal
import subprocess
import sys
import tracemalloc
from functools import partial
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
from jaxkv.snapshot.file import MAX_NESTING, UNFINISHED, file_bytes
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
from tests.helpers.steps import apply_batch
from tests.snapshot.saved import (
    change_metadata,
    damage,
    make_recurrent,
    make_small,
    parts_of_file,
    randomize,
)

pytestmark = pytest.mark.core
ROOT = Path(__file__).parents[2]

OVERHEAD = 200_000
"""Bytes that reading may need in addition to the file: its parsed header, and messages."""
SEEDS = [range(10), range(10, 100), range(1000, 2000)]


@pytest.fixture(scope="module")
def saved():
    """A cache of bfloat16 with 600 kB of used cells, and its file."""
    sizes = dict(cells=64, dtype=jnp.bfloat16, sequences=2)
    cache = attention_cache(layers=3, kv_heads=8, head_dim=128, **sizes)
    cache = randomize(apply_batch(cache, [[1] * 30, [2] * 20]))
    return cache, snapshot.save(cache, tokens={0: [1] * 30}, model_id={"name": "tiny"})


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


def make_hybrid(layers=(0, 1), **changes):
    return compose_hybrid_cache((make_small(**changes), layers), (make_recurrent(), (2, 3)))


def test_load_compares_models_where_both_are_known():
    cache = make_small()
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
    data = snapshot.save(make_small(), model_id="old")
    said, arrays = parts_of_file(data)
    said = {name: said[name] for name in ("cache", "sequences", "tokens", "model")}
    data = file_bytes(said, arrays)
    assert snapshot.inspect(data).notes is None and snapshot.inspect(data).model_id == "old"
    snapshot.load(data)


def test_load_of_states_without_first_positions_sets_them_to_0():
    cache = recurrent_cache(1, edit_sequences.STATES)
    data = snapshot.save(apply_batch(cache, [1, 2], positions=[5, 6]))
    assert jaxkv.seq_rm(snapshot.load(data), 0, 5).ok
    said, arrays = parts_of_file(data)
    (name,) = [name for name in arrays if name.endswith("first_position")]
    del arrays[name]
    old = file_bytes(said, arrays)
    for loaded in (snapshot.load(old), snapshot.load(old, into=cache)):
        assert loaded.seq_pos_max(0) == 6
        assert not jaxkv.seq_rm(loaded, 0, 5).ok and jaxkv.seq_rm(loaded, 0).ok


def test_save_of_nested_notes_raises_or_is_loaded():
    cache, notes = make_small(), 0
    for _ in range(MAX_NESTING):
        notes = [notes]
    snapshot.load(data := snapshot.save(cache, notes=notes, model_id=notes))
    assert snapshot.inspect(data).notes == notes
    for deeper in ([notes], {"a": notes}, eval("[" * 99 + "]" * 99)):
        with pytest.raises(ValueError, match="expected notes with at most 64 levels of lists and"):
            snapshot.save(cache, notes=deeper)


def load_into(cache, saved, **options):
    return snapshot.load(snapshot.save(saved), into=cache, **options)


def save(cache=None, **options):
    snapshot.save(make_small() if cache is None else cache, path="/nowhere/file", **options)


def make_deleted():
    return merge(make_hybrid().table, delete_copy(make_hybrid().buffers))


def on_a_mesh():
    table, buffers = split(make_small())
    return merge(table.with_sharding_rules(jaxkv.sharding.ShardingRules()), buffers)


@pytest.mark.parametrize(("call", "outcome"), mistakes("snapshots"))
def test_snapshot_bad_argument_raises(call, outcome):  # trap 77
    assert_raises(call, outcome, globals())


def test_load_of_64_bits_needs_x64():
    with jax.enable_x64(True):
        cache = make_small(dtype="float64")
        data = snapshot.save(cache)
        assert_identical(snapshot.load(data), cache)
    for use in (snapshot.load, partial(snapshot.load, into=make_small()), snapshot.inspect):
        with pytest.raises(ValueError, match="buffers.k.0 of float64 as saved, got a JAX without"):
            use(data)


def test_save_follows_links_and_leaves_devices(tmp_path):
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    link.symlink_to(target)
    for name in ("first", "second"):
        snapshot.save(make_small(), path=link, model_id=name)
        assert snapshot.inspect(target).model_id == name
    os.mkfifo(pipe)
    for use in (
        lambda path: snapshot.save(make_small(), path=path),
        snapshot.load,
        snapshot.inspect,
    ):
        for path in (pipe, tmp_path):
            with pytest.raises(OSError, match=f"expected the path of a file, got {path}, a folder"):
                use(path)
    assert link.is_symlink() and pipe.is_fifo() and len([*tmp_path.iterdir()]) == 3


def test_save_on_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    snapshot.save(make_small(), path=path, model_id="old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match=f"expected to write {path}"):
            snapshot.save(make_small(), path=path, model_id="new")
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
    snapshot.save(make_small(), path=path, model_id="old")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    old.touch()  # as an earlier version left it
    (left,) = {*tmp_path.iterdir()} - {path, old}
    (inner,) = left.iterdir()
    assert snapshot.inspect(path).model_id == "old" and snapshot.inspect(inner).model_id is None
    lock = os.open(left, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a running save
    snapshot.save(make_small(), path=tmp_path / "other")
    assert inner.exists() and not old.exists()
    os.close(lock)
    snapshot.save(make_small(), path=tmp_path / "other")
    assert {*tmp_path.iterdir()} == {path, tmp_path / "other"}


@pytest.mark.parametrize("moment", [(safetensors.numpy, "save_file"), (os, "replace")])
def test_save_during_another_save_into_the_folder_removes_none_of_its_files(
    tmp_path, monkeypatch, moment
):
    """At each moment; safetensors itself writes a file and renames it."""
    real, left = getattr(*moment), [tmp_path / "second"]

    def interrupted(*args):
        while left:
            snapshot.save(make_small(), path=left.pop())
        return real(*args)

    monkeypatch.setattr(*moment, interrupted)
    snapshot.save(make_small(), path=tmp_path / "first")
    assert {*tmp_path.iterdir()} == {tmp_path / "first", tmp_path / "second"}


def test_save_whose_folder_is_removed_before_it_is_locked_makes_another(tmp_path, monkeypatch):
    real, other = file_module._lock, [tmp_path]

    def late(path, *, wait):
        while wait and other:
            file_module._remove_abandoned_files(other.pop())
        return real(path, wait=wait)

    monkeypatch.setattr(file_module, "_lock", late)
    snapshot.save(make_small(), path=tmp_path / "file")
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_save_takes_the_longest_name_of_a_file(tmp_path):
    path = tmp_path / ("n" * 255)
    snapshot.save(make_small(), path=path)
    assert [*tmp_path.iterdir()] == [path] and snapshot.load(path)


@pytest.mark.parametrize("ids", [["a", 1], [0.0], [True], [None]])
def test_load_of_saved_ids_that_are_no_integers_says_so(ids):
    sequences = {seq: i for i, seq in enumerate(ids)}
    with pytest.raises(TypeError, match="expected integers for saved sequence ids, got"):
        snapshot.load(snapshot.save(make_small()), into=make_small(), sequences=sequences)


def test_save_without_safetensors_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)  # marks it as missing
    with pytest.raises(ImportError, match="got none; pip install safetensors"):
        snapshot.save(make_small())
