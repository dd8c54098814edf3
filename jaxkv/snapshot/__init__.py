"""Snapshots: save a cache, or some of its sequences, to a file or bytes, and load a snapshot.

A snapshot describes its cache and contains the cells of the saved sequences: keys and values or
states, positions and pending shifts. The function `load` makes a new cache, or writes the saved
sequences into free cells of an existing cache. If a file is damaged or does not fit, the function
`load` raises and the existing cache is unchanged.

Snapshots require the package safetensors: `pip install safetensors`. A cache on a mesh is saved
with Orbax instead, see docs/howto/snapshots.md.
"""

from jaxkv.snapshot.load import inspect, load
from jaxkv.snapshot.save import save

__all__ = ["inspect", "load", "save"]
