"""Weights, configs and tokenizers from files, in one form for all file formats."""
