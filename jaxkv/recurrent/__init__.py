"""Recurrent cache: a table of positions and cells, and buffers that store states."""
