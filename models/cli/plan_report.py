"""Output of `models plan`."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from models.cli.screen import in_units, plural, put
from models.costs import Costs, whole_cells
from models.meshes import axes_of
from models.model import Model


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Results of `models plan`.

    model: model on the requested mesh, with shapes as params.
    costs: memory on the requested mesh.
    fitted: memory on a mesh that splits the heads; None if no head is replicated, or if no mesh
      splits the heads.
    advice: message if no mesh splits the heads; "" otherwise.
    room: bytes of memory of each device; None if unknown.
    here: whether `--room` is absent. If so, `room` is the memory of a local device, or None.
    length: number of tokens of each sequence, assumed for `most` and for the bytes of a sequence;
      None if `--length` and `--cells` are absent, and no layer has full attention.
    most: number of sequences that fit if each device has `room` bytes; None if `room` is None.
    """

    model: Model
    costs: Costs
    fitted: Costs | None
    advice: str
    room: int | None
    here: bool
    length: int | None
    most: int | None


def show(args: argparse.Namespace, answer: Answer) -> None:
    """Print the results of `models plan`."""
    if args.json:
        put(json.dumps(as_object(args, answer)) + "\n")
        return
    sections = [heading(args, answer), [str(answer.costs.layout)], list(parts(answer.costs))]
    if args.mesh:
        sections += [list(splits(answer.costs)), list(whole(answer.costs))]
    sections += [list(advice(answer)), list(fitting(answer))]
    put("\n\n".join("\n".join(lines) for lines in sections if lines) + "\n")


def heading(args: argparse.Namespace, answer: Answer) -> list[str]:
    """Return lines about the model and the cache."""
    cache = answer.costs.cache
    cells = "" if cache["cells"] is None else f" of {plural(cache['cells'], 'cell')}"
    streams = plural(cache["streams"], "stream") + cells
    name, count = answer.model.checkpoint.architecture, answer.model.size / 1e6
    stored = f", stored as {args.cache_dtype}" if args.cache_dtype else ""
    return [
        f"{name}, {count:,.1f}M weights in {args.dtype}",
        f"{plural(cache['sequences'], 'sequence')} in {streams}{stored}",
    ]


def parts(costs: Costs) -> Iterator[str]:
    """Yield lines about the cache of each kind of layer."""
    yield f"{'cache of':<20}{'layers':>6}{'bytes':>25}{'bytes on a device':>21}"
    for part in costs.parts:
        each = f"{part.each:,} a {part.unit}" + ("" if part.kept is None else f" of {part.kept:,}")
        yield f"{part.kind:<20}{part.layers:>6}{each:>25}{part.on_device:>21,}"


def splits(costs: Costs) -> Iterator[str]:
    """Yield lines about the arrays that each mesh axis splits."""
    yield "arrays that the mesh splits"
    for axis, names in costs.splits.items():
        yield f"{f'{axis}={costs.mesh[axis]}':<16}{', '.join(names) or 'nothing'}"


def whole(costs: Costs) -> Iterator[str]:
    """Yield a heading and lines with the bytes of replicated params, by reason for replication."""
    yield "weights that the mesh does not split"
    for reason, size in costs.whole.items():
        yield f"{size:>16,} bytes: {reason}"


def advice(answer: Answer) -> Iterator[str]:
    """Yield lines about a mesh that splits replicated heads, or why there is none."""
    if answer.fitted is not None:
        layout = answer.fitted.layout
        yield f"for these heads give --mesh {axes_of(answer.fitted.mesh)}; on each device:"
        yield (
            f"weights {in_units(layout.params)}, buffers {in_units(layout.buffers)}, in all "
            f"{in_units(layout.total)}, sent in a step {in_units(layout.sent)}"
        )
    elif answer.advice:
        yield answer.advice


def fitting(answer: Answer) -> Iterator[str]:
    """Yield lines about a sequence's bytes in the cache and the number of sequences that fit."""
    each = answer.costs.a_sequence(answer.length)
    length = "" if answer.length is None else f" of {plural(answer.length, 'token')}"
    together = ", on all devices together" if answer.costs.layout.devices > 1 else ""
    yield f"a sequence{length} takes {in_units(each)}{together}"
    if answer.most is not None:
        where = ", the memory of this device" if answer.here else " on each device"
        yield f"{plural(answer.most, 'sequence')}{length} fit into {in_units(answer.room)}{where}"


def too_large(answer: Answer) -> str:
    """Return the message for a model that needs more memory than `--room`."""
    layout, room = answer.costs.layout, answer.room
    head = f"{in_units(layout.total)} on each device are more than --room {in_units(room)}; "
    if answer.fitted is not None and answer.fitted.layout.total <= room:
        return f"{head}give --mesh {axes_of(answer.fitted.mesh)}."
    more = "or more devices to tensor or cells"
    if layout.params > room:
        return f"{head}the weights alone exceed it: give more devices to tensor or cells."
    if not answer.most:
        return f"{head}give fewer --cells, {more}."
    if answer.length is None:
        return f"{head}give --sequences {answer.most}, {more}."
    tokens = answer.most // answer.costs.cache["streams"] * answer.length
    cells = whole_cells(answer.model, tokens)
    return f"{head}give --sequences {answer.most} --cells {cells}, {more}."


def as_object(args: argparse.Namespace, answer: Answer) -> dict[str, Any]:
    """Return the results of `models plan` as JSON values."""
    return {
        "model": args.model,
        "architecture": answer.model.checkpoint.architecture,
        "weights": answer.model.size,
        "dtype": args.dtype,
        "cache_dtype": args.cache_dtype or args.dtype,
        **costs_object(answer.costs),
        "fitted": answer.fitted and costs_object(answer.fitted),
        "advice": answer.advice,
        "sequence": {"length": answer.length, "bytes": answer.costs.a_sequence(answer.length)},
        "fits": answer.room
        and {
            "room": answer.room,
            "here": answer.here,
            "length": answer.length,
            "sequences": answer.most,
        },
    }


def costs_object(costs: Costs) -> dict[str, Any]:
    """Return costs as JSON values, including the total for each device."""
    found = asdict(costs)
    found["layout"]["total"] = costs.layout.total
    return found
