"""Computations on plain arrays, which know nothing of caches."""

from jaxkv.ops import attention, scans

__all__ = ["attention", "scans"]
