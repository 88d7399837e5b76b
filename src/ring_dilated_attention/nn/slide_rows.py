"""Which rows of a rank are class tokens and which are tiles, and of which slide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class Packed(NamedTuple):
    """Which rows are of which of the packed slides; tensors are int64."""

    own: Tensor  # the slides whose class token is here, (count,)
    slides: Tensor  # the slide of each local tile, (local_tiles,)
    counts: Tensor  # how many tiles each slide has on all ranks, (slides,)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of this rank. Each slide is a row of the batch; or slides are packed, in one row.

    Attributes:
        of_attention: what attention is to know: the layout, and lengths or documents in positions.
        count: how many class tokens this rank has in each row of the batch.
        cls: their local rows; of packed slides in the order of the slides.
        tiles: the local rows of the tiles.
        order: where each local row is among the class tokens and, behind them, the tiles; None: in
            that order.
        total: tiles of a slide that is not packed, on all ranks.
        packed: which rows are of which packed slide; None: slides are not packed.
    """

    of_attention: dict[str, Any]
    count: int
    cls: slice | Tensor
    tiles: slice | Tensor
    order: Tensor | None
    total: int
    packed: Packed | None = None

    def joined(self, tiles: Tensor, cls: Tensor) -> Tensor:
        """All local rows, (batch, local_positions, ...)."""
        rows = torch.cat((cls, tiles), 1)
        return rows if self.order is None else rows.index_select(1, self.order)

    def of_cls(self, hidden: Tensor) -> Tensor:
        """The rows of class tokens among all local rows, (batch, count, ...)."""
        return _taken(hidden, self.cls)

    def of_tiles(self, hidden: Tensor) -> Tensor:
        """The rows of tiles among all local rows, (batch, local_tiles, ...)."""
        return _taken(hidden, self.tiles)

    def by_tile(self, sizes: Tensor) -> Tensor:
        """Numbers, (1,) or one for each slide, to broadcast with (batch, local_tiles, 1)."""
        if self.packed is None or len(sizes) == 1:
            return sizes[:, None, None]
        return sizes[self.packed.slides][None, :, None]

    def sums(self, tiles: Tensor) -> Tensor:
        """Sums over the local tiles of each slide: (batch, 1 or slides, embed_dim)."""
        if self.packed is None:
            return tiles.sum(1, keepdim=True)
        zeros = tiles.new_zeros(1, len(self.packed.counts), tiles.shape[2])
        return zeros.index_add(1, self.packed.slides, tiles)

    def own_means(self, sums: Tensor) -> Tensor:
        """Means of the slides whose class token is here, of `sums` of all ranks; 0 of no tiles."""
        if self.packed is None:
            return (sums / max(self.total, 1))[..., : self.count, :]
        counts = self.packed.counts.clamp(min=1)[:, None]
        return (sums / counts).index_select(-2, self.packed.own)


def _taken(hidden: Tensor, rows: slice | Tensor) -> Tensor:
    return hidden[:, rows] if isinstance(rows, slice) else hidden.index_select(1, rows)


def _tile_rows(cls: Tensor, tiles: int) -> Tensor:
    """The local rows of the tiles around class tokens in these rows."""
    before = cls.sort().values - torch.arange(len(cls), device=cls.device)  # tiles before each
    index = torch.arange(tiles, device=cls.device)
    return index + torch.bucketize(index, before, right=True)


def rows_of_batch(
    features: Tensor,
    lengths: Integers | None,
    rank: int,
    world_size: int,
    layout: SequenceLayout | None,
) -> Rows:
    """The rows of features, (batch, local_tiles, in_dim), or a `TypeError` or `ValueError`."""
    batch, tiles, _ = features.shape
    at = _row_of_cls(tiles, rank, world_size, layout)
    count = 0 if at is None else 1
    total = (tiles + count) * world_size if layout is None else layout.length
    given = {"lengths": _positions(lengths, batch, total - 1), "layout": layout}
    if not at:  # no class token, or first
        return Rows(given, count, slice(0, count), slice(count, None), None, total - 1)
    cls = torch.full((1,), at, device=features.device)
    rows = _tile_rows(cls, tiles)
    return Rows(given, count, cls, rows, torch.cat((cls, rows)).argsort(), total - 1)


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


def rows_of_pack(
    features: Tensor,
    documents: Integers,
    rank: int,
    world_size: int,
    layout: SequenceLayout | None,
) -> Rows:
    """The rows of features, (1, local_tiles, in_dim), of slides with these borders in tiles."""
    batch, tiles, _ = features.shape
    if batch != 1:
        raise ValueError(f"packed slides must be a batch of 1; got features of batch {batch}")
    known, borders = ints_or_tensor("documents", documents)
    if known is None and (layout is not None or world_size > 1):
        known = as_ints("documents", documents)
    if known is None:  # while torch.compile traces: attention compares positions with the rows
        assert borders is not None
        slides = len(borders) - 1
        starts = borders + torch.arange(slides + 1)
        own, cls = torch.arange(slides), starts[:-1]
        given: Integers = starts
    else:
        given = [border + slide for slide, border in enumerate(known)]
        if world_size > 1 and layout is None:
            layout = SequenceLayout.contiguous(max(given[-1], 0), world_size)
        here = _rows_of_cls(known, given, tiles, rank, world_size, layout)
        own, cls, starts = (torch.tensor(list(x)) for x in (here, here.values(), given))
    # Not blocking: a transfer of a few numbers must not wait for what the GPU has queued.
    own, cls, starts = (
        x.to(features.device, torch.int64, non_blocking=True) for x in (own, cls, starts)
    )
    rows = _tile_rows(cls, tiles)
    where = rows if layout is None else layout.positions(rank, device=features.device)[rows]
    of_tiles = torch.bucketize(where, starts, right=True) - 1  # torch 2.11 compiles a slice wrongly
    return Rows(
        {"documents": given, "layout": layout},
        len(own),
        cls,
        rows,
        torch.cat((cls, rows)).argsort(),
        total=0,
        packed=Packed(own, of_tiles, starts.diff() - 1),
    )


def _rows_of_cls(
    documents: Sequence[int],
    starts: Sequence[int],
    tiles: int,
    rank: int,
    world_size: int,
    layout: SequenceLayout | None,
) -> dict[int, int]:
    """The local row of each class token that a rank holds, by slide; slides start at `starts`."""
    slides, total = len(documents) - 1, tiles
    ranges: tuple[tuple[int, int], ...] = ((0, starts[-1]),)
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
        own = (each for each in enumerate(starts[:-1]) if start <= each[1] < stop)
        rows |= {slide: local + at - start for slide, at in own}
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
    fits = sizes.dim() == 0 or (sizes.dim() == 1 and len(sizes) == slides)
    if not (fits and (torch.compiler.is_compiling() or bool((sizes > 0).all()))):
        raise ValueError(
            f"tile_size must be a number above 0, or one for each of {slides} slides; got {given}"
        )
    return sizes.view(-1).to(device, non_blocking=True)
