"""Attention cache: a table of cells, and buffers of keys and values."""
