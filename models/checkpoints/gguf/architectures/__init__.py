"""Architectures of GGUF files, one group a file."""
