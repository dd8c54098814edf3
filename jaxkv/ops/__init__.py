"""Computations on plain arrays, which know nothing of memories."""
