"""The command `inspect`: describe a snapshot or a checkpoint without reading arrays."""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxkv import snapshot
from models.chat.saved import conversations_in, fingerprint_text, kept_tokens
from models.cli.arguments import InputError
from models.cli.screen import brief, in_units, plain, plural, put
from models.costs import abstract_mesh, costs_of, kind_of
from models.errors import ModelError, NoTokenizerError, first_line
from models.meshes import RULES
from models.model import load_shapes, on_mesh, tensor_problems


def run(args: argparse.Namespace, check_interrupt: Callable[[], None]) -> int:
    """Run the command `inspect`.

    Raises `InputError` if the file is missing, damaged or of an unknown format, and `ModelError` if
    a checkpoint cannot be run.
    """
    path = Path(os.path.expanduser(args.file))
    try:
        checkpoint = is_checkpoint(path)
        found = describe_checkpoint(path) if checkpoint else describe_snapshot(path)
    except OSError as error:
        raise InputError(
            f"{args.file} cannot be read: {error.strerror or error}; give a snapshot, a .gguf "
            "file, or a folder with config.json."
        ) from error
    check_interrupt()
    if args.json:
        put(json.dumps(found) + "\n")
    else:
        lines = format_checkpoint(found) if checkpoint else format_snapshot(found)
        put("\n".join(map(plain, lines)) + "\n")
    return 0


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is the path of a checkpoint, possibly a damaged one."""
    if path.is_dir() or path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def describe_snapshot(path: Path) -> dict[str, Any]:
    """Return the description of a snapshot.

    Raises `InputError` if the file is damaged, or is not a snapshot.
    """
    try:
        info = snapshot.inspect(path)
        chats = conversations_in(info)
        kept = kept_tokens(info) if chats else {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be inspected: {first_line(error)}.") from error
    by_sequence = {
        chat.sequence: {
            "conversation": name,
            "turns": len(chat.turns),
            "last": chat.turns[-1].message if chat.turns else None,
        }
        for name, chat in chats.items()
    }
    parts = info.cache.parts
    entries = []
    for i, part in enumerate(parts):
        prefix = "buffers." if len(parts) == 1 else f"buffers.{i}."
        saved = [array for name, array in info.arrays.items() if name.startswith(prefix)]
        num_bytes = sum(math.prod(shape) * jnp.dtype(dtype).itemsize for dtype, shape in saved)
        layers = part.table.num_layers(part.buffers)
        entries.append({"kind": kind_of(part), "layers": layers, "bytes": num_bytes})
    spec = info.cache.table.spec
    return {
        "file": str(path),
        "is": "snapshot",
        "bytes": path.stat().st_size,
        "version": info.version,
        "model": info.model_id,
        "cache": {
            "sequences": spec.sequences,
            "streams": spec.streams,
            "cells": max(part.table.num_cells for part in parts),
            "bytes": info.cache.nbytes,
        },
        "parts": entries,
        "sequences": [
            {
                "sequence": seq,
                "tokens": len(info.tokens[seq]) if seq in info.tokens else None,
                "kept": seq in kept,
                **by_sequence.get(seq, {"conversation": None, "turns": None, "last": None}),
            }
            for seq in info.sequences
        ],
    }


def format_snapshot(found: Mapping[str, Any]) -> Iterator[str]:
    """Format the description of a snapshot."""
    cache = found["cache"]
    yield f"{found['file']}: a snapshot, version {found['version']}, {in_units(found['bytes'])}"
    yield f"model: {fingerprint_text(found['model'])}"
    yield (
        f"cache: {plural(cache['sequences'], 'sequence')} in "
        f"{plural(cache['streams'], 'stream')} of {plural(cache['cells'], 'cell')}, "
        f"{in_units(cache['bytes'])} when loaded"
    )
    yield f"\n{'cache of':<20}{'layers':>6}{'bytes':>18}"
    for part in found["parts"]:
        yield f"{part['kind']:<20}{part['layers']:>6}{part['bytes']:>18,}"
    yield f"\n{'sequence':<10}{'tokens':>8}"
    for entry in found["sequences"]:
        tokens = "" if entry["tokens"] is None else f"{entry['tokens']:,}"
        line = f"{entry['sequence']:<10}{tokens:>8}"
        if entry["conversation"] is not None:
            line += f"  {entry['conversation']}: {plural(entry['turns'], 'turn')}"
            line += f", the last one: {brief(entry['last'])}" if entry["turns"] else ""
        yield line + "  stored prefix" * entry["kept"]


def describe_checkpoint(path: Path) -> dict[str, Any]:
    """Return the description of a checkpoint; raise `ModelError` if the model cannot be run.

    In a Hugging Face folder, only `config.json` is necessary. The values of tensors are not read.
    """
    model = on_mesh(load_shapes(path), abstract_mesh({"data": 1}), RULES)
    checkpoint = model.checkpoint
    longest = checkpoint.config.get("max_position_embeddings")
    costs = costs_of(model, sequences=1, streams=1, cells=1)
    tokenizer = damage = None
    try:
        tokenizer = model.tokenizer
    except ModelError as error:
        damage = None if isinstance(error, NoTokenizerError) else str(error)
    return {
        "file": str(path),
        "is": "checkpoint",
        "architecture": checkpoint.architecture,
        "weights": model.size,
        "longest": longest,
        "tensors": tensor_problems(path) or None,
        "vocabulary": None if tokenizer is None else tokenizer.size,
        "tokenizer": damage,
        "template": tokenizer is not None and tokenizer.render is not None,
        "parts": [
            {"kind": part.kind, "layers": part.layers, "bytes": part.each, "unit": part.unit}
            for part in costs.parts
        ],
    }


def format_checkpoint(found: Mapping[str, Any]) -> Iterator[str]:
    """Format the description of a checkpoint."""
    longest, vocabulary = found["longest"], found["vocabulary"]
    yield f"{found['file']}: {found['architecture']}, {found['weights'] / 1e6:,.1f}M weights"
    if longest is not None:
        yield f"texts: at most {plural(longest, 'token')}"
    if found["tensors"] is not None:
        yield f"tensors: {found['tensors']}"
    if found["tokenizer"] is not None:
        yield f"tokenizer: cannot be read: {found['tokenizer']}"
    elif vocabulary is None:
        yield "tokenizer: none, so prompts are token ids"
    else:
        which = "with a chat template" if found["template"] else "without a chat template"
        yield f"tokenizer: {plural(vocabulary, 'token')}, {which}"
    yield f"\n{'cache of':<20}{'layers':>6}{'bytes in float32':>25}"
    for part in found["parts"]:
        each = f"{part['bytes']:,} a {part['unit']}"
        yield f"{part['kind']:<20}{part['layers']:>6}{each:>25}"
