"""Conversations with a model in one memory, apart from any terminal."""
