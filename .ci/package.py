"""Builds and checks the files of a release: `python .ci/package.py [--tag vX.Y.Z] [--out FOLDER]`.

The wheel contains only jaxkv, imports with only jax and numpy, and runs the first block of the
README in an environment with nothing else. `twine check` accepts the wheel and the source archive.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

HARD = {"jax", "jaxlib", "numpy"}  # the only dependencies without an extra
ALONE = """
import sys
sys.path.insert(0, {wheel!r})
import jaxkv
assert jaxkv.__file__.startswith({wheel!r}), jaxkv.__file__
others = {others!r} & set(sys.modules)
assert not others, f"importing jaxkv imports {{sorted(others)}}"
"""


def name_of(requirement: str) -> str:
    """Return the package name of a Requires-Dist line."""
    return requirement.replace(">", " ").replace("!", " ").replace("=", " ").split()[0].rstrip(";")


def run_first_block(wheel: Path, folder: Path) -> None:
    """Install the wheel into an empty environment, and run the first block of the README there."""
    blocks = re.findall(r"```(?:python|text)\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", wheel], check=True)
    run = subprocess.run(
        [python, "-c", blocks[0]], check=True, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    if run.stdout != blocks[1]:
        sys.exit(f"the first block of the README prints {run.stdout!r}, not {blocks[1]!r}")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--tag", help="the tag of the release, which must be v and the version")
parser.add_argument("--out", type=Path, help="where to store the files")
arguments = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    subprocess.run([sys.executable, "-m", "build", "-o", folder, "."], check=True)
    files = [*Path(folder).iterdir()]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    (wheel,) = Path(folder).glob("*.whl")
    if arguments.tag not in (None, f"v{wheel.name.split('-')[1]}"):
        sys.exit(f"expected the tag of {wheel.name}, got {arguments.tag}")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    info = metadata.split("/")[0]
    strays = [n for n in names if n.split("/")[0] not in {"jaxkv", info}]
    modules = {str(p) for p in Path("jaxkv").rglob("*") if p.suffix == ".py"}
    absent = (modules | {"jaxkv/py.typed", f"{info}/licenses/LICENSE"}) - set(names)
    hard = {name_of(line) for line in lines if "extra ==" not in line}
    problems = [
        *(f"not part of jaxkv: {n}" for n in strays),
        *(f"missing: {n}" for n in sorted(absent)),
        *([f"hard dependencies are {sorted(hard)}, not {sorted(HARD)}"] if hard != HARD else []),
    ]
    if problems:
        sys.exit("\n".join(problems))
    others = {"flax", "gguf", "tokenizers", "safetensors", "matplotlib", "models"}
    code = ALONE.format(wheel=str(wheel), others=others)
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=folder)
    print(f"{wheel.name}: {len(names)} files, {sum(n.endswith('.py') for n in names)} modules")
    run_first_block(wheel, Path(folder) / "alone")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, arguments.out)
