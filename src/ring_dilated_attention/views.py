"""Zero-copy views: the rows of a tile as a (batch, heads, rows, ...) strided view.

In a (batch, sequence, heads, head_dim) tensor with strides (Sb, Sn, Sh, 1), the rows of a tile are
evenly spaced in segment, head and row, so one view with strides (segment_stride * Sn,
head_step * Sh + head_stride * Sn, stride * Sn, 1) holds every head at its own offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .plan import Rows, Tile


class Block(NamedTuple):
    """The part of a tile that one kernel call takes.

    A view has one batch dimension: it runs over the segments of one batch entry, or over the batch
    of one segment. Query heads that share a KV head are taken in turn, as `member`.
    """

    tile: Tile
    batch: range
    segments: range
    member: int
    group: int  # query heads per KV head

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tile's rows of a tensor (batch, local_sequence, heads, ...)."""
        heads = self.tile.heads
        start = heads.start * self.group + self.member
        return self._view(tensor, self.tile.queries, start, heads.step * self.group)

    def keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tile's rows of a tensor (batch, local_sequence, kv_heads, ...) or of `by_slot`."""
        heads = self.tile.heads
        return self._view(tensor, self.tile.keys, heads.start, heads.step)

    def _view(self, tensor: torch.Tensor, rows: Rows, head: int, head_step: int) -> torch.Tensor:
        batch, sequence, heads, *rest = tensor.stride()
        segment = rows.segment_stride * sequence
        return tensor.as_strided(
            (
                len(self.batch) * len(self.segments),
                len(self.tile.heads),
                rows.length,
                *tensor.shape[3:],
            ),
            (
                segment if len(self.segments) > 1 else batch,
                head_step * heads + rows.head_stride * sequence,
                rows.stride * sequence,
                *rest,
            ),
            tensor.storage_offset()
            + self.batch.start * batch
            + self.segments.start * segment
            + rows.start * sequence
            + head * heads,
        )


def blocks(tile: Tile, batch: int, group: int) -> Iterator[Block]:
    """Cut a tile into as few blocks as views allow."""
    every, segments = range(batch), range(tile.segments)
    if batch == 1 or tile.segments == 1:
        cuts = [(every, segments)]
    elif batch <= tile.segments:
        cuts = [(every[i : i + 1], segments) for i in every]
    else:
        cuts = [(every, segments[i : i + 1]) for i in segments]
    for entries, some in cuts:
        for member in range(group):
            yield Block(tile, entries, some, member, group)


def by_slot(slots: torch.Tensor) -> torch.Tensor:
    """Slots (batch, slots, head_dim) as a tensor that `Block.keys` can index.

    A slot belongs to one head already, so the head dimension gets stride 0.
    """
    batch, count, head_dim = slots.shape
    stride = slots.stride()
    return slots.as_strided((batch, count, 1, head_dim), (stride[0], stride[1], 0, stride[2]))
