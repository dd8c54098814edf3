"""Folders with one setting or one tensor changed: the logits of transformers, or a refusal."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import jaxkv
import models
from tests.models import recorded_settings as recorded

FAMILIES = sorted(path.name.split(".")[0] for path in recorded.FOLDER.glob("*.gz"))
FAMILIES.remove("tensors")
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
DTYPES |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "I8": np.int8}
LIMIT = 2e-3
"""Largest relative difference; float32 and float64 in transformers differ by up to 9e-4."""

# Settings that were once read with other defaults, or by families whose class has none.
ONCE_WRONG = {
    "llama": ["partial_rotary_factor: 0.5", "original_max_position_embeddings: beside yarn"],
    "mamba2": ["rescale_prenorm_residual: true"],
    "mistral": ["attention_bias: true", "qkv_bias: true"],
    "olmo2": ["partial_rotary_factor: 0.5"],
    "qwen2": ["use_sliding_window: absent", "partial_rotary_factor: 0.5"],
    "qwen3": ["use_sliding_window: absent", "qkv_bias: true"],
    "t5": ['"dense_act_fn": "relu"'],
}
ONCE_WRONG_TENSORS = [
    "llama: biases of q, k, v",
    "files: transformers_weights",
    "idefics3: names of model.text_model, tied True",
    "llama: names of nothing, no head, tied",
    "llama: no model.norm.weight",
    "llama: tied False, no head",
    "llama: tied True, head",
    "t5: tied True, encoder.embed_tokens alone",
]


LOADED = {
    # Settings that only other operations of a class check.
    '"pad_token_id": 99',
    "mamba_chunk_size: null",
    # Folders whose names are unambiguous, although transformers does not find them.
    "files: index without metadata",
    "files: shards, no index",
    "files: model.fp16 alone",
    "files: consolidated alone",
    "files: another name alone",
    "llama: all names of language_model",
}
"""Folders that load although transformers raises, or fills tensors with random numbers."""


def logits_of(folder):
    """The projected logits of a folder, or the message of the error."""
    try:
        model = models.load(folder)
    except models.ModelError as error:
        return str(error)
    tokens = recorded.TOKENS if model.encoder is None else recorded.TARGET
    options = {} if model.encoder is None else {"source_cells": 64}
    cache = model.make_cache(cells=64, sequences=1, **options)
    if model.encoder is not None:
        source = jaxkv.make_batch(recorded.SOURCE)
        cache = jaxkv.encode(model.encoder, model.params, cache, source)[0]
    batch = jaxkv.make_batch(tokens, outputs=np.ones(len(tokens), bool))
    logits = jaxkv.prefill(model.forward, model.params, cache, batch).logits
    return recorded.project_logits(np.asarray(logits, np.float64))


def difference(case, files, folder, texts=None):
    """None if a folder gives the recorded logits; "refused", or a silent difference."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in ({"config.json": case.config} | (texts or {})).items():
        (folder / name).write_text(json.dumps(content))
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    found = logits_of(folder)
    jax.clear_caches()  # programs of one folder alone
    if isinstance(found, str):
        return None if case.logits is None else "refused"
    if case.logits is None:
        if case.name in LOADED or ": names of " in case.name:
            return None
        return case.name, "loaded, but transformers raises or fills a tensor with random numbers"
    error = np.abs(found - case.logits).max() / np.abs(case.logits).max()
    return None if error < LIMIT else (case.name, error)


def results_of(variants, folder):
    files = ({"model.safetensors": recorded.random_tensors(one.shapes)} for one in variants)
    return [difference(one, file, folder) for one, file in zip(variants, files, strict=True)]


@pytest.mark.core
@pytest.mark.parametrize("family", ONCE_WRONG)
def test_load_settings_once_wrong_give_logits_of_transformers(family, tmp_path):
    variants = [one for one in recorded.read(family) if one.name in ONCE_WRONG[family]]
    assert {one.name for one in variants} == set(ONCE_WRONG[family])
    assert set(results_of(variants, tmp_path / "folder")) <= {None, "refused"}


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_load_with_one_setting_changed_gives_logits_of_transformers(family, tmp_path):
    variants = recorded.read(family)
    assert len(variants) > 60
    found = results_of(variants, tmp_path / "folder")
    assert found.count("refused") < len(found) / 5
    assert set(found) <= {None, "refused"}


def files_of(case):
    return {
        file: {
            name: recorded.random_tensor(source, tuple(shape)).astype(DTYPES[kind])
            for name, (source, shape, kind) in tensors.items()
        }
        for file, tensors in case.files.items()
    }


@pytest.mark.core
def test_load_tensors_once_wrong_give_logits_of_transformers(tmp_path):
    cases = [one for one in recorded.read_tensors() if one.name in ONCE_WRONG_TENSORS]
    assert len(cases) == len(ONCE_WRONG_TENSORS)
    found = [difference(one, files_of(one), tmp_path / "folder", one.json) for one in cases]
    assert set(found) <= {None, "refused"}


@pytest.mark.nightly
def test_load_with_unusual_tensors_gives_logits_of_transformers(tmp_path):
    cases = recorded.read_tensors()
    found = [difference(one, files_of(one), tmp_path / "folder", one.json) for one in cases]
    assert set(found) <= {None, "refused"}
