"""Random sets of sequences for tokens that belong to several, right and nearly so."""

import random

from tests.twins import Twin


def tree_of(rng: random.Random, pool: list[int], count: int) -> list[list[int]]:
    """Sets of a random tree: from one token of a sequence to the next they only shrink."""
    alive, sets = [set(pool)], []
    for _ in range(count):
        own = rng.choice(alive)
        sets.append(sorted(own, key=lambda _: rng.random()))
        if len(own) > 1 and rng.random() < 0.4:
            part = set(rng.sample(sorted(own), rng.randint(1, len(own) - 1)))
            alive.remove(own)
            alive += [part, own - part]
    return sets


def nearly_right(twin: Twin, rng: random.Random, pool: list[int], count: int) -> list[list[int]]:
    """Sets of a random tree of sequences that hold the same cells; of some trees not quite."""
    seq = rng.choice(pool)
    alike = [
        other for other in pool if all(one.holds(other) == one.holds(seq) for one in twin.oracles)
    ]
    sets = tree_of(rng, alike, count)
    for _ in range(rng.choice([0, 0, 1, 3])):
        sets[rng.randrange(count)] = rng.sample(pool, rng.randint(1, min(3, len(pool))))
    return sets
