"""Small caches to save, random numbers in them, and randomly damaged files."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.cache import merge
from jaxkv.snapshot.file import open_file
from tests.helpers.caches import attention_cache, recurrent_cache
from tests.helpers.edit_sequences import STATES


def change_metadata(data, change):
    """A file with other metadata, which `change` writes into a dict."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


def parts_of_file(data):
    """The description of a snapshot and its arrays, for `file_bytes`."""
    with open_file(data) as file:
        said = {name: value for name, value in file.description.items() if name != "arrays"}
        return said, {name: file[name] for name in file.arrays}


def damage(data, rng, stop):
    """Bytes with something before `stop` overwritten or removed, or the end cut off."""
    data, at = bytearray(data), rng.randrange(stop)
    match rng.randrange(8):
        case 0:
            del data[at:]
        case 1:
            del data[at : at + rng.randrange(1, 9)]
        case 2:
            data[at : at + 8] = rng.choice([2**64 - 1, 2**62, 2**31, 0, 5]).to_bytes(8, "little")
        case 3:
            data[at : at + 4] = rng.choice([2**32 - 1, 2**31, 0, 9]).to_bytes(4, "little")
        case _:
            data[at] = rng.randrange(256)
    return bytes(data)


def randomize(cache, seed=0):
    """A cache with random numbers in every cell of all layers."""

    def draw(x):
        return jnp.asarray(rng.normal(size=x.shape), x.dtype)

    rng = np.random.default_rng(seed)
    return merge(cache.table, jax.tree.map(draw, cache.buffers))


def make_small(**changes):
    sizes = {"layers": 2, "cells": 8, "kv_heads": 2, "head_dim": 4, "sequences": 2}
    return attention_cache(**{**sizes, **changes})


def make_recurrent(**changes):
    sizes = {"layers": 2, "states": STATES, "sequences": 2}
    return recurrent_cache(**{**sizes, **changes})
