"""Small mistakes in a source file, one at a time, for `tools.mutate`.

A mutant is an edit of the text at a place from the syntax tree, so the rest of the text is
unchanged. Docstrings and other strings, type hints, decorators, and raised exceptions are not
edited.

Four kinds of mistakes show only at an edge, such as a full cache: a bound that is wrong by one, a
wrong reduction, a condition without one of its parts, and a `min` or `max` without its limit. A
sample contains as many mutants of each of these kinds as of all other kinds together.
"""

import ast
import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

SWAPS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
"""Operators, and their replacements."""

BOUNDS: dict[type, str] = {ast.Lt: "- 1", ast.LtE: "+ 1", ast.Gt: "+ 1", ast.GtE: "- 1"}
"""Comparisons, and the change of the right side that is not equal to a swap of the operator."""

NAMES = {
    "min": "max", "minimum": "maximum", "any": "all", "argmin": "argmax", "cummin": "cummax",
    "logical_and": "logical_or", "reduce_and": "reduce_or", "zeros": "ones",
    "zeros_like": "ones_like", "_all": "_any", "_smallest": "_largest", "tril": "triu",
}  # fmt: skip
NAMES |= {other: name for name, other in NAMES.items()}
NAMES |= {"sum": "max", "_sum": "_largest", "prod": "max"}
"""Functions and methods, and their replacements."""

LIMITS = {"min", "max", "minimum", "maximum"}
"""Functions of two numbers, one of which is often a constant or another limit."""

OMITTED = {"side", "prepend", "where", "initial", "reverse"}
"""Keywords that may be omitted from a call."""

PROMISES = {"strict", "stable", "unique_indices", "metadata"}
"""Keywords whose values do not change the results of a correct program."""


