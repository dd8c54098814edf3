"""Conversations with a model in one cache, apart from any terminal."""
