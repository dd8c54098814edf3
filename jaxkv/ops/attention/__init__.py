"""Softmax attention over pools of cells."""

from jaxkv.ops.attention.dispatch import Implementation, attention

__all__ = ["Implementation", "attention"]
