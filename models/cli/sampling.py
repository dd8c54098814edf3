"""How tokens are drawn, as the arguments say it."""

import argparse
from typing import Any

from models.cli.arguments import SAMPLING
from models.cli.screen import note


def read_sampling(args: argparse.Namespace, *, beams: bool = False) -> tuple[dict[str, Any], int]:
    """Return the options of a sampler, none where the best token is taken, and the seed.

    Args:
      args: with the options of `add_sampling`.
      beams: whether beams are searched for, which draw nothing.
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
"""What to do where texts should differ."""
