"""Recurrent cache: a table of states, and buffers of their numbers."""
