"""Numbers as text: counts, bytes, operations and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit, and how many of the basic one it is."""

    name: str
    factor: float


Units = tuple[Unit, ...]
"""Units of one quantity, the smallest first; the basic one has factor 1."""

BYTES: Units = tuple(
    Unit(name, 1024**power)
    for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
)
FLOP: Units = tuple(
    Unit(f"{prefix}FLOP", 1000**power)
    for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E"))
)
FLOP_PER_S: Units = tuple(Unit(f"{name}/s", factor) for name, factor in FLOP)
SECONDS: Units = (Unit("µs", 1e-6), Unit("ms", 1e-3), Unit("s", 1.0))

SMALLEST_SHOWN, LARGEST_SHOWN = 0.01, 1e5
"""The smallest number of a column (0 aside) is at least 1 of the column's unit, but where the
largest would reach LARGEST_SHOWN: then it may be as little as SMALLEST_SHOWN of a larger unit."""


class Scale(NamedTuple):
    """How the numbers of a column are written.

    Attributes:
        unit: the unit.
        digits: decimals of every number.
    """

    unit: Unit
    digits: int

    def write(self, value: float) -> str:
        """A value, given in the basic unit, in this one: ``1,234.5``; ``0`` is exactly 0."""
        if not value:
            return "0"
        return f"{value / self.unit.factor:,.{self.digits}f}"


def common_scale(values: Sequence[float], units: Units) -> Scale:
    """The largest unit in which no value but 0 is below 1 (see `LARGEST_SHOWN`), and its decimals.

    There are no decimals where every value is a multiple of the unit; otherwise the smallest one
    has about three digits.

    Args:
        values: in the basic unit, at least 0.
        units: to choose from.
    """
    sizes = [abs(value) for value in values if value]
    smallest, largest = min(sizes, default=0.0), max(sizes, default=0.0)
    unit = units[0]
    for larger in units[1:]:
        least = SMALLEST_SHOWN if largest >= LARGEST_SHOWN * unit.factor else 1.0
        if smallest >= least * larger.factor:
            unit = larger
    if all(isinstance(x, int) and x % unit.factor == 0 for x in values):
        return Scale(unit, 0)
    return Scale(unit, 3 if smallest < unit.factor else 2 if smallest < 10 * unit.factor else 1)


def in_bytes(count: int) -> str:
    """A number of bytes for a sentence: ``1.56 GiB``."""
    return _alone(count, BYTES)


def in_flop(count: float) -> str:
    """A number of operations for a sentence: ``3.44 TFLOP``."""
    return _alone(count, FLOP)


def in_seconds(count: float) -> str:
    """A time for a sentence: ``72.2 ms``, ``37.1 s``, ``12 min 5 s``."""
    if count >= 60:
        minutes, seconds = divmod(round(count), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    return _alone(count, SECONDS) if count else "0 s"


def _alone(count: float, units: Units) -> str:
    whole = [unit for unit in units if unit.factor <= abs(count)]
    unit = whole[-1] if whole else units[0]
    return f"{Scale(unit, common_scale([count], (unit,)).digits).write(count)} {unit.name}"


def count_of(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun in singular or plural: ``1 rank``, ``4,096 ranks``.

    Args:
        count: how many.
        noun: its name in the singular.
        plural: its name in the plural; empty: `noun` with an s.
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
