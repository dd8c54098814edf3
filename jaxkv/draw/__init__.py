"""Views of cells as text and HTML, for `show` and for notebooks."""
