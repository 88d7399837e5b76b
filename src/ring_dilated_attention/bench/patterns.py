"""The patterns that people run, by name, with the shapes that they run them in."""

from __future__ import annotations

from typing import Any

from ..pattern import DilatedPattern, check_choice
from .workload import Workload

_NAMED: dict[str, tuple[DilatedPattern, dict[str, Any]]] = {
    # LongNet, Ding et al. 2023, arXiv 2307.02486: 12 heads of 64
    "longnet": (
        DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]),
        {"heads": 12, "head_dim": 64},
    ),
    # the slide encoder of Prov-GigaPath
    "gigapath": (
        DilatedPattern(
            [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], head_offsets="blocked"
        ),
        {"heads": 16, "head_dim": 48, "dtype": "float16"},
    ),
    # LongViT-small at 32,768 px
    "longvit": (
        DilatedPattern(
            [1024, 4096, 32768, 262144, 1048576], [1, 2, 4, 8, 16], head_offsets="blocked"
        ),
        {"heads": 16, "head_dim": 24},
    ),
    "dense": (DilatedPattern.dense(), {"heads": 16, "head_dim": 128}),
}

NAMES = tuple(_NAMED)


def named_pattern(name: str) -> DilatedPattern:
    """The pattern called `name`, one of `NAMES`; a `ValueError` lists them otherwise."""
    check_choice("pattern", name, NAMES)
    return _NAMED[name][0]


def named_workload(name: str, length: int, **options: Any) -> Workload:
    """A workload of a named pattern.

    Args:
        name: one of `NAMES`.
        length: positions of the sequence.
        options: fields of `Workload` that differ from the shape that goes with the name.

    Raises:
        TypeError, ValueError: the name or an option is not allowed.
    """
    pattern = named_pattern(name)
    return Workload(
        **{"pattern": pattern, "name": name, **_NAMED[name][1], **options, "length": length}
    )
