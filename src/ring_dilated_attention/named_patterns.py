"""The patterns that people run, by name, with the shapes that they run them in. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .pattern import DilatedPattern, HeadOffsets, Length, check_choice


@dataclass(frozen=True, kw_only=True)
class NamedPattern:
    """A pattern as it was published, and the shape that goes with it; LongNet's by default."""

    pattern: DilatedPattern
    num_heads: int = 12  # query heads
    head_dim: int = 64
    dtype: str = "bfloat16"  # of query, key and value, as torch calls it


_NAMED: dict[str, NamedPattern] = {
    # LongNet, Ding et al. 2023, arXiv 2307.02486
    "longnet": NamedPattern(
        pattern=DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
    ),
    # the slide encoder of Prov-GigaPath
    "gigapath": NamedPattern(
        pattern=DilatedPattern(
            [1024, 5792, 32768, 185363, 1048576], [1, 2, 4, 8, 16],
            head_offsets="blocked", zero_keys=True,
        ),
        num_heads=16, head_dim=48, dtype="float16",
    ),
    # LongViT-small at 32,768 px
    "longvit": NamedPattern(
        pattern=DilatedPattern(
            [1024, 4096, 32768, 262144, 1048576], [1, 2, 4, 8, 16],
            head_offsets="blocked", zero_keys=True,
        ),
        num_heads=16, head_dim=24,
    ),
    "dense": NamedPattern(pattern=DilatedPattern.dense(), num_heads=16, head_dim=128),
}  # fmt: skip

GEOMETRIC = "geometric"
"""LongNet's series as far as a sequence goes, see `DilatedPattern.geometric`; LongNet's shape."""

NAMES = (*_NAMED, GEOMETRIC)

DEFAULT_NAME = "longnet"


def named(name: str, length: int | None = None) -> NamedPattern:
    """The pattern called `name` and its shape.

    Args:
        name: one of `NAMES`.
        length: positions of the sequence, on which ``"geometric"`` alone depends.

    Raises:
        ValueError: there is no such pattern (the message lists `NAMES`), or no length for
            ``"geometric"``.
    """
    check_choice("pattern", name, NAMES)
    if name != GEOMETRIC:
        return _NAMED[name]
    if length is None:
        raise ValueError(f"the pattern {name!r} needs the length of the sequence")
    return replace(_NAMED["longnet"], pattern=DilatedPattern.geometric(length))


def given_pattern(
    name: str | None,
    segment_lengths: Sequence[Length] | None,
    dilation_rates: Sequence[int] | None,
    *,
    seq_len: int,
    head_offsets: HeadOffsets | None = None,
    zero_keys: bool = False,
) -> NamedPattern:
    """The pattern that a command was given: by its name, or by its branches.

    Args:
        name: one of `NAMES`; None: `DEFAULT_NAME`, unless there are segment lengths.
        segment_lengths: of a pattern without a name, one per branch; an entry None: the whole
            sequence. The shape is then LongNet's.
        dilation_rates: one for each of `segment_lengths`.
        seq_len: see `named`.
        head_offsets: with `segment_lengths`; None: ``"interleaved"``.
        zero_keys: with `segment_lengths`.

    Raises:
        ValueError: a value is not allowed, or the pattern is given twice or in part.
    """
    if segment_lengths is None or dilation_rates is None:
        if segment_lengths is not None or dilation_rates is not None:
            alone = "--segment-lengths" if dilation_rates is None else "--dilation-rates"
            raise ValueError(
                "--segment-lengths and --dilation-rates go together, with one value each per "
                f"branch: give both or neither; got {alone} alone"
            )
        if head_offsets is not None or zero_keys:
            option = "--zero-keys" if zero_keys else "--head-offsets"
            raise ValueError(
                f"--pattern {name or DEFAULT_NAME} is the whole pattern, {option} included: leave "
                f"out {option}, or give --segment-lengths and --dilation-rates"
            )
        return named(name or DEFAULT_NAME, seq_len)
    if name is not None:
        raise ValueError(f"give --pattern or --segment-lengths, not both; --pattern is {name}")
    offsets = head_offsets or "interleaved"
    return NamedPattern(
        pattern=DilatedPattern(
            segment_lengths, dilation_rates, head_offsets=offsets, zero_keys=zero_keys
        )
    )
