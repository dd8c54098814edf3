"""What several test files share: real weights, loaded once."""

import pytest

import models


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32."""
    try:
        return models.load("smollm2")
    except models.ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gemma3():
    """Gemma 3 270M in float32."""
    try:
        return models.load("gemma3")
    except models.ModelError as error:
        pytest.skip(str(error))
