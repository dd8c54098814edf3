"""Functions of a cache: edits, maintenance, `apply`, and functions that models call."""
