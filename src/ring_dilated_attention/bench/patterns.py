"""Workloads of the patterns that people run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..named_patterns import DEFAULT_NAME, given_pattern, named
from .workload import Workload


def named_workload(name: str, seq_len: int, **options: Any) -> Workload:
    """A workload of a named pattern.

    Args:
        name: one of `named_patterns.NAMES`.
        seq_len: positions of the sequence.
        options: fields of `Workload` that differ from the shape that goes with the name.

    Raises:
        TypeError, ValueError: the name or an option is not allowed.
    """
    found = named(name)
    shape = {"num_heads": found.num_heads, "head_dim": found.head_dim, "dtype": found.dtype}
    return Workload(
        **{"pattern": found.pattern, "name": name, **shape, **options, "seq_len": seq_len}
    )


def default_dtype(device: str) -> str | None:
    """The dtype of a workload that is told none: float32 on a CPU; None: the pattern's.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    return "float32" if device == "cpu" else None


def given_workload(
    name: str | None,
    segment_lengths: Sequence[int | None] | None,
    dilation_rates: Sequence[int] | None,
    *,
    head_offsets: str | None = None,
    head_branches: str | None = None,
    zero_keys: bool | None = None,
    **options: Any,
) -> Workload:
    """The workload that a command was given, of a named pattern or of branches.

    Args:
        name: one of `named_patterns.NAMES`; None: the default one, unless there are segment
            lengths.
        segment_lengths: of a pattern without a name, one per branch; an entry None: the whole
            sequence.
        dilation_rates: one for each of `segment_lengths`.
        head_offsets: of `DilatedPattern`; None: the pattern's.
        head_branches: of `DilatedPattern`; None: the pattern's.
        zero_keys: of `DilatedPattern`; None: the pattern's.
        options: fields of `Workload`; None: the default of the field, which is the pattern's where
            the pattern has a name.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """
    pattern = given_pattern(
        name,
        segment_lengths,
        dilation_rates,
        head_offsets=head_offsets,
        head_branches=head_branches,
        zero_keys=zero_keys,
    )
    given = {key: value for key, value in options.items() if value is not None}
    if segment_lengths is not None:
        return Workload(**given, pattern=pattern)
    return named_workload(name or DEFAULT_NAME, **given, pattern=pattern)
