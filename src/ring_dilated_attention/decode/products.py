"""Attention of one new position to a KV cache by plain products, for one row of the batch.

A batched product is a fraction of what a fused kernel costs a CPU to begin, and it writes scores
where they are wanted: those of all tiles of a head side by side, so that one softmax is all that
brings branches together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..plan import CacheStep, StepTile
from ..tiles import Selection, accumulate_dtype, select_backend

_NAME = "eager"


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


def attend_by_products(
    q_1kgd: torch.Tensor,
    kept: Sequence[torch.Tensor],
    step: CacheStep,
    scale: float,
    *,
    wants_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One softmax over the scores of all tiles.

    Args:
        q_1kgd: (1, kv_heads, group, head_dim), contiguous, float32 or float64.
        kept: keys and values, each (1, rows, head_dim), of the same dtype.
        step: with one tile at least.
        scale: factor on the scores.
        wants_lse: whether lse is needed; else it is None.

    Returns:
        out, like `q_1kgd`, and lse (1, kv_heads, group). A head without tiles gets 0 and -inf.
    """
    head_dim = q_1kgd.shape[3]
    scores = q_1kgd.new_full((*q_1kgd.shape[:3], step.columns), -torch.inf)
    keys, values = kept
    for tile in step.tiles:
        q = _of_heads(q_1kgd, tile, 0, head_dim)
        k = _rows(keys, tile).transpose(1, 2)
        _of_heads(scores, tile, tile.column, tile.rows).baddbmm_(q, k, beta=0, alpha=scale)
    weights = scores.softmax(-1)
    out = torch.zeros_like(q_1kgd)
    for tile in step.tiles:
        p = _of_heads(weights, tile, tile.column, tile.rows)
        _of_heads(out, tile, 0, head_dim).baddbmm_(p, _rows(values, tile))
    return out, scores.logsumexp(-1) if wants_lse else None


def _of_heads(tensor: torch.Tensor, tile: StepTile, first: int, columns: int) -> torch.Tensor:
    """Of (1, kv_heads, group, all columns), contiguous: (heads, group, columns) of a tile."""
    _, head, row, _ = tensor.stride()
    return tensor.as_strided(
        (tile.heads, tensor.shape[2], columns),
        (tile.kv_heads.step * head, row, 1),
        tensor.storage_offset() + tile.kv_heads.start * head + first,
    )


def _rows(kept: torch.Tensor, tile: StepTile) -> torch.Tensor:
    """Of (1, rows, head_dim): (heads, rows, head_dim) of a tile."""
    row = kept.stride(1)
    return kept.as_strided(
        (tile.heads, tile.rows, kept.shape[2]),
        (tile.head_stride * row, row, 1),
        kept.storage_offset() + tile.first_row * row,
    )
