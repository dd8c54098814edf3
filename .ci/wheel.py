"""Builds the wheel and checks that it contains only jaxkv and imports with only jax and numpy."""

import subprocess
import sys
import tempfile
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
    """The package name of a Requires-Dist line."""
    return requirement.replace(">", " ").replace("!", " ").replace("=", " ").split()[0].rstrip(";")


with tempfile.TemporaryDirectory() as folder:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, "."]
    subprocess.run(build, check=True)
    (wheel,) = Path(folder).glob("*.whl")
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
