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
