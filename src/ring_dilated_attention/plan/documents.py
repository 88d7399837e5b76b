"""Where documents begin and end in a packed, padded sequence. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

SHOWN = 8
"""Borders that a message shows."""


def document_borders(
    documents: Sequence[int] | None, length: int | None, total: int
) -> tuple[int, ...]:
    """The borders of the documents of a sequence of which the first `length` positions are valid.

    Positions behind the valid ones are padding and belong to no document.

    Args:
        documents: cumulative lengths ``[0, ..., total]``; None: one document. With `length` they
            may end anywhere from `length` on, and are cut off there.
        length: number of valid positions; None: all.
        total: number of positions of the whole sequence.

    Returns:
        Cumulative lengths ``(0, ..., length)``; ``(0,)`` where no position is valid.

    Raises:
        ValueError: `length` does not lie in [0, total], or `documents` does not rise from 0 to
            where it must end.
    """
    if length is not None and not 0 <= length <= total:
        raise ValueError(f"lengths must lie in [0, {total}], the sequence length; got {length}")
    stop = total if length is None else length
    if documents is None:
        return (0, stop) if stop else (0,)
    borders = tuple(documents)
    rises = borders[:1] == (0,) and all(a < b for a, b in pairwise(borders))
    if not (rises and stop <= borders[-1] <= total):
        end = f"{total}" if length is None else f"{stop} or more, up to {total}"
        raise ValueError(
            f"documents must rise from 0 to the sequence length {end}; got {in_words(borders)}"
        )
    if stop == borders[-1]:
        return borders
    return (*(border for border in borders if border < stop), *([stop] if stop else [0]))


def in_words(borders: Sequence[int]) -> str:
    """Borders for a message: the first few, the last, and how many there are."""
    if len(borders) <= SHOWN:
        return str(tuple(borders))
    first = ", ".join(map(str, borders[: SHOWN - 2]))
    return f"({first}, ..., {borders[-1]}) ({len(borders)} borders)"
