"""Check the shape annotations of `jaxkv` at each call.

`pytest --check-types` imports the library through this hook. Names of annotations are imported for
type checkers only, so they are resolved at a function's first call.
"""

import ast
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import pkgutil
import sys
from pathlib import Path

import beartype
import jax
import jaxtyping

ROOT = Path(__file__).parents[2]
DTYPES = "Bool Float Inexact Int Integer Int32 Key Num Shaped UInt32"
SHAPES = tuple(f"{name}[" for name in DTYPES.split())
MARK = "_checked_types"


def check_calls(function):
    """Check arguments and results of a function by its annotations, from its first call on."""
    wrapped = []

    @functools.wraps(function)
    def call(*args, **kwargs):
        if jax.config.jax_disable_jit:  # arrays of programs then come from callers
            return function(*args, **kwargs)
        if not wrapped:
            names = {**function.__globals__, **_guarded(function.__module__), "Self": object}
            function.__annotations__ = {
                name: eval(text, names) if isinstance(text, str) else text
                for name, text in function.__annotations__.items()
            }
            wrapped.append(jaxtyping.jaxtyped(function, typechecker=beartype.beartype))
        try:
            return wrapped[0](*args, **kwargs)
        except jaxtyping.TypeCheckError as error:
            if "checking the parameters" in str(error):
                function(*args, **kwargs)  # raises its own error, or the annotation does
            raise

    return call


@functools.cache
def _guarded(module):
    """Import the names that a module imports for type checkers."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    names: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), module, "exec"), names)
    return names


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize=-1):
        tree = ast.parse(data)
        owners = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for function in (one for owner in owners for one in owner.body):
            if isinstance(function, ast.FunctionDef) and _names_shapes(function):
                function.decorator_list.append(ast.Name(MARK, ast.Load()))
        heads = [
            isinstance(node, ast.Expr) or getattr(node, "module", None) == "__future__"
            for node in tree.body
        ]
        place = heads.index(False) if False in heads else len(heads)
        name = ast.alias("check_calls", MARK)
        tree.body.insert(place, ast.ImportFrom(__name__, [name], 0))
        return compile(ast.fix_missing_locations(tree), path, "exec", optimize=_optimize)

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)  # no stale bytecode


def _names_shapes(function):
    every = [*ast.walk(function.args), *(ast.walk(function.returns) if function.returns else [])]
    texts = {ast.unparse(node) for node in every if isinstance(node, ast.Subscript)}
    return any(text.startswith(SHAPES) for text in texts)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "jaxkv":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path or [str(ROOT)], target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def import_checked():
    """Import all of the library with its annotations checked."""
    sys.modules.setdefault("tests.helpers.typecheck", sys.modules[__name__])
    sys.meta_path.insert(0, _Finder())
    package = importlib.import_module("jaxkv")
    for module in pkgutil.walk_packages(package.__path__, "jaxkv."):
        importlib.import_module(module.name)
