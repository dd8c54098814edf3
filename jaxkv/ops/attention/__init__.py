"""Softmax attention over pools of cells."""
