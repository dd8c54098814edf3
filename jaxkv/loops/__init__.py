"""Loops that run a model over a memory."""
