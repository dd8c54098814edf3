"""Files of a release: version, pictures, workflows and the address of the repository."""

import re
import tomllib
from pathlib import Path

import pytest

from tools import address, pictures

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_version_is_that_of_the_changelog_the_citation_and_the_recipe():
    version = PROJECT["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'version: "{version}"' in (ROOT / "conda" / "recipe.yaml").read_text()


def test_recipe_has_the_dependencies_of_the_project():
    recipe = (ROOT / "conda" / "recipe.yaml").read_text()
    run = re.search(r"  run:\n((?:    - .*\n)+)", recipe)
    assert run
    listed = {line.strip()[2:].replace(" ", "") for line in run[1].splitlines()}
    assert listed == {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]}


@pytest.mark.parametrize("name", pictures.NAMES)
def test_pictures_are_those_of_their_script(name):
    for theme in pictures.COLOURS:
        stored = (pictures.FOLDER / f"{name}-{theme}.svg").read_text()
        assert stored == pictures.draw(name, theme)


def test_address_of_the_repository_occurs_once():
    assert address.ADDRESS.fullmatch(PROJECT["urls"]["Repository"]) is None  # it needs its quotes
    assert address.ADDRESS.findall((ROOT / "pyproject.toml").read_text()) == [
        PROJECT["urls"]["Repository"]
    ]


def test_workflows_call_parts_of_nightly_that_exist():
    parts = re.search(r"part: \[(.*)\]", (ROOT / ".github/workflows/nightly.yml").read_text())
    known = re.search(r"parts=\(([a-z ]+)\)$", (ROOT / ".ci/nightly").read_text(), re.MULTILINE)
    assert parts and known
    assert parts[1].split(", ") == known[1].split()


def test_readme_keeps_a_link_to_the_address_in_one_place(tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name in ("windows.py", "windows.ipynb"):
        (tmp_path / "notebooks" / name).write_text((ROOT / "notebooks" / name).read_text())
    monkeypatch.setattr(address, "ROOT", tmp_path)
    texts = []
    for name in ("some/place", "other/place", "other/place"):
        monkeypatch.setattr("sys.argv", ["address", name])
        address.main()
        texts.append({str(x): x.read_text() for x in tmp_path.rglob("*.*")})
        urls = re.findall(r"github\.com/([\w-]+/\w+)", "".join(texts[-1].values()))
        assert {url for url in urls if url.endswith("place")} == {name}
    assert texts[1] == texts[2]
    readme = texts[2][str(tmp_path / "README.md")]
    assert "](https://github.com/other/place/blob/main/docs/tutorial.md)" in readme
    assert '"https://raw.githubusercontent.com/other/place/main/docs/pictures/' in readme
    assert not re.findall(r"\]\((?!https:|#)|src(?:set)?=\"(?!https:)", readme)
