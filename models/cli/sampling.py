"""Sampling options from arguments."""

import argparse
from typing import Any

from models.cli.arguments import SAMPLING
from models.cli.screen import note


def read_sampling(args: argparse.Namespace, *, beams: bool = False) -> tuple[dict[str, Any], int]:
    """Return the options of `make_sampler` (empty for greedy sampling) and the seed.

    If the temperature is 0, prints the names of the given options, which then have no effect. The
    argument `beams` is True if the message shall name beam search as the reason.
    """
    choices = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    options = SAMPLING | choices
    seed = options.pop("seed")
    if args.temperature:
        return {"temperature": args.temperature, **options}, seed
    if choices:
        names = ", ".join("--" + name.replace("_", "-") for name in choices)
        where = "with --beams" if beams else f"at temperature 0: {WARMER}"
        note(f"note: {names} has no effect {where}")
    return {}, seed


WARMER = "give --temperature 0.8 or so"
"""Advice for different texts."""
