"""Arithmetic progressions as Python `range` objects (steps >= 1): intersection, size of a union."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd


def dilated_rows(
    segment_start: int, segment_stop: int, offset: int, rate: int, start: int, stop: int
) -> range:
    """The positions of a cell within ``range(start, stop)``.

    A cell holds ``range(segment_start + offset, segment_stop, rate)``, with 0 <= offset < rate.
    """
    low = max(start, segment_start)
    return range(low + (segment_start + offset - low) % rate, min(stop, segment_stop), rate)


def intersect(a: range, b: range) -> range:
    """The numbers in both progressions, as a progression."""
    divisor = gcd(a.step, b.step)
    quotient, remainder = divmod(b.start - a.start, divisor)
    if remainder:
        return range(0)
    # Solve a.start + a.step * i = b.start (mod b.step): the Chinese remainder theorem.
    modulus = b.step // divisor
    i = quotient * pow(a.step // divisor, -1, modulus) % modulus
    common, step = a.start + a.step * i, a.step * modulus
    low = max(a.start, b.start)
    return range(low + (common - low) % step, min(a.stop, b.stop), step)


def union_size(progressions: Sequence[range]) -> int:
    """How many numbers lie in at least one of the progressions.

    Each progression adds its own size less what the earlier ones already hold of it. Segments of a
    pattern that share a border overlap in nested progressions, which are dropped at once, so the
    recursion stays shallow.
    """
    total = 0
    for index, progression in enumerate(progressions):
        if not progression:
            continue
        shared = [s for p in progressions[:index] if (s := intersect(progression, p))]
        total += len(progression) - (union_size(_maximal(shared)) if shared else 0)
    return total


def _maximal(progressions: list[range]) -> list[range]:
    """Drop every progression that another one contains."""
    kept: list[range] = []
    for p in sorted(progressions, key=len, reverse=True):
        if not any(
            p.step % q.step == 0
            and (p[0] - q.start) % q.step == 0
            and q[0] <= p[0] <= p[-1] <= q[-1]
            for q in kept
        ):
            kept.append(p)
    return kept
