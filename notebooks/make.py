"""Run the source of a notebook and write it, with all that it shows: `python -m notebooks.make`."""

import argparse
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SECONDS = 400
"""How long a cell may run: none takes 90 on two idle cores, and what hangs is to be found."""


def sources() -> list[Path]:
    """Return the sources of all notebooks."""
    return sorted(path for path in HERE.glob("*.py") if path.stem not in ("__init__", "make"))


def executed(source: Path) -> nbformat.NotebookNode:
    """Run a source, and return the notebook without what differs from run to run.

    Raises:
      nbclient.exceptions.CellExecutionError: when a cell fails.
      nbclient.exceptions.CellTimeoutError: when one takes too long.
      RuntimeError: when an error or a warning was printed beside a cell.
    """
    notebook = jupytext.read(source, fmt="py:percent")
    folder = {"metadata": {"path": str(HERE.parent)}}  # where `models` is found
    NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources=folder,
        record_timing=False,
        coalesce_streams=True,  # where a print is cut depends on the load of the machine
    ).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i}", {}
        for output in cell.get("outputs", []):
            # What fails after a cell, such as drawing a figure, does not stop the kernel.
            if output.output_type == "error" or output.get("name") == "stderr":
                raise RuntimeError(f"{source.name}, cell {i}: {output}")
    return notebook


def main() -> None:
    """Run notebooks, and write each beside its source."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", help="such as many_devices; by default all")
    names = parser.parse_args().names
    for source in sources():
        if not names or source.stem in names:
            nbformat.write(executed(source), source.with_suffix(".ipynb"))
            print(f"wrote {source.with_suffix('.ipynb').name}")


if __name__ == "__main__":
    main()
