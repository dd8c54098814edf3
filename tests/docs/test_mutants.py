"""The list of mistakes that have no effect, which `tools.mutate` does not plant."""

import pytest

from tools import mutate


@pytest.mark.core
def test_listed_mutants_exist():
    sources = mutate.mutated_sources()
    mutants = mutate.all_mutants(sources)
    assert mutate.entries_without_mutant(mutate.equivalents(), mutants, sources) == []
