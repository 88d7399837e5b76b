"""Attention of one new position to a KV cache by plain products, for one row of the batch.

A batched product is a fraction of what a fused kernel costs a CPU to begin, and it writes scores
where they are wanted: those of all tiles of a head side by side, so that one softmax is all that
brings branches together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from ..plan.cache_step import CacheStep, StepTile
from ..tiles import Selection, accumulate_dtype, select_backend

_NAME = "eager"

_FEW = 64
"""The most rows of a short tile. Short and long tiles share no reads: otherwise steps behind the
end of a long segment would read all of its rows, since steps before the end do."""

_View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
_Layer: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, each (1, rows, head_dim)."""


def select_for_one_position(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, batch: int
) -> Selection:
    """What computes one new position where the decoding kernels do not.

    Args:
        backend: what the user asks for; ``"auto"`` takes plain products on a CPU, for one row of
            the batch, but not in half precision, which needs wider scores.
        device: of the query.
        dtype: of the query.
        head_dim: of the query.
        batch: rows of the batch.

    Raises:
        ValueError: what is asked for cannot compute this, or is unknown.
    """
    if backend == "auto" and device.type == "cpu" and batch == 1:
        backend = _NAME if accumulate_dtype(dtype) == dtype else backend
    return select_backend(backend, device, dtype, head_dim)


def takes_products(selection: Selection, batch: int, dtype: torch.dtype) -> bool:
    """Whether plain products compute what was selected.

    Args:
        selection: of `select_for_one_position`.
        batch: rows of the batch.
        dtype: of the query.
    """
    backend = selection.backend
    is_plain = backend is not None and backend.name == _NAME
    return is_plain and batch == 1 and accumulate_dtype(dtype) == dtype


class _ReadViews(NamedTuple):
    """What tiles of different steps share that begin at the same row, all short or all long.

    Attributes:
        rows: of the longest of the tiles.
        query: (heads, group, head_dim).
        out: (heads, group, head_dim).
        keys: (heads, head_dim, rows), behind the first row of a cache.
        values: (heads, rows, head_dim), behind the first row of a cache.
    """

    rows: int
    query: _View
    out: _View
    keys: _View
    values: _View


class _TilesViews(NamedTuple):
    """What steps have in common whose tiles share the same reads.

    Attributes:
        whole: (1, kv_heads, group, columns): scores, or weights, of all tiles.
        parts: of each tile which number its `_ReadViews` has, and where its scores are.
        is_first_whole: whether all heads have the first tile.
        is_sparse: whether some head is not shown some tile, so that it has no scores there.
    """

    whole: _View
    parts: list[tuple[int, _View]]
    is_first_whole: bool
    is_sparse: bool


class StepViews(NamedTuple):
    """Where the products of steps read and write, as (size, strides, offset) of `as_strided`.

    Attributes:
        reads: of all tiles.
        tiles: of all steps.
        steps: of each which number its tiles have, and how many rows of each tile are not shown.
        columns: the most that a step has.
    """

    reads: list[_ReadViews]
    tiles: list[_TilesViews]
    steps: list[tuple[int, list[int]]]
    columns: int


def views_of(
    steps: Sequence[CacheStep], shape: tuple[int, ...], offset: int, row: int
) -> StepViews:
    """Where products read and write: the same in all layers.

    Args:
        steps: which tiles there are.
        shape: (1, kv_heads, group, head_dim), of the query, which is contiguous.
        offset: of the query in its memory.
        row: from a row of keys, or of values, to the next.
    """
    longest: dict[tuple[int, bool], StepTile] = {}
    for step in steps:
        for tile in step.tiles:
            known = longest.get(_shared_by(tile))
            if known is None or known.rows < tile.rows:
                longest[_shared_by(tile)] = tile
    _, _, group, width = shape
    reads = []
    for tile in longest.values():
        of, size, head = tile.kv_heads, (tile.heads, group, width), tile.head_stride * row
        strides, before = (of.step * group * width, width, 1), of.start * group * width
        first = tile.first_row * row  # behind the first row of the cache
        keys = (tile.heads, width, tile.rows), (head, 1, row), first
        values = (tile.heads, tile.rows, width), (head, row, 1), first
        both = (size, strides, offset + before), (size, strides, before)
        reads.append(_ReadViews(tile.rows, *both, keys, values))
    numbers = {shared_by: number for number, shared_by in enumerate(longest)}
    kinds: dict[tuple[int, ...], int] = {}
    tiles: list[_TilesViews] = []
    found = []
    for step in steps:
        read = tuple([numbers[_shared_by(tile)] for tile in step.tiles])
        if read not in kinds:
            kinds[read] = len(tiles)
            tiles.append(_tiles_views(step, read, [reads[at].rows for at in read], shape))
        hidden = [reads[at].rows - tile.rows for at, tile in zip(read, step.tiles, strict=True)]
        found.append((kinds[read], hidden))
    return StepViews(reads, tiles, found, max([each.whole[0][3] for each in tiles]))


def _shared_by(tile: StepTile) -> tuple[int, bool]:
    """What is equal of tiles that share their reads."""
    return tile.first_row, tile.rows > _FEW


def _tiles_views(
    step: CacheStep, read: tuple[int, ...], rows: list[int], shape: tuple[int, ...]
) -> _TilesViews:
    """Of a step: which of the `_ReadViews` its tiles read, and the rows that each has."""
    _, kv_heads, group, _ = shape
    columns, column = sum(rows), 0
    parts: list[tuple[int, _View]] = []
    for tile, number, count in zip(step.tiles, read, rows, strict=True):
        of = tile.kv_heads
        strides = of.step * group * columns, columns, 1
        first = of.start * group * columns + column
        parts.append((number, ((tile.heads, group, count), strides, first)))
        column += count
    whole = (1, kv_heads, group, columns), (kv_heads * group * columns, group * columns, columns, 1)
    has_whole = [tile.heads == kv_heads for tile in step.tiles]
    return _TilesViews((*whole, 0), parts, any(has_whole[:1]), not all(has_whole))


