"""The error of this package."""


class ModelError(Exception):
    """A model cannot be had or run as asked.

    The message is one sentence: what was wanted, what was found and what to do.
    """
