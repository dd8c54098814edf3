"""Prompts that are computed once: a store of them, and what a prompt has in common with it."""
