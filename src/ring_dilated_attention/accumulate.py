"""Add the results of tiles into strided views of the whole, in float32 arithmetic.

On CUDA each is one pass of a Triton kernel over the rows touched; without Triton, and on other
devices, plain torch operations do the same.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

from .merge import merge_


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def _runs_triton(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype != torch.float64 and has_triton()


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    tile_out: torch.Tensor,
    tile_lse: torch.Tensor,
    *,
    store: bool,
) -> None:
    """Merge a tile's result into `out` and `lse`, in place; see `merge.merge_`.

    Args:
        out: (outer, inner, rows, head_dim), any floating dtype; may be a strided view.
        lse: (outer, inner, rows), natural log; -inf where nothing has been seen yet.
        tile_out: like `out`, any floating dtype.
        tile_lse: like `lse`.
        store: whether to write the tile's result over what `out` and `lse` hold.
    """
    if _runs_triton(out):
        from .kernels.rows import merge_rows

        merge_rows(out, lse, tile_out, tile_lse, store=store)
    elif store:
        out.copy_(tile_out)
        lse.copy_(tile_lse)
    else:
        merge_(out, lse, tile_out, tile_lse)


def add(total: torch.Tensor, part: torch.Tensor, *, store: bool) -> None:
    """Add `part` (outer, inner, rows, head_dim) to `total`, in place; with `store`, replace it."""
    if _runs_triton(total):
        from .kernels.rows import add_rows

        add_rows(total, part, store=store)
    elif store:
        total.copy_(part)
    else:
        total.add_(part)  # torch adds half precision in float32 too


def row_sums(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``delta = rowsum(dout * out)`` as (batch, heads, sequence), float32 or float64.

    Args:
        dout: (batch, sequence, heads, head_dim).
        out: likewise.
    """
    if _runs_triton(out):
        from .kernels.rows import row_sums as kernel

        batch, length, heads, _ = out.shape
        delta = torch.empty(batch, heads, length, dtype=torch.float32, device=out.device)
        kernel(dout.transpose(1, 2), out.transpose(1, 2), delta)
        return delta
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    return (dout.to(wide) * out).sum(-1).transpose(1, 2)
