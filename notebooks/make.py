"""Run notebook sources and write them with their outputs: `python -m notebooks.make`."""

import argparse
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SECONDS = 400
"""Time limit of a cell, to detect hanging ones. The slowest takes under 90 s on two idle cores."""


def sources() -> list[Path]:
    """Return the sources of all notebooks."""
    return sorted(path for path in HERE.glob("*.py") if path.stem not in ("__init__", "make"))


def executed(source: Path) -> nbformat.NotebookNode:
    """Run a source and return the notebook, without metadata that differ between runs.

    Raises:
      nbclient.exceptions.CellExecutionError: If a cell fails.
      nbclient.exceptions.CellTimeoutError: If a cell exceeds `SECONDS`.
      RuntimeError: If a cell printed an error or a warning.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    folder = {"metadata": {"path": str(HERE.parent)}}  # the folder of `models`
    NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources=folder,
        record_timing=False,
        coalesce_streams=True,  # the load of the machine changes where a print is split
    ).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i}", {}
        for output in cell.get("outputs", []):
            # An error after a cell, such as in drawing a figure, does not stop the kernel.
            if output.output_type == "error" or output.get("name") == "stderr":
                raise RuntimeError(f"{source.name}, cell {i}: {output}")
    return notebook


def main() -> None:
    """Run notebooks and write each next to its source."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="such as many_devices; by default all")
    names = parser.parse_args().names
    for source in sources():
        if not names or source.stem in names:
            nbformat.write(executed(source), source.with_suffix(".ipynb"))
            print(f"wrote {source.with_suffix('.ipynb').name}")


if __name__ == "__main__":
    main()
