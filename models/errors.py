"""The error of this package."""


class ModelError(Exception):
    """A model cannot be had or run as asked.

    The message is one sentence: what was wanted, what was found and what to do.
    """


def brief(error: Exception) -> str:
    """Returns what another library says as a part of a sentence: one line, 200 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
