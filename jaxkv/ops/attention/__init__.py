"""Softmax attention over pools of cells."""

from jaxkv.ops.attention.api import Implementation, attention

__all__ = ["Implementation", "attention"]
