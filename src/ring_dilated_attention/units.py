"""Numbers as people write them: 16K positions, 1.56 GiB, 72.2 ms."""

from __future__ import annotations

_BYTES = {f"{prefix}B": 1024.0**i for i, prefix in enumerate(("", "Ki", "Mi", "Gi", "Ti", "Pi"))}
_FLOP = {f"{prefix}FLOP": 1000.0**i for i, prefix in enumerate(("", *"kMGTPE"))}
_SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNTS = {"K": 2**10, "M": 2**20, "G": 2**30}


def in_bytes(count: float) -> str:
    """A number of bytes: ``1.56 GiB``."""
    return _in_units(count, _BYTES)


def in_flop(count: float) -> str:
    """A number of operations: ``3.44 TFLOP``."""
    return _in_units(count, _FLOP)


def in_seconds(seconds: float) -> str:
    """A time: ``72.2 ms``, ``37.1 s``, ``12 min 5 s``."""
    if seconds < 60:
        return _in_units(seconds, _SECONDS)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _in_units(value: float, units: dict[str, float]) -> str:
    """The value with three digits, in the largest unit in which it is at least 1."""
    if not value:
        return f"0 {next(unit for unit, size in units.items() if size == 1)}"
    fits = [(name, size) for name, size in units.items() if abs(value) >= size]
    name, size = fits[-1] if fits else next(iter(units.items()))
    if value == int(value) and size == 1:
        return f"{int(value):,} {name}"
    scaled = value / size
    return f"{scaled:,.{max(0, 3 - len(str(int(abs(scaled)))))}f} {name}"


def count_of(count: int, noun: str) -> str:
    """A count with its noun, in the singular: ``1 rank``, ``4,096 ranks``."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def short_count(count: int) -> str:
    """A number of positions as options take it: ``8K`` for 8,192, ``1G`` for 2**30."""
    for unit, size in reversed(_COUNTS.items()):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def parse_count(text: str) -> int:
    """Read a number of positions: ``4096``, ``4,096``, ``4K``, ``1M`` or ``1G`` (powers of 1,024).

    Raises:
        ValueError: it is not such a number.
    """
    digits = text.strip().replace(",", "").replace("_", "")
    size = _COUNTS.get(digits[-1:].upper(), 1)
    digits = digits[:-1] if size > 1 else digits
    if not digits.isascii() or not digits.isdigit():
        raise ValueError(f"{text!r} is not a number of positions such as 4096, 16K, 1M or 1G")
    return int(digits) * size
