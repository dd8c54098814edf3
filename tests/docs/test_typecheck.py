"""`pytest --check-types` detects wrong annotations."""

import jax
import numpy as np
import pytest
from jaxtyping import Array, Float, Int32, TypeCheckError

from tests.helpers.typecheck import check_calls


def row_of(x: Float[Array, "R T"], row: Int32[Array, ""]) -> Float[Array, " T"]:
    return x[row]


def all_rows(x: Float[Array, "R T"]) -> Float[Array, " T"]:
    return x


def test_checked_arguments_and_results_have_their_shapes_and_dtypes():
    x, row = jax.numpy.ones((2, 3)), jax.numpy.int32(1)
    call = check_calls(row_of)
    assert call(x, row).shape == jax.jit(call)(x, row).shape == (3,)
    for wrong in [(x[0], row), (x, row[None]), (np.ones((2, 3)), row)]:
        with pytest.raises(TypeCheckError, match="parameters"):
            call(*wrong)
    with pytest.raises(TypeCheckError, match="return value"):
        check_calls(all_rows)(x)
