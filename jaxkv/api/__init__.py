"""Functions over any cache: edits, queries, maintenance, `apply`, and what a model calls."""
