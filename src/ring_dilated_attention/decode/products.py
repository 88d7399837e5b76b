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


def takes_products(selection: Selection, query: torch.Tensor) -> bool:
    """Whether `attend_by_products` computes what was selected.

    Args:
        selection: of `select_for_one_position`.
        query: (batch, kv_heads, group, head_dim).
    """
    backend = selection.backend
    is_plain = backend is not None and backend.name == _NAME
    return is_plain and len(query) == 1 and accumulate_dtype(query.dtype) == query.dtype


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


def attend_by_products(
    q_1kgd: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    views: Sequence[TileViews],
    columns: int,
    scale: float,
    *,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One softmax over the scores of all tiles.

    Args:
        q_1kgd: (1, kv_heads, group, head_dim), contiguous, float32 or float64.
        keys: (1, rows, head_dim), of the same dtype.
        values: like `keys`.
        views: of the tiles.
        columns: rows of all tiles.
        scale: factor on the scores.
        wants_lse: whether lse is needed; else it is None.

    Returns:
        out, like `q_1kgd`, and lse (1, kv_heads, group). A head without tiles gets 0 and -inf.
    """
    scores = q_1kgd.new_full((*q_1kgd.shape[:3], columns), -torch.inf)
    for view in views:
        scores.as_strided(*view.scores).baddbmm_(
            q_1kgd.as_strided(*view.query), keys.as_strided(*view.keys), beta=0, alpha=scale
        )
    weights, out = scores.softmax(-1), q_1kgd.new_zeros(q_1kgd.shape)
    for view in views:
        out.as_strided(*view.out).baddbmm_(
            weights.as_strided(*view.scores), values.as_strided(*view.values)
        )
    return out, scores.logsumexp(-1) if wants_lse else None
