"""Notebooks: Python sources, and the same cells with their outputs in `.ipynb` files."""
