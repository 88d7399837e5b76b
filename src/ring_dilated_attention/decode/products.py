"""Attention of one new position to a KV cache by plain products, for one row of the batch.

A batched product is a fraction of what a fused kernel costs a CPU to begin, and it writes scores
where they are wanted: those of all tiles of a head side by side, so that one softmax is all that
brings branches together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from ..plan import CacheStep
from ..tiles import Selection, accumulate_dtype, select_backend

_NAME = "eager"
_View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
_Tile: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, _View, _View]


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


class TileViews(NamedTuple):
    """A tile in each tensor, as (size, strides, offset) of `Tensor.as_strided`.

    Attributes:
        query: (heads, group, head_dim).
        out: (heads, group, head_dim).
        scores: (heads, group, rows).
        keys: (heads, head_dim, rows).
        values: (heads, rows, head_dim).
    """

    query: _View
    out: _View
    scores: _View
    keys: _View
    values: _View


def views_of(
    step: CacheStep, shape: tuple[int, ...], offset: int, row: int, first_row: int
) -> list[TileViews]:
    """The tiles of a step: the same in all layers.

    Args:
        step: which tiles there are.
        shape: (1, kv_heads, group, head_dim), of the query, which is contiguous.
        offset: of the query in its memory.
        row: from a row of keys, or of values, to the next.
        first_row: offset of the first one in its memory.
    """
    _, _, group, width = shape
    columns, found = step.columns, []
    for tile in step.tiles:
        size, kv = (tile.heads, group), tile.kv_heads
        head, first = tile.head_stride * row, first_row + tile.first_row * row
        apart, before = kv.step * group, kv.start * group
        strides = apart * width, width, 1
        found.append(
            TileViews(
                ((*size, width), strides, offset + before * width),
                ((*size, width), strides, before * width),
                (
                    (*size, tile.rows),
                    (apart * columns, columns, 1),
                    before * columns + tile.column,
                ),
                ((tile.heads, width, tile.rows), (head, 1, row), first),
                ((tile.heads, tile.rows, width), (head, row, 1), first),
            )
        )
    return found


class Ready(NamedTuple):
    """A step that products are ready to compute.

    Attributes:
        scores: (1, kv_heads, group, columns), of all tiles.
        weights: like `scores`.
        tiles: of each tile its query, out, scores and weights, and its views of keys and values.
        rest: the tiles that add to what the first one has written; all of them where none has.
        is_sparse: whether some head is not shown some tile, so that it has no scores there.
    """

    scores: torch.Tensor
    weights: torch.Tensor
    tiles: list[_Tile]
    rest: list[_Tile]
    is_sparse: bool


class Products:
    """Attention of one query after another, and of one step after another, in the same memory.

    Args:
        q_1kgd: (1, kv_heads, group, head_dim), contiguous, float32 or float64: times the factor on
            the scores. It may be written to between calls of `attend`.
        out: like `q_1kgd`, where its memory begins: `attend` writes to it. A head without tiles
            gets 0.
        most_columns: rows of all tiles of a step, at most.
    """

    def __init__(self, q_1kgd: torch.Tensor, out: torch.Tensor, most_columns: int) -> None:
        assert out.storage_offset() == 0
        self._query, self._out = q_1kgd, out
        rows = q_1kgd.shape[:3].numel()
        self._memory = [q_1kgd.new_empty(rows * most_columns) for _ in range(2)]
        self._heads: dict[tuple[_View, _View], tuple[torch.Tensor, torch.Tensor]] = {}

    def ready(self, views: Sequence[TileViews], columns: int) -> Ready:
        """A step in the memory of all steps.

        Args:
            views: of its tiles.
            columns: rows of all tiles.
        """
        _, kv_heads, group, _ = shape = (*self._query.shape[:3], columns)
        strides = kv_heads * group * columns, group * columns, columns, 1
        scores, weights = (x.as_strided(shape, strides) for x in self._memory)
        tiles = [
            (
                *self._heads_of(view),
                scores.as_strided(*view.scores),
                weights.as_strided(*view.scores),
                view.keys,
                view.values,
            )
            for view in views
        ]
        # A first tile that all heads have writes what the rest adds to.
        has_whole = [view.query[0][0] == shape[1] for view in views]
        rest = tiles[1:] if any(has_whole[:1]) else tiles
        return Ready(scores, weights, tiles, rest, not all(has_whole))

    def begin(self, step: Ready) -> None:
        """Begin a step."""
        self._step = step
        if step.is_sparse:
            step.scores.fill_(-torch.inf)

    def _heads_of(self, view: TileViews) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and out of the heads of a tile: of few kinds."""
        found = self._heads.get(view[:2])
        if found is None:
            both = self._query.as_strided(*view.query), self._out.as_strided(*view.out)
            found = self._heads[view[:2]] = both
        return found

    def attend(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """One softmax over the scores of all tiles; the result is in `out`.

        Args:
            keys: (1, rows, head_dim), of the dtype of the query.
            values: like `keys`.
        """
        whole_scores, whole_weights, tiles, rest, _ = self._step
        for query, _, scores, _, view, _ in tiles:
            torch.bmm(query, keys.as_strided(*view), out=scores)
        torch.softmax(whole_scores, -1, out=whole_weights)
        if rest is tiles:
            self._out.zero_()
        else:
            _, out, _, weights, _, view = tiles[0]
            torch.bmm(weights, values.as_strided(*view), out=out)
        for _, out, _, weights, _, view in rest:
            out.baddbmm_(weights, values.as_strided(*view))

    def lse(self) -> torch.Tensor:
        """(1, kv_heads, group), of the last call of `attend`; -inf for a head without tiles."""
        return self._step.scores.logsumexp(-1)
