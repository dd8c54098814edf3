"""Settings of every test and doctest: eight virtual CPU devices, strict, one compilation.

They are environment variables, set before anything imports jax, so that subprocesses of tests run
in the same way. They also apply to `pytest jaxkv/kv/cells.py`.
"""

import ctypes
import gc
import importlib.metadata
import math
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import hypothesis
import pytest

_OWN_CACHE = "JAX_COMPILATION_CACHE_DIR" not in os.environ
_CACHE = tempfile.mkdtemp(prefix="jaxkv-xla-") if _OWN_CACHE else None
if _CACHE:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE

# Compilation takes most of the time. These flags save two thirds of it. They do not change a
# program's operations, copies and temporary bytes. jaxlib 0.11 removed the last flag, so with newer
# Pythons the tests run the programs of users.
_QUICKLY = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _QUICKLY.append("--xla_cpu_use_fusion_emitters=false")

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "XLA_FLAGS": " ".join(_QUICKLY),
}.items():
    os.environ.setdefault(_name, _value)

# Compilation exceeds deadlines and the first example is always slow, so both checks are off. The
# fast lane draws the same examples every time: a change must not fail by chance.
_EXAMPLES: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("change", max_examples=25, derandomize=True, **_EXAMPLES)
hypothesis.settings.register_profile("nightly", max_examples=500, print_blob=True, **_EXAMPLES)

_ON_THE_CORE = (
    "generation",
    "speculative",
    "serving",
    "prefix_cache",
    "sharding",
    "snapshot",
    "scans",
)
"""Names of folders in `jaxkv/`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--check-types",
        action="store_true",
        help="check annotations of jaxkv that name shapes (jaxtyping, beartype) at each call",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--check-types"):
        from tests.helpers.typecheck import import_checked

        import_checked()
    gc.set_threshold(50_000, 10, 10)  # tracing makes millions of objects, and little garbage
    if not config.getoption("--hypothesis-profile"):
        nightly = config.option.markexpr == "nightly"
        hypothesis.settings.load_profile("nightly" if nightly else "change")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the examples of packages above the core for the lane `core`."""
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.path.parent.name in _ON_THE_CORE:
            item.add_marker(pytest.mark.core)


def pytest_collectstart() -> None:
    """Import the package before its files: otherwise a file would become a second module."""
    import jaxkv  # noqa: F401


def pytest_collection_finish() -> None:
    gc.freeze()  # excludes existing objects from collections


def pytest_report_header() -> str:
    import jax
    import jaxlib

    return f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, {jax.devices()}"


@pytest.fixture(autouse=True, scope="session")
def names_of_examples(doctest_namespace: dict[str, Any]) -> None:
    """Let the examples in docstrings use the library without importing it each time."""
    import jax
    import numpy

    import jaxkv
    from tests.helpers.steps import write_zeros

    for part in (jaxkv.generation, jaxkv):
        for name in part.__all__:
            value = getattr(part, name)
            # `pytest jaxkv/generation/decode.py` sets `jaxkv.generation.decode` to the module.
            setattr(part, name, getattr(value, name, value))
    doctest_namespace.update({name: getattr(jaxkv, name) for name in jaxkv.__all__})
    doctest_namespace.update(jax=jax, jnp=jax.numpy, np=numpy, math=math)
    doctest_namespace.update(forward=write_zeros, params=None)
    doctest_namespace.update(encoder=lambda params, step: write_zeros(params, step)[0])


_most = 1.5e9
"""Bytes that a process may use before it drops its compiled programs."""


def pytest_runtest_teardown() -> None:
    """Drop compiled programs when a process has grown, so that two fit into 8 GB.

    Each program uses a dozen of the 65,530 mappings that a process may have.
    """
    global _most
    if not sys.platform.startswith("linux") or _held() < _most:
        return
    import jax

    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system
    _most = max(_most, _held() + 1e9)


def _held() -> int:
    """Return the bytes of memory that this process uses."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def pytest_unconfigure() -> None:
    if _CACHE:
        shutil.rmtree(_CACHE, ignore_errors=True)
