"""Conventions of public signatures; every exception is listed here."""

import ast
import inspect
import re
import types
from pathlib import Path

import pytest

import jaxkv

MODULES = [jaxkv, jaxkv.plot, jaxkv.generation, jaxkv.serving, jaxkv.sharding, jaxkv.snapshot]
PUBLIC = {
    id(thing): (f"{module.__name__}.{name}".removeprefix("jaxkv."), thing)
    for module in reversed(MODULES)
    for name in module.__all__
    if not isinstance(thing := getattr(module, name), types.ModuleType)
}
FUNCTIONS = {name: thing for name, thing in PUBLIC.values() if inspect.isfunction(thing)}
PLAIN_TUPLES = {
    "attend",  # as in a model: the step and the output
    "generation.model_step",  # a model's results: the cache and the logits
    "sharding.fit_mesh",  # a mesh and its rules
}


def positionals(function):
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(function).parameters.items()
    return [name for name, parameter in parameters if parameter.kind in kinds]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_cache_is_argument_1_or_3(name):
    """After `forward` and `params` it is the third one."""
    found = positionals(FUNCTIONS[name])
    if "cache" in found:
        assert found.index("cache") == (2 if "params" in found else 0)


def test_positional_arguments_are_at_most_5():
    many = {name for name, one in FUNCTIONS.items() if len(positionals(one)) > 5}
    assert many == set()


def test_several_results_have_names():
    said = {name: inspect.signature(one).return_annotation for name, one in FUNCTIONS.items()}
    assert {name for name, one in said.items() if str(one).startswith("tuple")} == PLAIN_TUPLES


def test_public_names_are_few_and_listed():
    assert len(PUBLIC) <= 78 and dir(jaxkv) == sorted(jaxkv.__all__)


METHODS = {
    f"{name}.{attribute}": function
    for name, thing in PUBLIC.values()
    if inspect.isclass(thing)
    for attribute, function in vars(thing).items()
    if inspect.isfunction(function) and not attribute.startswith("_")
}


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_annotations_say_shapes_and_types(name):
    signature = inspect.signature((FUNCTIONS | METHODS)[name])
    said = [one.annotation for one in signature.parameters.values()]
    for text in filter(lambda one: isinstance(one, str), [*said, signature.return_annotation]):
        assert not re.search(r"\bAny\b|jax\.Array|jnp\.ndarray", text)


def test_errors_say_what_was_expected_what_came_and_what_helps():
    raised = [
        ast.unparse(node.exc.args[0])
        for path in Path(jaxkv.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
    ] + [text for reason in jaxkv.Reason if reason for text in (reason.advice, reason.edit_advice)]
    odd = [text for text in raised if not re.search("expected .*got .*;", text, re.S)]
    assert len(raised) > 300 and len(odd) == 3, (
        odd
    )  # no such attribute; lines of such reasons, twice


def test_functions_have_at_most_60_lines_without_docstrings():
    lengths = {}
    for path in (Path(__file__).parents[2] / "jaxkv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                first = node.body[ast.get_docstring(node) is not None :] or node.body
                lengths[f"{path.name}:{node.lineno}"] = node.end_lineno - first[0].lineno + 1
    assert {place: lines for place, lines in lengths.items() if lines > 60} == {}
