"""Reading a compiled program: what it holds beside its arguments, and what it copies."""

import re

import numpy as np

_RESULT = re.compile(r"= \(?(\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
# What moves or rewrites whole arrays. A fusion counts unless it writes into its operand.
_MOVES = ("copy", "transpose", "select", "convert", "fusion", "concatenate", "gather", "broadcast")


def temporary_bytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def large_moves(compiled, at_least):
    """List the instructions that produce `at_least` bytes, in-place writes aside."""
    found = []
    text = compiled.as_text()
    in_place = _in_place_computations(text)
    for line in text.splitlines():
        match = _RESULT.search(line)
        if match is None or match[3] not in _MOVES:
            continue
        shape = [int(x) for x in match[2].split(",") if x]
        if np.prod(shape, dtype=np.int64) * _SIZES.get(match[1], 8) < at_least:
            continue
        called = re.search(r"calls=%?([\w.-]+)", line)
        if match[3] == "fusion" and called and called[1] in in_place:
            continue
        found.append(line.strip()[:160])
    return found


def _in_place_computations(text):
    """Name the computations that end in a scatter or an update of a slice."""
    names = set()
    for block in re.split(r"\n(?=%|ENTRY)", text):
        name = re.match(r"%?([\w.-]+)", block)
        if name and re.search(r"ROOT .*(scatter|dynamic-update-slice)", block):
            names.add(name[1])
    return names
