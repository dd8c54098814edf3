"""The list of mistakes that have no effect, which `tools.mutate` does not plant."""

import pytest

from tools.mutate import entries_without_mutant


@pytest.mark.core
def test_listed_mutants_exist():
    assert entries_without_mutant() == []
