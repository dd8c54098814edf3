"""Planners: a batch becomes ubatches with slots, or is refused with reasons."""
