"""Output: texts on stdout, notes and progress bars on stderr."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from time import perf_counter

from tqdm import tqdm

from models.compiling import Progress


class Screen:
    """Print texts one below the other.

    The first unfinished text is printed as it grows; later texts wait until it is finished.
    """

    def __init__(self, prompts: Sequence[str], *, chat: bool):
        heads = [heading(prompts, i, chat=chat) for i in range(len(prompts))]
        self.waiting = ["\n" * (i > 0) + head for i, head in enumerate(heads)]
        self.ended = [False] * len(prompts)
        self.live = 0

    def __call__(self, index: int, piece: str, done: bool) -> None:
        """Add a piece of a text; `done` is True for the last piece."""
        self.waiting[index] += piece + "\n" * done
        self.ended[index] = done
        while self.live < len(self.ended):
            put(self.waiting[self.live])
            self.waiting[self.live] = ""
            if not self.ended[self.live]:
                break
            self.live += 1
        sys.stdout.flush()


def heading(prompts: Sequence[str], index: int, *, chat: bool) -> str:
    """Return the heading of a text: the prompt, after the text's number if there are several.

    The heading of a single chat answer is empty. In a terminal, the prompt is dimmed, unless the
    environment variable NO_COLOR is set.
    """
    prompt, several = prompts[index], len(prompts) > 1
    if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
        prompt = f"\x1b[2m{prompt}\x1b[22m"
    if not several:
        return "" if chat else prompt
    return f"=== {index + 1} of {len(prompts)}\n{prompt}" + "\n" * chat


def put(text: str, *, flush: bool = False) -> None:
    """Write to stdout, with "?" for each character that the encoding of stdout lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    if flush:
        sys.stdout.flush()


def plain(text: str) -> str:
    r"""Remove control characters, which could move a terminal's cursor.

    >>> plain("a\tb\n\x1b[2J\x9b1m")
    'a\tb\n[2J1m'
    """
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c < "\xa0"))


def brief(text: str) -> str:
    """Return a message as one line, shortened to 60 characters."""
    line = plain(" ".join(text.split()))
    return line if len(line) <= 60 else line[:57] + "..."


def note(line: str) -> None:
    """Print a line to stderr, without control characters."""
    print(plain(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Progress]:
    """Show a progress bar, if stderr is a terminal; the bar disappears at the end."""
    bar = None

    def update(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:  # made late, so that a missing model prints one line and no bar
            bar = tqdm(
                total=total,
                desc=label,
                leave=False,
                disable=not sys.stderr.isatty(),
                bar_format="{desc} {bar:30} {n_fmt} of {total_fmt}, {elapsed}",
            )
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()


@contextlib.contextmanager
def compiling() -> Iterator[Progress]:
    """Print the progress of compilation, which begins at 0, and its time at the end, to stderr."""
    began = perf_counter()
    with progress("compiling") as show:

        def update(done: int, total: int) -> None:
            if done == 0 and not sys.stderr.isatty():
                note(f"compiling {plural(total, 'program')} ...")
            show(done, total)
            if done == total:
                note(f"compiled {plural(total, 'program')} in {perf_counter() - began:.1f} s")

        yield update


def plural(count: int, noun: str) -> str:
    """Format a number and a noun, in the plural if necessary."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def in_units(count: int) -> str:
    """Format a number of bytes in units of 1,000.

    >>> in_units(512), in_units(16_000_000_000), in_units(17_640_734_720)
    ('512 bytes', '16 GB', '17.6 GB')
    """
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if count >= 10**power:
            return f"{count / 10**power:.1f}".removesuffix(".0") + f" {unit}"
    return plural(count, "byte")


def megabytes(count: int) -> str:
    """Format a number of bytes in MB."""
    return f"{count / 1e6:.1f} MB"
