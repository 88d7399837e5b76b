"""Dilated attention that gathers, attends and scatters, as torchscale defines it: a baseline.

It differs from the exact function as the definition does: blocked offsets, segments padded with
zero keys that are attended to, branch weights without a gradient.

Shape legend: B batch, n positions, H heads, D head_dim, S segments, w positions of a segment,
r dilation rate, m = ceil(w / r) rows of a segment.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..pattern import DilatedPattern

_UNSEEN = -1e8  # finite, so that a position that no branch covers gets 0 and not NaN


def torchscale_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool,
) -> torch.Tensor:
    """Attend by FlashAttention-2 inside torch, branch by branch; differentiable by autograd.

    Per branch, pad the sequence with zeros to whole segments and these to multiples of r, copy each
    head's rows h // ceil(H / r) (mod r) into contiguous tensors, attend within each segment, and
    copy the results back. Then mix the branches by the softmax of their lse.

    Args:
        query: (B, n, H, D); key, value and the result are alike.
        key: see `query`.
        value: see `query`.
        pattern: the branches; its head offsets are ignored.
        is_causal: whether a query sees no later keys.
    """
    aten = torch.ops.aten
    attend = aten._scaled_dot_product_flash_attention
    if query.device.type == "cpu":
        attend = aten._scaled_dot_product_flash_attention_for_cpu
    length, outs, lses = query.shape[1], [], []
    for segment_length, rate in pattern.branches:
        w = length if segment_length is None else min(segment_length, length)
        q, k, v = (_gather(x, w, rate).transpose(1, 2) for x in (query, key, value))
        out, lse, *_ = attend(q, k, v, 0.0, is_causal)
        outs.append(_scatter(out.transpose(1, 2), length, w, rate))
        with torch.no_grad():
            rows = lse.transpose(1, 2).unsqueeze(-1)
            lses.append(_scatter(rows, length, w, rate, fill=_UNSEEN))
    weights = torch.softmax(torch.stack(lses), 0).to(query.dtype)
    mixed = outs[0] * weights[0]
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        mixed = mixed + out * weight
    return mixed


def _gather(x: torch.Tensor, w: int, rate: int) -> torch.Tensor:
    """The rows that each head attends with: (B, n, H, D) -> (B * S, m, H, D), contiguous."""
    _, length, heads, dim = x.shape
    x = _pad(x, 1, -length % w).reshape(-1, w, heads, dim)
    if rate == 1:
        return x
    x = _pad(_pad(x, 1, -w % rate), 2, -heads % rate)
    x = x.view(x.shape[0], -1, rate, rate, x.shape[2] // rate, dim)  # position, group of heads
    x = x.diagonal(dim1=2, dim2=3).movedim(-1, 2)  # group g attends with positions g (mod r)
    return x.reshape(*x.shape[:2], -1, dim)[:, :, :heads].contiguous()


def _scatter(rows: torch.Tensor, length: int, w: int, rate: int, fill: float = 0.0) -> torch.Tensor:
    """The way back, with `fill` where there is no row: (B * S, m, H, D) -> (B, n, H, D)."""
    segments, count, heads, dim = rows.shape
    if rate > 1:
        rows = _pad(rows, 2, -heads % rate).view(segments, count, rate, -1, dim).movedim(2, -1)
        dense = torch.diag_embed(rows, dim1=2, dim2=3)
        if fill:  # of lse, which has no gradient
            dense.fill_(fill).diagonal(dim1=2, dim2=3).copy_(rows)
        rows = dense.view(segments, count * rate, -1, dim)[:, :w, :heads]
    return rows.reshape(segments // -(-length // w), -1, heads, dim)[:, :length]


def _pad(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """`x` with `count` zeros appended along `dim`."""
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, count)) if count else x
