"""The patterns that people run, by name, with the shapes that they run them in."""

from __future__ import annotations

from collections.abc import Sequence
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


def given_pattern(
    name: str | None,
    segment_lengths: Sequence[int | None] | None,
    dilation_rates: Sequence[int] | None,
    **options: str | None,
) -> DilatedPattern:
    """The pattern that a command was given: by its name, or by its branches.

    Args:
        name: one of `NAMES`; None: ``"longnet"``, unless there are segment lengths.
        segment_lengths: of a pattern without a name, with `dilation_rates`; None: the whole
            sequence.
        dilation_rates: one for each of `segment_lengths`.
        options: `head_offsets` and `head_branches` of `DilatedPattern`; None: the pattern's own.

    Raises:
        TypeError, ValueError: a value is not allowed, or both a name and branches are given.
    """
    check_together(segment_lengths, dilation_rates)
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if segment_lengths is not None and dilation_rates is not None:
        if name is not None:
            raise ValueError(f"give a pattern's name or its segment_lengths, not both; got {name}")
        return DilatedPattern(segment_lengths, dilation_rates, **given)
    own = named_pattern("longnet" if name is None else name)
    names = ("head_offsets", "head_branches", "zero_keys")
    given = {**{key: getattr(own, key) for key in names}, **given}
    return DilatedPattern(own.segment_lengths, own.dilation_rates, **given)


def check_together(segment_lengths: object, dilation_rates: object) -> None:
    """Raise a `ValueError` if one is given without the other."""
    if (segment_lengths is None) != (dilation_rates is None):
        raise ValueError(
            "segment_lengths and dilation_rates go together; got "
            f"{segment_lengths} and {dilation_rates}"
        )
