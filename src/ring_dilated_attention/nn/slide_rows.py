"""Which rows of a rank are class tokens and which are tiles, and of which slide."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..documents import Integers, as_ints, in_words, ints_or_tensor
from ..layout import SequenceLayout
from ..options import check_options
from .positions import checked_lengths

Numbers: TypeAlias = float | Sequence[float] | Tensor
"""One number, or one for each slide, as a sequence or a 1-D tensor."""


class SlideRows(NamedTuple):
    """The rows of slides of which each is a row of the batch.

    Attributes:
        at: the local row of the class token; None where another rank has it.
        total: tiles of all ranks.
        lengths: positions of each slide; None: all.
        layout: which positions each rank holds; None: contiguous equal shards.
    """

    at: int | None
    total: int
    lengths: Integers | None
    layout: SequenceLayout | None

    @classmethod
    def of(
        cls,
        features: Tensor,
        lengths: Integers | None,
        rank: int,
        world_size: int,
        layout: SequenceLayout | None,
    ) -> SlideRows:
        """The rows of features, (batch, local_tiles, in_dim), or a `TypeError` or `ValueError`."""
        at = _row_of_cls(features.shape[1], rank, world_size, layout)
        local = features.shape[1] + (0 if at is None else 1)
        total = local * world_size if layout is None else layout.length
        return cls(at, total - 1, _positions(lengths, len(features), total - 1), layout)

    @property
    def count(self) -> int:
        """How many class tokens this rank has of each row of the batch."""
        return 0 if self.at is None else 1

    @property
    def of_attention(self) -> dict[str, Any]:
        """What attention is to know."""
        return {"lengths": self.lengths, "layout": self.layout}

    def by_tile(self, sizes: Tensor) -> Tensor:
        """Numbers of all slides, (1,), or of each, for (batch, local_tiles, 1) to broadcast."""
        return sizes[:, None, None]

    def joined(self, tiles: Tensor, cls: Tensor) -> Tensor:
        """All local rows."""
        at = self.at or 0
        return torch.cat([tiles[:, :at], cls, tiles[:, at:]], 1)

    def of_cls(self, hidden: Tensor) -> Tensor:
        """The rows of class tokens, (batch, count, embed_dim), of all local rows."""
        return hidden[:, :0] if self.at is None else hidden[:, self.at : self.at + 1]

    def of_tiles(self, hidden: Tensor) -> Tensor:
        """The rows of tiles, (batch, local_tiles, embed_dim)."""
        if self.at is None:
            return hidden
        after = hidden[:, self.at + 1 :]
        return torch.cat([hidden[:, : self.at], after], 1) if self.at else after

    def sums(self, tiles: Tensor) -> Tensor:
        """Sums over the local tiles of each slide, (batch, slides, embed_dim)."""
        return tiles.sum(1, keepdim=True)

    def own_means(self, sums: Tensor) -> Tensor:
        """Means of the slides whose class token is here, of sums over all ranks."""
        return (sums / max(self.total, 1))[..., : self.count, :]

    def by_slide(self, vectors: Tensor) -> Tensor:
        """Vectors as a model returns them, of (layers, batch, count, embed_dim)."""
        return vectors


def _positions(lengths: Integers | None, batch: int, most: int) -> Integers | None:
    """Positions of each slide, the class token's included: slides have `most` tiles at most."""
    known, tiles = ints_or_tensor("lengths", lengths)
    if tiles is not None:  # not known while torch.compile traces: attention refuses a negative one
        return torch.where(tiles < 0, tiles, tiles + 1)
    if known is None:
        return None
    return [count + 1 for count in checked_lengths(known, batch, 0, most)]


def _row_of_cls(
    tiles: int, rank: int, world_size: int, layout: SequenceLayout | None
) -> int | None:
    """The local row of position 0; None where another rank holds it."""
    if layout is None:
        return None if rank else 0
    check_options(layout=layout)
    layout.check_ranks(world_size)
    first = layout.pieces[0]
    own = first.rank == rank
    # Not `- own`: torch 2.11 cannot compile a changing length minus a bool.
    expected = layout.local_length(rank) - (1 if own else 0)
    if tiles != expected:
        raise ValueError(
            f"the layout gives this rank {expected} tiles{' beside the class token' * own}; got "
            f"{tiles}. It must have one position more than the slide has tiles, for the class token"
        )
    return first.local if own else None


# --- Packed slides


