"""Packed and padded inputs: documents of a sequence, lengths of the rows of a batch.

What callers write down becomes ints here, and the rows of a batch are sorted by what they hold.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, TypeAlias

import torch

from .pattern import INT_LIMIT, check_int, in_brief, shape_in_brief

Integers: TypeAlias = Sequence[int] | torch.Tensor
"""Ints as callers have them: a sequence, or a 1-D tensor of int32 or int64."""

SHOWN = 8
"""Borders that a message shows."""


def ints_or_tensor(
    name: str, values: Integers | None
) -> tuple[list[int] | None, torch.Tensor | None]:
    """Ints as an operator takes them: a list where they are known, else a tensor on the CPU.

    While torch.compile traces, the numbers in a tensor are not known: it is passed on, as int64.
    Else the tensor is None; both are None where nothing is given.

    Raises:
        TypeError, ValueError: see `as_ints`.
    """
    if values is None:
        return None, None
    if not (isinstance(values, torch.Tensor) and torch.compiler.is_compiling()):
        return as_ints(name, values), None
    _check_tensor(name, values)
    if values.shape[0] == 0:
        raise ValueError(f"{name} must not be empty")
    return None, values.detach().to("cpu", torch.int64)


def refuse_in_traces(name: str) -> None:
    """Raise a `TypeError` while torch.jit.trace runs, which would keep the numbers of a tensor."""
    if torch.jit.is_tracing():  # type: ignore[no-untyped-call]
        raise TypeError(
            f"torch.jit.trace would keep the numbers of {name} for all later calls: use "
            "torch.export or torch.compile"
        )


def as_ints(name: str, values: Any) -> list[int]:
    """The ints of a sequence or tensor; for a CUDA tensor that waits for the device.

    Args:
        name: of the argument, for messages.
        values: a sequence of ints, or a 1-D tensor of int32 or int64.

    Raises:
        TypeError: it is neither; or it is a tensor while torch.compile traces, since its numbers
            decide what is computed and are not known then.
        ValueError: the tensor is not 1-D, there are no numbers, or one is not below 2**63.
    """
    if isinstance(values, torch.Tensor):
        if torch.compiler.is_compiling():
            raise TypeError(
                f"under torch.compile {name} must be a list of ints: a tensor's numbers are not "
                "known when it traces"
            )
        _check_tensor(name, values)
        numbers: list[int] = values.tolist()
    elif isinstance(values, (list, tuple, range)):
        numbers = list(values)
        # Documents may be thousands: each by itself is looked at only where not all are plain ints.
        if not torch.compiler.is_compiling() and (
            {*map(type, numbers)} - {int} or (numbers and max(map(abs, numbers)) >= INT_LIMIT)
        ):
            numbers = [check_int(f"each of {name}", number) for number in numbers]
    else:
        raise TypeError(
            f"{name} must be a list of ints or a 1-D tensor of them; got {in_brief(values)}"
        )
    if not numbers:
        raise ValueError(f"{name} must not be empty")
    return numbers


def _check_tensor(name: str, values: torch.Tensor) -> None:
    refuse_in_traces(name)
    if hasattr(values, "device_mesh"):
        raise TypeError(f"{name} must be a local tensor, not a DTensor: pass {name}.full_tensor()")
    if values.is_nested or values.layout != torch.strided or values.is_meta:
        raise TypeError(f"{name} must be a dense tensor that holds numbers")
    if values.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64; got {values.dtype}")
    if values.ndim != 1:
        raise ValueError(f"{name} must be 1-D; got shape {shape_in_brief(values)}")


def packed_rows(
    documents: Sequence[int], lengths: Sequence[int], batch: int, total: int
) -> tuple[tuple[slice, tuple[int, ...]], ...]:
    """Sort the rows of a batch by the documents that they have.

    Args:
        documents: cumulative lengths; empty: one document.
        lengths: valid positions of each row; empty: all.
        batch: number of rows.
        total: number of positions of the whole sequence.

    Returns:
        Rows with the same documents, evenly spaced, so that indexing with the slice gives a view;
        and the borders of these documents, behind the last of which positions are padding. All
        rows, each once.

    Raises:
        ValueError: there is not one length for each row, or see `document_borders`.
    """
    if not lengths:
        return ((slice(None), document_borders(documents or None, None, total)),)
    if len(lengths) != batch:
        raise ValueError(
            f"lengths must hold one number for each of {batch} rows; got {in_words(lengths)}"
        )
    borders = {m: document_borders(documents or None, m, total) for m in dict.fromkeys(lengths)}
    return tuple(
        (rows if len(borders) > 1 else slice(None), borders[length])
        for length in borders
        for rows in even_slices([row for row, m in enumerate(lengths) if m == length])
    )


def even_slices(rows: Sequence[int]) -> Iterator[slice]:
    """Cut rising numbers into evenly spaced runs."""
    first, step = rows[0], 0
    for last, row in pairwise(rows):
        if step and row - last != step:
            yield slice(first, last + 1, step)
            first, step = row, 0
        else:
            step = row - last
    yield slice(first, rows[-1] + 1, max(step, 1))


def document_borders(
    documents: Sequence[int] | None, length: int | None, total: int
) -> tuple[int, ...]:
    """The borders of the documents of a sequence of which the first `length` positions are valid.

    Positions behind the valid ones are padding and belong to no document.

    Args:
        documents: cumulative lengths ``[0, ..., total]``; None: one document. Documents of length 0
            are left out, as are those that pad a list to a fixed number of them: ``[0, 5, 9, 9]``.
            With `length` they may end anywhere from `length` on, and are cut off there.
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
    borders = tuple([border for border, _ in groupby(documents)])
    rises = borders[:1] == (0,) and all(map(operator.lt, borders, borders[1:]))
    if not (rises and stop <= borders[-1] <= total):
        end = f"{total}" if length is None else f"{stop} or more, up to {total}"
        raise ValueError(
            f"documents must rise from 0 to the sequence length {end}; got {in_words(borders)}. "
            "They are cumulative lengths of documents in the whole sequence, as cu_seqlens"
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
