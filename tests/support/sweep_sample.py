"""A quarter of the cases of the sweep, for tests in which each of them takes long."""

import random
from itertools import groupby

from ring_dilated_attention.checks import sweep


def sweep_sample(world_size: int, seed: int = 1) -> list[int]:
    """Numbers of some cases of the sweep: of each pattern a long one, which is cut into rounds, and
    two others.

    Not every so-and-so-many: options come round every 2 to 14 cases, and some would never meet.

    Args:
        world_size: number of ranks.
        seed: which sample; of 1 and 2 `test_sweep_sample` knows that each has every option.
    """
    cases, draw = list(enumerate(sweep(world_size))), random.Random(seed)
    longest = max(case.layout.length for _, case in cases)
    found: list[int] = []
    for _, of_pattern in groupby(cases, lambda each: str(each[1].pattern)):
        long: list[int] = []
        short: list[int] = []
        for number, case in of_pattern:
            (long if case.layout.length == longest else short).append(number)
        found += [*draw.sample(long, 1), *draw.sample(short, 2)]
    return sorted(found)
