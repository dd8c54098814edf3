"""The exception of this package."""


class ModelError(Exception):
    """Error for a model that cannot be loaded or run; the message also says how to fix it."""


def brief(error: Exception) -> str:
    """Return the first line of an exception's message, at most 200 characters."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    lines = text.strip().splitlines() or [type(error).__name__]
    return lines[0][:200].rstrip(".")
