"""How the site is made: python -m sphinx -W --keep-going -b html docs OUT."""

import collections
import dataclasses
import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

project = "jaxkv"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["sphinx_codeautolink"]
autosummary_generate = False  # the names have their pages
html_theme = "furo"
html_title = "jaxkv"
html_show_copyright = False
exclude_patterns = ["conf.py"]

myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks are stored with their outputs; a test runs the pages' blocks
codeautolink_concat_default = True  # the blocks of a page are one program

# Sphinx reads sources only under docs/, so notebooks are copied there; git ignores them.
shutil.rmtree(ROOT / "docs" / "notebooks", ignore_errors=True)
for notebook in ROOT.glob("notebooks/*.ipynb"):
    (ROOT / "docs" / "notebooks").mkdir(exist_ok=True)
    shutil.copy(notebook, ROOT / "docs" / "notebooks")

# `name` in a docstring is a link where it is one of the documented names, and code elsewhere.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:.*", r"(jax|np|numpy|collections|os|typing)\..*"),
    ("py:class", r".*(?:tuple|Mapping)\[.*"),  # Sphinx cannot read dots, and no shapes
    # Names in annotations of shapes, and private types in signatures.
    ("py:class", r"\w+|jaxlib\._jax\.Device"),
    ("py:class", r"jaxkv\.(draw|generation|ops|rope|serving|sharding|snapshot|spec|table)\..*"),
]
napoleon_attr_annotations = False  # docstrings have shapes and dtypes
napoleon_custom_sections = ["Returns"]  # else napoleon reads the words before a colon as a type


def name_fields(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Give the fields of a struct, `name: meaning` a line, the heading that napoleon wants."""
    if dataclasses.is_dataclass(obj):
        names = [field.name for field in dataclasses.fields(obj)]
    else:
        names = getattr(obj, "_fields", ())  # a NamedTuple
    if not names:
        return
    fields = "|".join(names)
    marks = [i for i, line in enumerate(lines) if re.match(rf"(?:{fields}): ", line)]
    if marks:
        end = next((i for i in range(marks[0], len(lines)) if not lines[i]), len(lines))
        lines[marks[0] : end] = ["Attributes:", *("  " + line for line in lines[marks[0] : end])]


def is_field(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of a NamedTuple, which `name_fields` has documented."""
    return True if isinstance(obj, collections._tuplegetter) else None


def list_names(app: Any, page: str, source: list[str]) -> None:
    """Write a table of all public names, with the first sentence of each, into the index page."""
    if page != "reference/index":
        return
    modules = "jaxkv", "jaxkv.generation", "jaxkv.serving", "jaxkv.sharding", "jaxkv.snapshot"
    tables = []
    for module in map(importlib.import_module, modules):
        names = [x for x in module.__all__ if not inspect.ismodule(getattr(module, x))]
        head = f"## {module.__name__}\n\n```{{eval-rst}}\n.. currentmodule:: {module.__name__}\n"
        rows = "".join(f"   {name}\n" for name in names)
        tables.append(f"{head}\n.. autosummary::\n   :nosignatures:\n\n{rows}```\n")
    source[0] = source[0].replace("<!-- names -->\n", "\n".join(tables))


def setup(app: Any) -> None:
    """Let `name_fields` read each docstring before napoleon, whose priority is 500."""
    app.connect("source-read", list_names)
    app.connect("autodoc-process-docstring", name_fields, priority=400)
    app.connect("autodoc-skip-member", is_field)
