"""Sampling options from arguments."""

import argparse
from typing import Any

from models.cli.arguments import SAMPLING
from models.cli.screen import note


def read_sampling(args: argparse.Namespace, *, beams: bool = False) -> tuple[dict[str, Any], int]:
    """Return the options of `make_sampler` (empty for greedy sampling) and the seed.

    At temperature 0, sampling options have no effect, and a note names the options that are given.
    The note gives `--beams` as the reason if `beams` is True, otherwise the temperature.
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
