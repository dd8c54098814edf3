"""What the command that plants mistakes plants, and what it says of the outcome."""

import pytest

from tests.mutants import mutants_of
from tests.mutate import KNOWN_BY, ROOT, equivalents, excuse, files_of, runs_of, wilson

SOURCE = '''"""A module, of 3 lines."""

@partial(jax.jit, static_argnums=1)
def place(cells: Cells, count: int = 4) -> Literal[2]:
    """Place 5 < 6 of them."""
    if count < 1:
        raise ValueError(f"wanted {count + 1}")
    usable = jnp.where(~taken, count // 2, 0)  # a & b
    order = jnp.argsort(usable, stable=True)
    return replace(cells, position=order.at[usable].set(1, mode="drop"), lost=(a |  # or b
        b))
'''


def planted(source=SOURCE):
    """The lines that change, as they become."""
    return [m.key(source)[2] for m in mutants_of("file.py", source)]


def test_mistakes_are_small_and_where_behaviour_is():
    assert planted() == [
        "def place(cells: Cells, count: int = 3) -> Literal[2]:",
        "def place(cells: Cells, count: int = 5) -> Literal[2]:",
        "if not (count < 1):",
        "if count <= 1:",
        "if count < 0:",
        "if count < 2:",
        "usable = jnp.where(taken, count // 2, 0) # a & b",
        "usable = jnp.where(~taken, 0, count // 2) # a & b",
        "usable = jnp.where(~taken, count * 2, 0) # a & b",
        "usable = jnp.where(~taken, count // 1, 0) # a & b",
        "usable = jnp.where(~taken, count // 3, 0) # a & b",
        "usable = jnp.where(~taken, count // 2, 1) # a & b",
        "return replace(cells, lost=(a | # or b",
        'return replace(cells, position=order.at[usable].set(0, mode="drop"), lost=(a | # or b',
        'return replace(cells, position=order.at[usable].set(2, mode="drop"), lost=(a | # or b',
        'return replace(cells, position=order.at[usable].set(1, mode="clip"), lost=(a | # or b',
        'return replace(cells, position=order.at[usable].set(1, mode="drop"), )',
        'return replace(cells, position=order.at[usable].set(1, mode="drop"), lost=(a & # or b',
    ]


def test_a_mutant_is_named_by_its_content_wherever_it_moves():
    first, moved = SOURCE, '"""Another."""\nX = name\n' + SOURCE.split("\n", 1)[1]
    names = [{m.key(text) for m in mutants_of("file.py", text)} for text in (first, moved)]
    assert names[0] == names[1]
    (mutant, *_) = mutants_of("file.py", first)
    listed = [{"file": "file.py", "function": "place", "line": mutant.key(first)[2], "reason": "x"}]
    assert [excuse(m, first, listed) for m in mutants_of("file.py", first)].count("x") == 1
    assert excuse(mutant, first, [{"file": "file.py", "function": "place", "reason": "y"}]) == "y"


def test_every_file_of_the_core_has_tests_that_exist():
    for path in (path for pattern in KNOWN_BY for path in files_of(pattern)):
        file, *others = runs_of(str(path.relative_to(ROOT)))
        assert len(others) > 5 and all((ROOT / name).exists() for name in (file, *others))


@pytest.mark.core
def test_every_excuse_has_a_mutant():
    """What is listed as equivalent is there still; a line that changed is looked at again."""
    sources = {entry["file"]: (ROOT / entry["file"]).read_text() for entry in equivalents()}
    mutants = {file: mutants_of(file, source) for file, source in sources.items()}
    for entry in equivalents():
        file = entry["file"]
        assert any(excuse(m, sources[file], [entry]) for m in mutants[file]), entry


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"), [(190, 200, 0.910, 0.973), (0, 10, 0.0, 0.278), (0, 0, 0, 1)]
)
def test_the_interval_of_a_share(hits, count, low, high):
    assert wilson(hits, count) == pytest.approx((low, high), abs=1e-3)
