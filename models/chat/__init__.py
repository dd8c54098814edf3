"""Conversations with a model in one cache, independent of a terminal."""
