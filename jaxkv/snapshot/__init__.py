"""Snapshots: save a cache, or some of its sequences, to a file or bytes; load it.

A snapshot contains the live cells only: those owned by a saved sequence, with keys and values or
states, positions and pending shifts. It contains its own description; `load(into=cache)` writes
saved sequences into free cells of another cache. Loading a damaged file, or one that does not fit,
raises and leaves the cache unchanged.

Requires the package safetensors: `pip install safetensors`. Save a cache on a mesh with Orbax
instead, see docs/howto/snapshots.md.
"""

from jaxkv.snapshot.load import inspect, load
from jaxkv.snapshot.save import save

__all__ = ["inspect", "load", "save"]
