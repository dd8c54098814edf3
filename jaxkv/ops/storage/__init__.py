"""Forms in which keys and values are stored."""