class _Reads(NamedTuple):
    """`_ReadViews` as tensors; keys and values of each layer."""

    query: torch.Tensor
    out: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


class _Tile(NamedTuple):
    """A tile of some steps: what it reads, and its part of their scores and weights."""

    reads: _Reads
    scores: torch.Tensor
    weights: torch.Tensor


class _Tiles(NamedTuple):
    """`_TilesViews` as tensors.

    Attributes:
        scores: of all tiles.
        weights: like `scores`.
        tiles: one by one.
        rest: those that add to what the first one has written; all of them where none has.
        is_sparse: see `_TilesViews`.
    """

    scores: torch.Tensor
    weights: torch.Tensor
    tiles: list[_Tile]
    rest: list[_Tile]
    is_sparse: bool


class _Mask(NamedTuple):
    """How a step is not shown the last rows that are read.

    Attributes:
        scores: (heads, group, rows), contiguous.
        added: to the scores, (rows,): 0 for rows that are shown, -inf for others.
    """

    scores: torch.Tensor
    added: torch.Tensor


class Products:
    """Attention of one query after another, in several steps and layers, in the same memory.

    What is read of a cache hardly changes from a step to the next. So a product reads what the
    longest of the tiles reads that share it; in a shorter one, the scores of rows that are not
    shown are masked. With several steps, all rows must therefore be finite.

    Args:
        q_1kgd: (1, kv_heads, group, head_dim), contiguous, float32 or float64: times the factor on
            the scores. It may be written to between calls of `attend`.
        out: like `q_1kgd`, where its memory begins: `attend` writes to it. A head without tiles
            gets 0.
        views: of the steps.
        layers: of the dtype of the query, all laid out alike.
    """

    def __init__(
        self,
        q_1kgd: torch.Tensor,
        out: torch.Tensor,
        views: StepViews,
        layers: Sequence[_Layer],
    ) -> None:
        assert out.storage_offset() == 0
        self._out, size = out, q_1kgd.shape[:3].numel() * views.columns
        memory = q_1kgd.new_empty(size), q_1kgd.new_empty(size)
        reads = [
            _Reads(
                q_1kgd.as_strided(*x.query),
                out.as_strided(*x.out),
                [_behind(keys, x.keys) for keys, _ in layers],
                [_behind(values, x.values) for _, values in layers],
            )
            for x in views.reads
        ]
        kinds = []
        for whole, parts, is_first_whole, is_sparse in views.tiles:
            scores, weights = memory[0].as_strided(*whole), memory[1].as_strided(*whole)
            tiles = [
                _Tile(reads[number], memory[0].as_strided(*part), memory[1].as_strided(*part))
                for number, part in parts
            ]
            # A first tile that all heads have writes what the rest adds to.
            rest = tiles[1:] if is_first_whole else tiles
            kinds.append(_Tiles(scores, weights, tiles, rest, is_sparse))
        masks = _masks(q_1kgd, views)
        self._steps = [
            (kinds[kind], mask) for (kind, _), mask in zip(views.steps, masks, strict=True)
        ]

    def begin(self, number: int) -> None:
        """Begin one of the steps.

        Args:
            number: of the step, among `steps`.
        """
        self._step, self._masks = self._steps[number]
        if self._step.is_sparse:
            self._step.scores.fill_(-torch.inf)

    def attend(self, layer: int) -> None:
        """One softmax over the scores of all tiles; the result is in `out`.

        Args:
            layer: number of the layer, among `layers`.
        """
        whole_scores, whole_weights, tiles, rest, _ = self._step
        for (reads, scores, _), mask in zip(tiles, self._masks, strict=True):
            if mask is None:
                torch.bmm(reads.query, reads.keys[layer], out=scores)
            else:
                torch.bmm(reads.query, reads.keys[layer], out=mask.scores)
                torch.add(mask.scores, mask.added, out=scores)
        torch.softmax(whole_scores, -1, out=whole_weights)
        if rest is tiles:
            self._out.zero_()
        else:
            reads, _, weights = tiles[0]
            torch.bmm(weights, reads.values[layer], out=reads.out)
        for reads, _, weights in rest:
            reads.out.baddbmm_(weights, reads.values[layer])

    def lse(self) -> torch.Tensor:
        """(1, kv_heads, group), of the last call of `attend`; -inf for a head without tiles."""
        return self._step.scores.logsumexp(-1)


def _behind(rows: torch.Tensor, view: _View) -> torch.Tensor:
    size, strides, offset = view
    return rows.as_strided(size, strides, rows.storage_offset() + offset)


def _masks(like: torch.Tensor, views: StepViews) -> list[list[_Mask | None]]:
    """For each tile of each step how it is masked; None: it is shown all that is read."""
    if not any(any(hidden) for _, hidden in views.steps):
        return [[None] * len(hidden) for _, hidden in views.steps]
    most = max(x.rows for x in views.reads)
    # Its first half shows rows, its second half does not.
    added = like.new_zeros(2 * most)
    added[most:] = -torch.inf
    found: list[list[_Mask | None]] = []
    scores = [like.new_empty(*x.query[0][:2], x.rows) for x in views.reads]
    for kind, hidden in views.steps:
        masks: list[_Mask | None] = []
        for (number, _), count in zip(views.tiles[kind].parts, hidden, strict=True):
            rows = views.reads[number].rows
            shown = added.narrow(0, most - rows + count, rows) if count else None
            masks.append(None if shown is None else _Mask(scores[number], shown))
        found.append(masks)
    return found
