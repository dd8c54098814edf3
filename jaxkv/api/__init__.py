"""Functions over any cache: edits, queries, maintenance, `apply`, and functions that models call."""
