"""Reading a compiled program: its temporary bytes, and its copies."""

import math
import re

# `%name = f32[2,3]{1,0} copy(` or, with several results, `%name = (f32[2]{0}, s32[]) fusion(`.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
_COLLECTIVES += ("collective-permute", "collective-broadcast")
# Operations that move or rewrite whole arrays, including fusions that do not write in place.
_MOVES = ("copy", "transpose", "select", "convert", "fusion", "concatenate", "gather", "broadcast")


def temporary_bytes(compiled):
    """Count the bytes that a program needs in addition to its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def instructions(compiled):
    """List the instructions: the results, the operation, and the line."""
    matches = map(_INSTRUCTION.match, compiled.as_text().splitlines())
    return [(match[1], match[2], match.string) for match in matches if match]


def large_moves(compiled, at_least):
    """List the instructions that produce an array of `at_least` bytes, except in-place writes."""
    in_place, found = _in_place_computations(compiled.as_text()), []
    for results, operation, line in instructions(compiled):
        largest = max(map(_bytes, _ARRAY.findall(results)), default=0)
        called = re.search(r"calls=%?([\w.-]+)", line)
        writes = operation == "fusion" and called and called[1] in in_place
        if operation in _MOVES and largest >= at_least and not writes:
            found.append(line.strip()[:160])
    return found


def distinct_fusions(compiled):
    """Return the texts of the fused computations, without names and metadata."""
    text = compiled.as_text()
    fused = {m[1] for m in re.finditer(r" fusion\(.*calls=%?([\w.-]+)", text)}
    blocks = {
        re.match(r"%?([\w.-]+)", block)[1]: block for block in re.split(r"\n(?=%|ENTRY)", text)
    }
    return {_without_names(blocks[name]) for name in fused}


def collectives(compiled):
    """List transfers between devices: the instruction, and the bytes of its result."""
    found = []
    for results, operation, _ in instructions(compiled):
        name = operation.removesuffix("-start")
        if name in _COLLECTIVES:
            arrays = _ARRAY.findall(results)
            if operation != name and len(arrays) > 1:  # a start also returns operands
                arrays = arrays[len(arrays) // 2 :]
            found.append((name, sum(map(_bytes, arrays))))
    return found


def _without_names(block):
    _, _, body = re.sub(r", metadata=\{.*?\}", "", block).partition("{\n")
    names = {}
    return re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), body)


def _bytes(array):
    dtype, shape = array
    return math.prod(int(size) for size in shape.split(",") if size) * _SIZES.get(dtype, 8)


def _in_place_computations(text):
    """Name the computations that end in a scatter or an update of a slice."""
    names = set()
    for block in re.split(r"\n(?=%|ENTRY)", text):
        name = re.match(r"%?([\w.-]+)", block)
        if name and re.search(r"ROOT .*(scatter|dynamic-update-slice)", block):
            names.add(name[1])
    return names