class PackedRows(NamedTuple):
    """The rows of packed slides; tensors are int64, on the device of the features.

    Attributes:
        documents: borders of the slides in positions, their class tokens included.
        layout: which positions each rank holds; None on one process.
        cls: the local row of each class token that this rank has, by slide, (count,).
        own: the slides of these class tokens, (count,).
        tiles: the local row of each local tile, (local_tiles,).
        slides: the slide of each local tile, (local_tiles,).
        counts: how many tiles each slide has on all ranks, (slides,).
    """

    documents: Integers
    layout: SequenceLayout | None
    cls: Tensor
    own: Tensor
    tiles: Tensor
    slides: Tensor
    counts: Tensor

    @classmethod
    def of(
        cls,
        features: Tensor,
        documents: Integers,
        rank: int,
        world_size: int,
        layout: SequenceLayout | None,
    ) -> PackedRows:
        """The rows of features, (1, local_tiles, in_dim), of slides with these borders in tiles.

        Raises:
            TypeError: `documents` are no ints; or a tensor, on several ranks or in a layout, while
                torch.compile traces.
            ValueError: the batch is not 1, or the borders or the layout do not fit.
        """
        batch, tiles, _ = features.shape
        if batch != 1:
            raise ValueError(f"packed slides must be a batch of 1; got features of batch {batch}")
        known, borders = ints_or_tensor("documents", documents)
        if known is None and (layout is not None or world_size > 1):
            known = as_ints("documents", documents)
        if known is None:  # while torch.compile traces: attention compares positions with the rows
            assert borders is not None
            count = len(borders) - 1
            given: Integers = borders + torch.arange(count + 1)
            own, at, starts = torch.arange(count), given[:-1], given
        else:
            given = [border + slide for slide, border in enumerate(known)]
            if world_size > 1 and layout is None:
                layout = SequenceLayout.contiguous(max(given[-1], 0), world_size)
            rows = _rows_of_cls(known, given, tiles, rank, world_size, layout)
            own, at, starts = (torch.tensor(list(x)) for x in (rows, rows.values(), given))
        # Not blocking: a transfer of a few numbers must not wait for what the GPU has queued.
        own, at, starts = (
            x.to(features.device, torch.int64, non_blocking=True) for x in (own, at, starts)
        )
        index = torch.arange(tiles, device=features.device)
        before = at.sort().values - torch.arange(len(at), device=features.device)
        at_tiles = index + torch.bucketize(index, before, right=True)
        where = at_tiles
        if layout is not None:
            where = layout.positions(rank, device=features.device)[at_tiles]
        slides = torch.bucketize(where, starts[1:], right=True)
        return cls(given, layout, at, own, at_tiles, slides, starts.diff() - 1)

    @property
    def count(self) -> int:
        """How many class tokens this rank has."""
        return len(self.own)

    @property
    def of_attention(self) -> dict[str, Any]:
        """What attention is to know."""
        return {"documents": self.documents, "layout": self.layout}

    def by_tile(self, sizes: Tensor) -> Tensor:
        """See `SlideRows`."""
        return sizes.expand(len(self.counts))[self.slides][None, :, None]

    def joined(self, tiles: Tensor, cls: Tensor) -> Tensor:
        """See `SlideRows`."""
        order = torch.cat((self.tiles, self.cls)).argsort()
        return torch.cat((tiles, cls), 1).index_select(1, order)

    def of_cls(self, hidden: Tensor) -> Tensor:
        """See `SlideRows`."""
        return hidden.index_select(1, self.cls)

    def of_tiles(self, hidden: Tensor) -> Tensor:
        """See `SlideRows`."""
        return hidden.index_select(1, self.tiles)

    def sums(self, tiles: Tensor) -> Tensor:
        """See `SlideRows`."""
        zeros = tiles.new_zeros(1, len(self.counts), tiles.shape[2])
        return zeros.index_add(1, self.slides, tiles)

    def own_means(self, sums: Tensor) -> Tensor:
        """See `SlideRows`; the mean of no tiles is 0."""
        return (sums / self.counts.clamp(min=1)[:, None]).index_select(-2, self.own)

    def by_slide(self, vectors: Tensor) -> Tensor:
        """See `SlideRows`: (layers, count, embed_dim)."""
        return vectors.squeeze(1)


Rows: TypeAlias = SlideRows | PackedRows


def _rows_of_cls(
    documents: Sequence[int],
    starts: Sequence[int],
    tiles: int,
    rank: int,
    world_size: int,
    layout: SequenceLayout | None,
) -> dict[int, int]:
    """The local row of each class token that a rank holds, by slide; slides start at `starts`."""
    slides, total, ranges = len(documents) - 1, tiles, ((0, starts[-1]),)
    if layout is not None:
        check_options(layout=layout)
        layout.check_ranks(world_size)
        total, ranges = layout.length - slides, layout.ranges[rank]
    rises = all(a <= b for a, b in pairwise(documents))
    if not (slides > 0 and documents[0] == 0 and rises and documents[-1] == total):
        beside = f", the positions of the layout without {slides} class tokens" * bool(layout)
        raise ValueError(
            "documents must be the borders of the slides in tiles, as cu_seqlens, and rise from 0 "
            f"to {total}{beside}; got {in_words(documents)}"
        )
    rows: dict[int, int] = {}
    local = 0
    for start, stop in ranges:
        here = {slide: p for slide, p in enumerate(starts[:-1]) if start <= p < stop}
        rows |= {slide: local + p - start for slide, p in here.items()}
        local += stop - start
    if local != tiles + len(rows):
        raise ValueError(
            f"the layout gives this rank {local - len(rows)} tiles beside the class tokens of "
            f"{len(rows)} slides; got {tiles}"
        )
    return dict(sorted(rows.items()))


def sizes_of_tiles(
    tile_size: Numbers | None, default: float, slides: int, device: torch.device
) -> Tensor:
    """Sides of tiles, float64: (1,), the same for all slides, or (slides,)."""
    given = default if tile_size is None else tile_size
    sizes = torch.as_tensor(given, dtype=torch.float64)
    fits = sizes.shape in ((), (slides,))
    if not (fits and (torch.compiler.is_compiling() or bool((sizes > 0).all()))):
        raise ValueError(
            f"tile_size must be a number above 0, or one for each of {slides} slides; got {given}"
        )
    return sizes.view(-1).to(device, non_blocking=True)
