"""The lists of `tools.mutate`: mistakes that have no effect, and the tests of each file."""

import pytest

from tools import mutate

UNRELATED = {
    *("make_cache", "rope", "rotation", "derivatives_of_edits", "transforms", "traced_operations")
}
"""Tests of other code than the mutated files, by name."""


@pytest.mark.core
def test_listed_mutants_exist():
    sources = mutate.mutated_sources()
    mutants = mutate.all_mutants(sources)
    assert mutate.entries_without_mutant(mutate.equivalents(), mutants, sources) == []


def test_each_test_of_mutated_code_is_listed():
    listed = set(" ".join(mutate.KNOWN_BY.values()).split()) | UNRELATED
    for folder in ("cells", "planning", "generation", "serving"):
        for path in (mutate.ROOT / "tests" / folder).glob("test_*.py"):
            assert path.stem.removeprefix("test_") in listed
