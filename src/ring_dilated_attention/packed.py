"""Packed and padded inputs: documents of a sequence, lengths of the rows of a batch.

What callers write down becomes ints here, and the rows of a batch are sorted by what they hold.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from .caches import INT_BYTES, cache_by_size
from .calls import Scope
from .exchange import Exchange
from .layout import SequenceLayout
from .pattern import INT_LIMIT, in_brief, shape_in_brief
from .plan.documents import document_borders, in_words

Integers: TypeAlias = Sequence[int] | torch.Tensor
"""Ints as callers have them: a sequence, or a 1-D tensor of int32 or int64."""


class PackedRows(NamedTuple):
    """Rows of a batch that hold the same documents.

    Attributes:
        rows: which, evenly spaced: indexing with it gives a view.
        borders: cumulative lengths of their documents; positions behind the last are padding.
    """

    rows: slice
    borders: tuple[int, ...]


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
        if values.is_nested or values.layout != torch.strided or values.is_meta:
            raise TypeError(f"{name} must be a dense tensor that holds numbers")
        if values.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64; got {values.dtype}")
        if values.ndim != 1:
            raise ValueError(f"{name} must be 1-D; got shape {shape_in_brief(values)}")
        numbers: list[int] = values.tolist()
    elif isinstance(values, list | tuple | range):
        numbers = list(values)
        if not torch.compiler.is_compiling():
            if set(map(type, numbers)) - {int}:
                numbers = [_as_int(name, number) for number in numbers]
            if numbers and not -INT_LIMIT <= min(numbers) <= max(numbers) < INT_LIMIT:
                largest = max(numbers, key=abs)
                raise ValueError(f"{name} must hold ints below 2**63; got {in_brief(largest)}")
    else:
        raise TypeError(
            f"{name} must be a list of ints or a 1-D tensor of them; got {in_brief(values)}"
        )
    if not numbers:
        raise ValueError(f"{name} must not be empty")
    return numbers


def _as_int(name: str, number: Any) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must hold ints; got {in_brief(number)}") from None


def _nbytes(arguments: tuple[Any, ...], rows: tuple[PackedRows, ...]) -> int:
    documents, lengths, *_ = arguments
    numbers = len(documents) + len(lengths) + sum(len(packed.borders) for packed in rows)
    return numbers * INT_BYTES


@cache_by_size(8 << 20, _nbytes)
def packed_rows(
    documents: tuple[int, ...], lengths: tuple[int, ...], batch: int, total: int
) -> tuple[PackedRows, ...]:
    """Sort the rows of a batch by what they hold.

    Args:
        documents: cumulative lengths; empty: one document.
        lengths: valid positions of each row; empty: all.
        batch: number of rows.
        total: number of positions of the whole sequence.

    Returns:
        All rows, each once; those of one length together as far as they are evenly spaced.

    Raises:
        ValueError: there is not one length for each row, or see `document_borders`.
    """
    if not lengths:
        return (PackedRows(slice(None), document_borders(documents or None, None, total)),)
    if len(lengths) != batch:
        raise ValueError(
            f"lengths must hold one number for each of {batch} rows; got {in_words(lengths)}"
        )
    borders = {m: document_borders(documents or None, m, total) for m in dict.fromkeys(lengths)}
    if len(borders) == 1:
        return (PackedRows(slice(None), borders[lengths[0]]),)
    return tuple(
        PackedRows(rows, borders[length])
        for length in borders
        for rows in _even_slices([row for row, m in enumerate(lengths) if m == length])
    )


def _even_slices(rows: Sequence[int]) -> Iterator[slice]:
    """Cut rising numbers into evenly spaced runs."""
    first, step = rows[0], 0
    for last, row in pairwise(rows):
        if step and row - last != step:
            yield slice(first, last + 1, step)
            first, step = row, 0
        else:
            step = row - last
    yield slice(first, rows[-1] + 1, max(step, 1))


def check_padding_mask(mask: Any, batch: int, local_length: int, device: torch.device) -> None:
    """Raise unless this can be the shard of a padding mask.

    Raises:
        TypeError: it is no tensor, or not boolean.
        ValueError: it has another shape than (batch, local_length), or another device.
    """
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"key_padding_mask must be a tensor, got {in_brief(mask)}")
    if mask.is_nested or mask.layout != torch.strided:
        raise TypeError("key_padding_mask must be a dense tensor, not a sparse or nested one")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be boolean, True where a position is padding; got {mask.dtype}"
        )
    if mask.shape != (batch, local_length):
        raise ValueError(
            f"key_padding_mask must have shape (batch, local_sequence), {(batch, local_length)}; "
            f"got {shape_in_brief(mask)}"
        )
    if mask.device != device:
        raise ValueError(f"key_padding_mask must be on {device}; got {mask.device}")


def lengths_of_mask(
    mask: torch.Tensor, ends: Exchange, layout: SequenceLayout | None, scope: Scope
) -> list[int]:
    """The lengths that a right padding stands for: one small collective, and a wait for `mask`.

    Args:
        mask: this rank's shard, boolean (batch, local_sequence), True where a position is padding;
            batch and the kind of layout are the same on every rank.
        ends: this rank's end of the group.
        layout: which rank holds which positions; None: contiguous equal shards.
        scope: the call that this is part of.

    Returns:
        The number of valid positions of each row of the batch, the same on every rank.

    Raises:
        ValueError: on every rank, if the valid positions of a row are not the first ones of the
            whole sequence.
    """
    batch, length = mask.shape
    if layout is None:
        total, positions = length * ends.world_size, torch.arange(length, device=mask.device)
        positions += ends.rank * length
    else:
        total, positions = layout.length, layout.positions(ends.rank, device=mask.device)
    # Of each row: one position behind the last valid one, and minus the first padded one.
    column = torch.zeros(batch, 1, dtype=torch.int64, device=mask.device)
    stops = torch.cat((torch.where(mask, 0, positions + 1), column), 1).amax(1)
    padded = torch.cat((torch.where(mask, -positions, -total), column - total), 1).amax(1)
    found = ends.maximum(torch.cat((stops, padded)).tolist(), mask.device)
    lengths, paddings = found[:batch], [-x for x in found[batch:]]
    for row, (stop, first) in enumerate(zip(lengths, paddings, strict=True)):
        if first < stop:
            scope.in_step = True  # every rank has found the same
            raise ValueError(
                "key_padding_mask must be a right padding (dilated attention has no other masks): "
                f"in row {row}, position {first} is padding and position {stop - 1} is not"
            )
    return lengths
