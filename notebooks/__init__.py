"""Notebooks: sources in Python, and beside each the same cells with what they show."""
