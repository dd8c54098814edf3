"""Prefix store, and the search for common prefixes of prompts."""
