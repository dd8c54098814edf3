"""Snapshots: save a cache, or some of its sequences, to a file or bytes, and load a snapshot.

Snapshots require `pip install safetensors`. For a cache on a mesh, see docs/howto/snapshots.md.
"""

from jaxkv.snapshot.load import inspect, load
from jaxkv.snapshot.save import save

__all__ = ["inspect", "load", "save"]
