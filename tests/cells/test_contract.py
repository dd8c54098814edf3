"""Each kind of table has all methods of `CacheTable`, with the same argument names."""

import inspect

import pytest

from jaxkv.hybrid import HybridTable
from jaxkv.kv.cross_attention import CrossAttentionTable
from jaxkv.kv.table import CellTable
from jaxkv.recurrent.table import StateTable
from jaxkv.table import CacheTable

KINDS = CellTable, CrossAttentionTable, StateTable, HybridTable
BY_NAME = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
METHODS = [name for name, _ in inspect.getmembers(CacheTable, inspect.isfunction) if name[0] != "_"]


def arguments(method):
    """The names of a method's arguments, except the table and keyword-only options."""
    first, *others = inspect.signature(method).parameters.values()
    assert first.name in ("self", "table", "cells", "states")
    return [one.name for one in others if one.kind not in BY_NAME]


@pytest.mark.parametrize("kind", KINDS)
def test_methods_have_the_arguments_of_the_contract(kind):
    wanted = {name: arguments(getattr(CacheTable, name)) for name in METHODS}
    assert {name: arguments(getattr(kind, name)) for name in METHODS} == wanted
