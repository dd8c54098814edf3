"""Functions over any cache: edits, maintenance, `apply`, and functions that models call."""
