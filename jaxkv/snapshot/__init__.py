"""Snapshots: a cache, or some of its sequences, in one file or in bytes, and back.

What is written are live cells alone: those that a saved sequence owns, with their keys, values or
states, their positions and the rotations that they are owed. A file describes itself, so `load`
needs nothing else; `load(into=cache)` puts saved sequences into free cells of another cache. A file
that is damaged, or does not fit, raises and changes nothing.

It needs the package safetensors: `pip install safetensors`. A cache that is split over a
mesh is saved by Orbax instead, see docs/snapshots.md.
"""

from jaxkv.snapshot.load import inspect, load
from jaxkv.snapshot.save import save

__all__ = ["inspect", "load", "save"]
