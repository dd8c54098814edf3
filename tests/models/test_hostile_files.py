"""Damaged or malicious files: a `ModelError` of one line, or a model that can be traced.

Tracing is quick and its cache small. Random changes depend on the seed only.
"""

import copy
import json
import random
import resource
from collections import Counter

import gguf
import jax
import pytest

import jaxkv
import models
from tests.helpers.parametrize import mark_cases
from tests.models.tiny_files import (
    DATA,
    FIELDS,
    VOCAB,
    parts_of_gguf,
    tiny_tensors,
    write_folder,
    write_gguf,
    write_tensors,
)
from tests.snapshot.saved import damage

FOLDERS = sorted(path.parent for path in DATA.glob("*/config.json"))
RECORDED = sorted((DATA / "gguf").glob("*.gguf"))
TENSORS = {name: x for name, x in tiny_tensors().items() if not name.endswith(".bias")}
VALUES, ADDED = json.loads((DATA / "hostile_values.json").read_text())
"""Values that are put anywhere, and those that are added to a config."""

METADATA = {f"llama.{key}": value for key, value in FIELDS.items()} | {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", *map(str, range(VOCAB - 4))],
    "tokenizer.ggml.token_type": [3] + [1] * (VOCAB - 1),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 0,
}
SENTENCEPIECE = METADATA | {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab", *(f"<0x{i:02X}>" for i in range(256))],
    "tokenizer.ggml.token_type": [2] + [1] * 3 + [6] * 256,
    "tokenizer.ggml.scores": [-1.0] * 260,
}
TOKENIZER = {key: value for key, value in METADATA.items() if key.startswith("tokenizer")}
GROWTH = 2**31
SEEDS = [(range(8), False), (range(8, 60), False), (range(60, 360), True)]
LANES = mark_cases(SEEDS, fast=SEEDS[:1], core=SEEDS[1:2])
"""Bound of the process's growth in bytes for a case; arrays of bad sizes took 3 GB."""


def mutate(values, rng, added=None):
    """A tree of dicts and lists with one to three of its values changed, at any depth."""
    values = copy.deepcopy(values)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if added and rng.random() < 0.3:
            key = rng.choice(sorted(added))
            values[key] = copy.deepcopy(rng.choice(added[key]))
            continue
        at = values
        while True:
            key = rng.choice(sorted(at)) if isinstance(at, dict) else rng.randrange(len(at))
            if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.5:
                break
            at = at[key]
        if rng.random() < 0.15 and len(at) > 1:
            del at[key]
        elif type(at[key]) is int and rng.random() < 0.4:
            at[key] += rng.choice([-1, 1])
        else:
            at[key] = copy.deepcopy(rng.choice(VALUES))
    return values


def load_outcome(path, deep):
    """Return "model" or "refused"; other exceptions are raised."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        model = models.load(path)
        if deep:
            cache = model.make_cache(cells=16, ubatch_size=4, max_rollback=1)
            plan = jaxkv.init_batch(cache, jaxkv.make_batch([1, 2])).check()
            step = jax.eval_shape(jaxkv.apply, cache, plan.ubatches[0])
            jax.eval_shape(model.forward, model.params, step)
        assert model.stop_tokens is not None
        if path.suffix == ".gguf":
            model.tokenizer.prompt("a")
        found = "model"
    except models.ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        found = "refused"
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown < GROWTH, f"{grown} bytes more"
    return found


def config_case(here, rng):
    folder = rng.choice(FOLDERS)
    config = mutate(json.loads((folder / "config.json").read_text()), rng, ADDED)
    (here / "model.safetensors").symlink_to(folder / "model.safetensors")
    (here / "config.json").write_text(json.dumps(config))
    return here


def metadata_case(here, rng):
    metadata = mutate(rng.choice([METADATA, SENTENCEPIECE]), rng)
    return write_gguf(here / "tiny.gguf", TENSORS, fields=metadata, base={})


def recorded_case(here, rng):
    arch, metadata, tensors = parts_of_gguf(rng.choice(RECORDED))
    metadata = mutate(metadata, rng) | TOKENIZER
    return write_tensors(here / "tiny.gguf", arch, metadata, rng.sample(tensors, len(tensors)))


def gguf_case(here, rng):
    metadata = rng.choice([METADATA, SENTENCEPIECE])
    path = write_gguf(here / "tiny.gguf", TENSORS, fields=metadata)
    path.write_bytes(damage(path.read_bytes(), rng, gguf.GGUFReader(path).data_offset))
    return path


def safetensors_case(here, rng):
    path = write_folder(here, TENSORS) / "model.safetensors"
    data = path.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.5:
        data = damage(data, rng, stop)
    else:
        header = json.dumps(mutate(json.loads(data[8:stop]), rng)).encode()
        data = len(header).to_bytes(8, "little") + header + data[stop:]
    path.write_bytes(data)
    return here


def test_load_of_untouched_files_is_a_model(tmp_path):
    for metadata in (METADATA, SENTENCEPIECE):
        path = write_gguf(tmp_path / "tiny.gguf", TENSORS, fields=metadata)
        assert load_outcome(path, True) == "model"
    assert load_outcome(write_folder(tmp_path / "folder", TENSORS), True) == "model"


@pytest.mark.parametrize(("seeds", "deep"), LANES, ids=str)
@pytest.mark.parametrize(
    "case", [config_case, metadata_case, recorded_case, gguf_case, safetensors_case]
)
def test_load_of_damaged_file_is_a_sentence_or_a_model(case, seeds, deep, tmp_path):
    found = Counter()
    for seed in seeds:
        here = tmp_path / str(seed)
        here.mkdir()
        try:
            found[load_outcome(case(here, random.Random(seed)), deep)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert found["refused"] > len(seeds) / 4, found
