"""Computations on plain arrays, which know nothing of memories."""

from jaxkv.ops import attention, scans

__all__ = ["attention", "scans"]
