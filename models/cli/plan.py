"""The command `plan`: memory that a model and its cache need on each device of a mesh."""

import argparse
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from models.cli.arguments import InputError
from models.cli.plan_report import Answer, show, too_large
from models.costs import Costs, abstract_mesh, costs_of, costs_on_fitted_mesh, most_sequences
from models.families.caches import attending
from models.meshes import RULES
from models.model import Model, load_shapes, on_mesh
from models.room import limits


def run(args: argparse.Namespace, check_interrupt: Callable[[], None]) -> int:
    """Run the command `plan`.

    Raises `InputError` if the sizes cannot be divided among the devices. If a device needs more
    memory than `--room`, `InputError` is raised after the results are printed.
    """
    options = {"cache_dtype": args.cache_dtype, "rotate": args.rotate}
    model = load_shapes(args.model, dtype=jnp.dtype(args.dtype), **options)
    model = on_mesh(model, abstract_mesh(args.mesh or {"data": 1}), RULES)
    sizes = read_sizes(args, model)
    costs = with_input_error(costs_of, model, **sizes)
    check_interrupt()
    fitted, advice = advise(model, costs, sizes)
    length = args.length
    if length is None and sizes["cells"] is not None:
        length = max(sizes["cells"] * sizes["streams"] // sizes["sequences"], 1)
    room = args.room
    if room is None and args.mesh is None:
        room = min(limits(1), default=None)
    shared = {name: sizes[name] for name in ("streams", "ubatch_size")}
    answer = Answer(
        model=model,
        costs=costs,
        fitted=fitted,
        advice=advice,
        room=room,
        here=args.room is None,
        length=length,
        most=room and with_input_error(most_sequences, model, room=room, length=length, **shared),
    )
    show(args, answer)
    if args.room and costs.layout.total > args.room:
        raise InputError(too_large(answer))
    return 0


def read_sizes(args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Return the sizes of the cache, from the options of the command or their defaults."""
    streams = args.streams or (args.mesh or {}).get("data", 1)
    sequences = args.sequences or streams
    if sequences % streams:
        enough = -(-sequences // streams) * streams
        raise InputError(
            f"{sequences} sequences cannot be divided evenly among {streams} streams; give "
            f"--sequences {enough}, or other --streams."
        )
    cells, layers = args.cells, model.family.layers_of(model.config, model.dtype)
    if cells is None and any(layer.window is None for layer in attending(layers)):
        longest = model.checkpoint.config.get("max_position_embeddings")
        if longest is None:
            raise InputError("the config has no max_position_embeddings; give --cells.")
        cells = longest * (sequences // streams)
    sizes = {"sequences": sequences, "streams": streams, "ubatch_size": args.ubatch_size}
    return {"cells": cells, **sizes}


def with_input_error(ask: Callable[..., Any], *args: Any, **sizes: Any) -> Any:
    """Call a function, and raise `InputError` in place of a ValueError."""
    try:
        return ask(*args, **sizes)
    except ValueError as error:
        raise InputError(f"{error}.") from None


def advise(model: Model, costs: Costs, sizes: dict[str, Any]) -> tuple[Costs | None, str]:
    """Return the costs on a mesh that splits all heads, and advice.

    If the current mesh does not replicate heads, returns None and "". If no mesh that splits the
    heads is found, returns None and a message.
    """
    if not any("kv_heads" in line for line in costs.layout.whole):
        return None, ""
    try:
        fitted = costs_on_fitted_mesh(model, **sizes)
    except ValueError as error:
        return None, f"no mesh fits the heads: {error}"
    return fitted, "" if fitted else "an axis named cells can split the cells of a single head"