@dataclass(frozen=True)
class Mutant:
    """One edit of a file: the text from `start` to `stop` becomes `text`.

    where: the function or class that it is in, dotted; empty for the module.
    kind: "bound", "reduction", "conjunct", "limit" or "other".
    """

    file: str
    where: str
    line: int
    start: int
    stop: int
    text: str
    kind: str = "other"

    def applied(self, source: str) -> str:
        """The whole text with the mistake in it."""
        return source[: self.start] + self.text + source[self.stop :]

    def key(self, source: str) -> tuple[str, str, str]:
        """The file, the function and the changed lines, which identify it after other edits."""
        begin = source.rfind("\n", 0, self.start) + 1
        end = source.find("\n", self.stop)
        lines = source[begin : self.start] + self.text + source[self.stop : end]
        return self.file, self.where, " ".join(lines.split())

    def diff(self, source: str) -> str:
        """The lines that change, before and after."""
        sides = (text.splitlines() for text in (source, self.applied(source)))
        lines = difflib.unified_diff(*sides, lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def mutants_of(file: str, source: str) -> list[Mutant]:
    """List all mutants of a file that still parse, in their order."""
    found, tree = _Finder(file, source), ast.parse(source)
    found.visit(tree)
    statements = [(found.start(node), found.stop(node)) for node in tree.body]

    def parses(mutant: Mutant) -> bool:
        start, stop = next(
            (start, stop)
            for start, stop in statements
            if start <= mutant.start and mutant.stop <= stop
        )
        try:
            ast.parse(source[start : mutant.start] + mutant.text + source[mutant.stop : stop])
        except SyntaxError:
            return False
        return True

    unique = {(m.start, m.stop, m.text): m for m in found.mutants}
    return sorted(filter(parses, unique.values()), key=lambda m: (m.start, m.stop))


def sample(every: list[Mutant], sources: dict[str, str], seed: int) -> list[Mutant]:
    """Draw an order of all mutants, in which kinds alternate.

    An edit of the code changes only the places of its mutants.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    order: dict[Mutant, bytes] = {}
    for mutant in every:
        key = mutant.key(sources[mutant.file])
        order[mutant] = hashlib.sha256(repr((seed, key, seen[key])).encode()).digest()
        seen[key] += 1
    count: Counter[str] = Counter()
    turn: dict[Mutant, int] = {}
    for mutant in sorted(every, key=order.__getitem__):
        turn[mutant] = count[mutant.kind]
        count[mutant.kind] += 1
    return sorted(every, key=lambda mutant: (turn[mutant], order[mutant]))


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source
        self.rows = [0]  # the start of each line
        for line in source.splitlines(keepends=True):
            self.rows.append(self.rows[-1] + len(line))
        self.path: list[str] = []
        self.mutants: list[Mutant] = []

    # ------------------------------------------------------------------------------- places

    def start(self, node: ast.AST) -> int:
        return self._at(node.lineno, node.col_offset)

    def stop(self, node: ast.AST) -> int:
        return self._at(node.end_lineno, node.end_col_offset)

    def _at(self, line: int, column: int) -> int:
        """Convert a place of the tree, which counts bytes, to an index of the text."""
        row = self.source[self.rows[line - 1] : self.rows[line]].encode()
        return self.rows[line - 1] + len(row[:column].decode())

    def text(self, node: ast.AST) -> str:
        return self.source[self.start(node) : self.stop(node)]

    def put(self, start: int, stop: int, text: str, kind: str = "other") -> None:
        line = self.source.count("\n", 0, start) + 1
        where = ".".join(self.path)
        self.mutants.append(Mutant(self.file, where, line, start, stop, text, kind))

    def keep_one(self, node: ast.AST, parts: Sequence[ast.AST], kind: str) -> None:
        """Replace a node by one of its two parts."""
        for part in parts:
            self.put(self.start(node), self.stop(node), f"({self.text(part)})", kind)

    def swap(self, op: ast.AST, before: ast.AST, after: ast.AST) -> None:
        """Replace the operator between two operands."""
        if type(op) in SWAPS:
            old, new = SWAPS[type(op)]
            begin = self.stop(before)
            gap = re.sub(r"#.*", lambda m: " " * len(m[0]), self.source[begin : self.start(after)])
            at = begin + gap.index(old)
            self.put(at, at + len(old), new, "bound" if type(op) in BOUNDS else "other")

    # ------------------------------------------------------------------------ left unchanged

    def visit_Raise(self, node: ast.Raise) -> None:
        """The message of an error is not behaviour; the condition of the `raise` is mutated."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.path.append(node.name)
        for child in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(child)
        self.path.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.path.append(node.name)
        for child in node.body:
            self.visit(child)
        self.path.pop()

    # -------------------------------------------------------------------------------- mistakes

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for op, before, after in zip(node.ops, sides, sides[1:], strict=False):
            self.swap(op, before, after)
            text = self.text(after)  # an integer, as 1, becomes 0 and 2; infinity stays infinity
            if type(op) in BOUNDS and not isinstance(after, ast.Constant) and text[-3:] != "inf":
                near = f"({text}) {BOUNDS[type(op)]}"
                self.put(self.start(after), self.stop(after), near, "bound")
        if len(node.ops) > 1:
            self.put(self.stop(node.comparators[0]), self.stop(node), "", "conjunct")
            self.put(self.start(node), self.start(node.comparators[0]), "", "conjunct")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.swap(node.op, *node.values[:2])
        first, *_, last = node.values
        self.put(self.start(first), self.start(node.values[1]), "", "conjunct")
        self.put(self.stop(node.values[-2]), self.stop(last), "", "conjunct")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.swap(node.op, node.left, node.right)
        if isinstance(node.op, ast.BitAnd | ast.BitOr):
            self.keep_one(node, [node.left, node.right], "conjunct")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Replace a function, also one that is passed on and not called."""
        self._rename(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._rename(node, node.attr)
        self.generic_visit(node)

    def _rename(self, node: ast.expr, name: str) -> None:
        if name in NAMES and isinstance(getattr(node, "ctx", None), ast.Load):
            kind = "other" if "zeros" in name or "ones" in name else "reduction"
            self.put(self.stop(node) - len(name), self.stop(node), NAMES[name], kind)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.put(self.start(node), self.stop(node), "pass")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop it, except in -1, which is mutated as a number."""
        if not isinstance(node.op, ast.USub) or not isinstance(node.operand, ast.Constant):
            self.put(self.start(node), self.start(node.operand), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.put(self.start(node), self.stop(node), str(not node.value))
        elif isinstance(node.value, int):
            for near in (node.value - 1, node.value + 1):
                if near >= 0:
                    self.put(self.start(node), self.stop(node), str(near))

    def visit_If(self, node: ast.If) -> None:
        if self.text(node.test) == "TYPE_CHECKING":
            return
        self.put(self.start(node.test), self.stop(node.test), f"not ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.put(self.start(node), self.stop(node), f"({self.text(node.orelse)})")
        self.put(self.start(node), self.stop(node), f"({self.text(node.body)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in LIMITS and len(node.args) == 2:
            self.keep_one(node, node.args, "limit")
        if name == "next_power_of_two":
            (of,) = node.args
            for near in ("- 1", "+ 1"):
                self.put(self.start(of), self.stop(of), f"({self.text(of)}) {near}", "bound")
        if name == "where" and len(node.args) == 3:
            _, yes, no = node.args
            swapped = self.text(no) + self.source[self.stop(yes) : self.start(no)] + self.text(yes)
            self.put(self.start(yes), self.stop(no), swapped)
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg == "mode":
                self.put(self.start(value), self.stop(value), '"clip"')
            elif name == "replace" or keyword.arg in OMITTED:
                comma = re.match(r"\s*,?\s*", self.source[self.stop(keyword) :])
                self.put(self.start(keyword), self.stop(keyword) + comma.end(), "")
        behaving = [keyword for keyword in node.keywords if keyword.arg not in PROMISES]
        args = node.args
        if name == "reshape":  # -1 and -2 are equal
            args = [arg for arg in args if not isinstance(arg, ast.UnaryOp)]
        for child in [node.func, *args, *behaving]:
            self.visit(child)
