"""Padding masks: checked, and turned into the lengths of the rows of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..exchange import Exchange, untraced
from ..layout import SequenceLayout
from ..pattern import in_brief, shape_in_brief


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
            "key_padding_mask must be boolean, True where a position is padding; got "
            f"{mask.dtype}: pass mask != 0 if padding is what is not 0, as in torchscale, and "
            "mask == 0 if it is what is 0, as in transformers"
        )
    if mask.shape != (batch, local_length):
        raise ValueError(
            f"key_padding_mask must have shape (batch, local_sequence), {(batch, local_length)}; "
            f"got {shape_in_brief(mask)}"
        )
    if mask.device != device:
        raise ValueError(f"key_padding_mask must be on {device}; got {mask.device}")


_REFUSAL = (
    "key_padding_mask must be a right padding (dilated attention has no other masks): {}. True "
    "means padding: if the mask is True at valid positions, pass ~mask"
)


@untraced
def lengths_of_mask(
    mask: torch.Tensor,
    ends: Exchange,
    layout: SequenceLayout | None,
    scope: Any,
    refusal: str = _REFUSAL,
) -> list[int]:
    """The lengths that a right padding stands for: one small collective, and a wait for `mask`.

    Args:
        mask: this rank's shard, boolean (batch, local_sequence), True where a position is padding;
            batch and the kind of layout are the same on every rank.
        ends: this rank's end of the group.
        layout: which rank holds which positions; None: contiguous equal shards.
        scope: of the call that this is part of, as `Calls.enter` returns it.
        refusal: the message for a mask that is no right padding, with ``{}`` for where.

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
            where = f"in row {row}, position {first} is padding and position {stop - 1} is not"
            raise ValueError(refusal.format(where))
    return lengths


class KnownLengths:
    """What masks were found to stand for, for the layers that come behind the one that asked.

    torch counts most writes to a tensor, but not all: a broadcast, or one through `Tensor.data`. So
    a layer that comes again asks again: what it knows is from the last pass of its model.
    """

    def __init__(self) -> None:
        self._found: Any = WeakTensorKeyDictionary()  # by tensor, not by its address

    def __len__(self) -> int:
        """The number of masks that it knows."""
        return len(self._found)

    def get(
        self, caller: object, mask: torch.Tensor, layout: SequenceLayout | None
    ) -> list[int] | None:
        """The lengths of a mask that is not sharded; None where the caller has to ask."""
        if mask.is_inference() or mask not in self._found:  # to the former writes are not counted
            return None
        version, of, lengths, callers = self._found[mask]
        if version != mask._version or of != layout or id(caller) in callers:
            return None
        callers.add(id(caller))
        found: list[int] = lengths
        return found

    def keep(
        self,
        caller: object,
        mask: torch.Tensor,
        layout: SequenceLayout | None,
        lengths: list[int],
    ) -> None:
        """Keep the lengths of a mask, which the caller has asked for."""
        if not mask.is_inference():
            self._found[mask] = mask._version, layout, lengths, {id(caller)}

    def forget(self) -> None:
        """Drop everything."""
        if self._found:
            self._found = WeakTensorKeyDictionary()


KNOWN_LENGTHS = KnownLengths()
"""Of all masks of this process."""
