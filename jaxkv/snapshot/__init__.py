"""Snapshots: save a cache, or some of its sequences, to a file or bytes, and load a snapshot.

A snapshot describes its cache and contains the cells of the saved sequences: keys and values or
states, positions and pending shifts. `load` makes a new cache; `load(into=cache)` writes the saved
sequences into free cells of `cache`. If a file is damaged or does not fit, `load` raises and
`cache` is unchanged.

Snapshots require the package safetensors: `pip install safetensors`. A cache on a mesh is saved
with Orbax instead, see docs/howto/snapshots.md.
"""

from jaxkv.snapshot.load import inspect, load
from jaxkv.snapshot.save import save

__all__ = ["inspect", "load", "save"]
