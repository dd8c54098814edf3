"""Prefix cache: a store of prompts, and the search for common prefixes."""
