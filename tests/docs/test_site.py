"""Index pages of the site list all items and no missing ones."""

import dataclasses
import inspect
import re
from pathlib import Path

import jaxkv
from jaxkv import plot

DOCS = Path(__file__).parents[2] / "docs"
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (jaxkv[.\w]*)$", re.M)


def find_name(name):
    thing = jaxkv
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    return thing


def modules(thing=jaxkv):
    for name in getattr(thing, "__all__", ()):
        inner = getattr(thing, name)
        if inspect.ismodule(inner):
            yield inner.__name__
            yield from modules(inner)


def test_reference_pages_list_every_public_name():
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    written = {name: kind for kind, name in DIRECTIVE.findall(pages)}
    public = {f"jaxkv.{name}" for name in jaxkv.__all__}
    assert set(written) == public | {plot.__name__, *modules()}
    for name, kind in written.items():
        assert (kind == "module") == inspect.ismodule(find_name(name)), name


def test_errors_page_lists_reasons_and_exceptions():
    page = (DOCS / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)`", page, re.M)
    assert set(jaxkv.Reason.__members__) <= set(rows)
    own = [name for name in jaxkv.__all__ if name.endswith("Error")]
    assert own and set(own) <= set(rows)


def test_names_page_leads_to_names_that_exist():
    """In each table the last column is jaxkv's: code there begins with a name or an option."""
    page = (DOCS / "reference" / "names.md").read_text()
    values = {"plan": jaxkv.Plan, "ubatch": jaxkv.Ubatch}
    functions = filter(inspect.isfunction, (getattr(jaxkv, name) for name in jaxkv.__all__))
    options = {name for one in functions for name in inspect.signature(one).parameters}
    codes = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\|.*\| (.*) \|$", page, re.M)))
    assert len(codes) > 80
    for code in codes:
        name, option = re.match(r"([\w.]+)(=?)", code).groups()
        first, _, rest = name.partition(".")
        if option or name in options:
            assert name in options, code
        elif first == "cache":
            assert hasattr(jaxkv.Cache, rest), code
        elif first in values:
            assert rest in {field.name for field in dataclasses.fields(values[first])}, code
        elif name not in ("jaxkv", "keep"):
            find_name(f"jaxkv.{name}")
