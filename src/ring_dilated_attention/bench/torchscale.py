"""Dilated attention that gathers, the way torchscale computes it, to compare with.

Written from the definition; the differences from the exact function are the definition's: blocked
offsets, segments padded with zero keys that are attended to, branch weights without a gradient.

Shape legend: B batch, n positions, H heads, D head_dim, S segments, w positions of a segment,
r dilation rate, m = ceil(w / r) rows of a segment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ..pattern import DilatedPattern

aten = torch.ops.aten

Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]
]
"""q, k, v (B, H, m, D), is_causal -> out (B, H, m, D) and lse (B, H, m); autograd goes through."""

_UNSEEN = -1e8  # finite, so that a position that no branch covers gets 0 and not NaN


def torchscale_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pattern: DilatedPattern,
    *,
    is_causal: bool,
    kernel: Kernel,
) -> torch.Tensor:
    """Dilated attention by torchscale's definition; differentiable by autograd.

    Per branch (w, r), w at most n: pad the sequence with zeros to whole segments and these to
    multiples of r, copy each head's rows i = h // ceil(H / r) (mod r) into contiguous tensors,
    attend within each segment, and copy the results back into tensors of the whole sequence. Then
    mix the branches with the softmax of their lse, a constant to autograd.

    Args:
        query: (B, n, H, D).
        key: like query.
        value: like query.
        pattern: the branches; its head offsets are ignored.
        is_causal: whether a query sees only keys up to its own position.
        kernel: what attends, one of `KERNELS`.

    Returns:
        out (B, n, H, D) in the dtype of the inputs.
    """
    length = query.shape[1]
    outs, lses = [], []
    for segment_length, rate in pattern.branches:
        w = length if segment_length is None else min(segment_length, length)
        q, k, v = (_gather(x, w, rate).transpose(1, 2) for x in (query, key, value))
        out, lse = kernel(q, k, v, is_causal)
        outs.append(_scatter(out.transpose(1, 2), length, w, rate))
        with torch.no_grad():
            lse_of_rows = lse.transpose(1, 2).unsqueeze(-1)
            lses.append(_scatter(lse_of_rows, length, w, rate, fill=_UNSEEN))
    with torch.no_grad():
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
    """The way back: (B * S, m, H, D) -> (B, n, H, D), with `fill` where there is no row.

    Differentiable while `fill` is 0.
    """
    segments, count, heads, dim = rows.shape
    if rate > 1:
        rows = _pad(rows, 2, -heads % rate).view(segments, count, rate, -1, dim).movedim(2, -1)
        dense = torch.diag_embed(rows, dim1=2, dim2=3)
        if fill:
            dense.fill_(fill).diagonal(dim1=2, dim2=3).copy_(rows)
        rows = dense.view(segments, count * rate, -1, dim)[:, :w, :heads]
    batch = segments // -(-length // w)
    return rows.reshape(batch, -1, heads, dim)[:, :length]


def _math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _cpu_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    return out, lse


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)
    return out, lse


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal)
    return out, lse.view(q.shape[:3])


KERNELS: dict[str, Kernel] = {
    "math": _math,
    "cpu_flash": _cpu_flash,
    "flash": _flash,
    "cudnn": _cudnn,
}


def _pad(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """`x` with `count` zeros appended along `dim`."""
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - dim), 0, count)) if count else x
