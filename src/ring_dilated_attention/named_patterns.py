"""The patterns that people run, by name, with the shapes that they run them in. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .pattern import DilatedPattern, check_choice


@dataclass(frozen=True, kw_only=True)
class NamedPattern:
    """A pattern and the shape that goes with it.

    Attributes:
        pattern: the branches.
        num_heads: query heads.
        head_dim: head dimension.
        dtype: of query, key and value, as torch calls it.
    """

    pattern: DilatedPattern
    num_heads: int
    head_dim: int
    dtype: str = "bfloat16"


_NAMED: dict[str, NamedPattern] = {
    # LongNet, Ding et al. 2023, arXiv 2307.02486: 12 heads of 64
    "longnet": NamedPattern(
        pattern=DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12]),
        num_heads=12,
        head_dim=64,
    ),
    # the slide encoder of Prov-GigaPath
    "gigapath": NamedPattern(
        pattern=DilatedPattern(
            [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16], head_offsets="blocked"
        ),
        num_heads=16,
        head_dim=48,
        dtype="float16",
    ),
    # LongViT-small at 32,768 px
    "longvit": NamedPattern(
        pattern=DilatedPattern(
            [1024, 4096, 32768, 262144, 1048576], [1, 2, 4, 8, 16], head_offsets="blocked"
        ),
        num_heads=16,
        head_dim=24,
    ),
    "dense": NamedPattern(pattern=DilatedPattern.dense(), num_heads=16, head_dim=128),
}

NAMES = tuple(_NAMED)

DEFAULT_NAME = "longnet"


def named(name: str) -> NamedPattern:
    """The pattern called `name` and its shape.

    Args:
        name: one of `NAMES`.

    Raises:
        ValueError: there is no such pattern; the message lists `NAMES`.
    """
    check_choice("pattern", name, NAMES)
    return _NAMED[name]


def given_pattern(
    name: str | None,
    segment_lengths: Sequence[int | None] | None,
    dilation_rates: Sequence[int] | None,
    **options: str | bool | None,
) -> DilatedPattern:
    """The pattern that a command was given: by its name, or by its branches.

    Args:
        name: one of `NAMES`; None: `DEFAULT_NAME`, unless there are segment lengths.
        segment_lengths: of a pattern without a name, one per branch, with `dilation_rates`; an
            entry None: the whole sequence.
        dilation_rates: one for each of `segment_lengths`.
        options: `head_offsets`, `head_branches` and `zero_keys` of `DilatedPattern`; None: the
            pattern's.

    Raises:
        TypeError, ValueError: a value is not allowed, or both a name and branches are given.
    """
    if (segment_lengths is None) != (dilation_rates is None):
        alone = "--segment-lengths" if dilation_rates is None else "--dilation-rates"
        raise ValueError(
            "--segment-lengths and --dilation-rates go together, with one value each per branch: "
            f"give both or neither; got {alone} alone"
        )
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if segment_lengths is not None and dilation_rates is not None:
        if name is not None:
            raise ValueError(f"give --pattern or --segment-lengths, not both; --pattern is {name}")
        return DilatedPattern(segment_lengths, dilation_rates, **given)
    own = named(DEFAULT_NAME if name is None else name).pattern
    names = ("head_offsets", "head_branches", "zero_keys")
    given = {**{key: getattr(own, key) for key in names}, **given}
    return DilatedPattern(own.segment_lengths, own.dilation_rates, **given)
