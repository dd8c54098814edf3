"""The code blocks of the documents run and print the output that follows them."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.helpers.parametrize import mark_cases

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- (\w+)[^>]*-->\n)?```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)


def blocks(name):
    return [match.groups() for match in BLOCK.finditer((ROOT / name).read_text())]


def run_and_print(code, names):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<document>", "exec"), names)
    return out.getvalue()


PAGES = ["README.md"] + [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if "```python" in path.read_text()
]
LONG = ["docs/howto/generate.md", "docs/howto/pods.md"]  # as slow as all others together


@pytest.mark.parametrize(
    "page", mark_cases(PAGES, core=[page for page in PAGES if page not in LONG])
)
def test_page_prints_its_outputs(page):
    names, shown = {}, 0
    for mark, code, text in blocks(page):
        if mark in ("weights", "skip"):
            continue
        out = run_and_print(code, names)
        if text is not None:
            assert out == text
            shown += 1
    assert shown


@pytest.mark.core
def test_readme_prints_outputs_of_real_weights(smollm2, monkeypatch):
    monkeypatch.setattr("models.load", lambda: smollm2)  # the same model, loaded once
    ((code, text),) = [found[1:] for found in blocks("README.md") if found[0] == "weights"]
    assert run_and_print(code, {}) == text


def test_readme_has_at_most_120_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_contributing_names_files_that_exist():
    named = re.findall(r"`((?:\w+/)*[a-z_]+\.(?:py|md))`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "jaxkv" / name).exists(), name
