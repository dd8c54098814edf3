"""Weights and configs from files, in one form for all formats."""
