"""Allowed imports between modules: ladders of packages, and no cycles.

Lazy imports and those for type checkers count too.
"""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LADDERS = {  # each rung may import from itself and from those before it
    "jaxkv": "core | ops rope window draw | batch ubatch plan spec cache_spec | table"
    " | jit_helpers | stale | cache"
    " | step | planning kv recurrent hybrid | api plot sharding make | snapshot | generation"
    " | serving | __init__",
    "models": "errors | kinds json_file compiling room meshes | text | checkpoints texts | families"
    " | model | run costs fingerprint mtp | generate chat | search serving | cli"
    " | __init__ __main__",
}


def modules(package):
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield path, ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(path, names):
    """The modules of `names` that a module imports."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{one.name}" for one in node.names}
            found |= (inner & names) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return found & names


def arrows(package):
    names = {name for _, name in modules(package)}
    return {name: find_imports(path, names) - {name} for path, name in modules(package)}


@pytest.mark.parametrize("package", LADDERS)
def test_imports_go_down_the_ladder(package):
    ladder = LADDERS[package].split("|")
    rungs = {name: rung for rung, names in enumerate(ladder) for name in names.split()}

    def rung(module):
        return rungs[(module.split(".") + ["__init__"])[1]]

    for module, others in arrows(package).items():
        for other in others:
            assert rung(other) <= rung(module), f"{module} imports {other}"


@pytest.mark.parametrize("package", LADDERS)
def test_imports_have_no_circle(package):
    TopologicalSorter(arrows(package)).prepare()  # raises CycleError


def test_imports_of_kinds_stay_apart():
    kinds = {"planning", "kv", "recurrent", "hybrid"}
    for module, others in arrows("jaxkv").items():
        mine = {module.split(".")[1]} if "." in module else kinds
        if mine <= kinds:
            met = {other.split(".")[1] for other in others if "." in other} & kinds
            assert met <= mine, f"{module} imports {met - mine}"


def test_imports_of_jaxkv_leave_models_out():
    names = {name for _, name in modules("models")}
    assert not [path for path, _ in modules("jaxkv") if find_imports(path, names)]


def test_import_asks_for_no_device_and_no_jaxtyping():
    """`jax.distributed.initialize` must run first, in a pod and in the tests of processes.

    jaxtyping is for type checkers only.
    """
    packages = "jaxkv, jaxkv.plot, jaxkv.generation, jaxkv.serving, jaxkv.sharding, jaxkv.snapshot"
    code = f"import sys; sys.modules['jaxtyping'] = None; import {packages}"
    command = [sys.executable, "-c", f"{code}, tests.sharding.process_worker"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "none"}, check=True)
