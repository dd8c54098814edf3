"""Files of gpt-oss: folders with MXFP4 weights."""

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxkv
import models
from jaxkv import make_batch
from models.checkpoints import mxfp4
from tests.models.tiny_files import DATA, config_at

PLAIN = load_file(DATA / "gpt_oss_mxfp4" / "model.safetensors")
NUMBERS = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float)
PACKED = sorted(name.removesuffix("_blocks") for name in PLAIN if name.endswith("_blocks"))


def numbers_of(block, scale):
    bits = [half for byte in block.tolist() for half in (byte & 15, byte >> 4)]
    return (NUMBERS[bits] * 2.0 ** (int(scale) - 127)).tolist()


def folder_of(path, tensors, **changes):
    path.mkdir(exist_ok=True)
    save_file(tensors, config_at(path, "gpt_oss_mxfp4", **changes) / "model.safetensors")
    return path


def test_unpack_matches_numbers_of_the_format():
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (2, 3, 4, 16), np.uint8)
    scales = random.integers(100, 150, (2, 3, 4), np.uint8)
    blocks[0, 0, 0], scales[0, 0, :2] = np.arange(16) * 17, (0, 252)
    wanted = [
        [sum(map(numbers_of, row, row_scales), []) for row, row_scales in zip(*one, strict=True)]
        for one in zip(blocks, scales, strict=True)
    ]
    found = mxfp4.unpack(blocks, scales)
    assert found.dtype == np.float32 and found.shape == (2, 3, 128)
    np.testing.assert_array_equal(found, np.float32(wanted))
    assert np.isnan(mxfp4.unpack(blocks[0, 0, :1], np.uint8([255]))).all()


def load_both(path):
    """The model of the folder with packed weights, and of a folder with the same numbers."""
    tensors = {name: x for name, x in PLAIN.items() if not name.endswith(mxfp4.ENDINGS)}
    for name in PACKED:
        values = mxfp4.unpack(PLAIN[f"{name}_blocks"], PLAIN[f"{name}_scales"])
        tensors[name] = np.ascontiguousarray(values.swapaxes(1, 2)).astype(ml_dtypes.bfloat16)
    unpacked = folder_of(path, tensors, quantization_config=None)
    return models.load(DATA / "gpt_oss_mxfp4"), models.load(unpacked)


def test_load_mxfp4_folder_equals_unpacked_folder(tmp_path):
    packed, unpacked = load_both(tmp_path)
    assert packed.config == unpacked.config
    jax.tree.map(np.testing.assert_array_equal, packed.params, unpacked.params)


@pytest.mark.nightly
def test_mxfp4_folder_gives_logits_of_unpacked_folder(tmp_path):
    batch, logits = make_batch(np.arange(24)), []
    for model in load_both(tmp_path):
        cache = model.make_cache(cells=32)
        logits.append(jaxkv.prefill(model.forward, model.params, cache, batch).logits)
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {"_scales": x["_scales"][:, 1:]}, "_scales of shape .* for .*_blocks of shape"),
        (lambda x: {"_scales": None}, "_scales of shape .*, got None"),
        (
            lambda x: {"_blocks": x["_blocks"].view(np.int8)},
            "expected bytes in .*_blocks, got int8",
        ),
    ],
    ids=["shape", "missing", "dtype"],
)
def test_load_mxfp4_folder_with_wrong_pair_raises(tmp_path, change, message):
    pair = {end: PLAIN[PACKED[0] + end] for end in mxfp4.ENDINGS}
    changed = {PACKED[0] + end: x for end, x in change(pair).items()}
    tensors = {name: x for name, x in (PLAIN | changed).items() if x is not None}
    with pytest.raises(models.ModelError, match=message):
        models.load(folder_of(tmp_path, tensors))
