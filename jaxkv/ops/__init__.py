"""Computations on arrays, independent of caches."""

from jaxkv.ops import attention, scans

__all__ = ["attention", "scans"]
