"""The rotation of query and key by one kernel, as autograd and torch.compile see it."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from .. import kernels
from ..engine import kernels_on
from .derivatives import below_autograd, define, implement

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_Library: Any = torch.library.Library  # its methods have no annotations
_library = _Library("ring_dilated_attention", "FRAGMENT")
ROTATE = define(
    _library,
    "rotate(Tensor query, Tensor key, Tensor cos, Tensor sin, bool transposed) "
    "-> (Tensor query_out, Tensor key_out)",
)
"""(query, key, cos, sin, transposed) -> both rotated; see `rotate`, and `kernels.rows`."""


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> _Pair:
    """Rotate the pairs (x[i], x[i + head_dim // 2]) of every row, computed in float32.

    Args:
        query: (batch, rows, heads, head_dim), any floating dtype but float64, any strides.
        key: (batch, rows, kv_heads, head_dim), like `query`; kv_heads may be 0.
        cos: (rows, head_dim), or (1 or batch, rows, head_dim), float32, without a gradient.
        sin: like `cos`; see `nn.Rotation`.

    Returns:
        Both rotated, contiguous.
    """
    rotated: _Pair = ROTATE(query, key, cos, sin, False)
    return rotated


class _Rotate(torch.autograd.Function):
    """Linear in query and key: its gradient is its transpose, whose gradient is the rotation."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return below_autograd(ROTATE, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[2:4])
        ctx.transposed = inputs[4]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ROTATE(*gradients, *ctx.saved_tensors, not ctx.transposed), None, None, None


def _run(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool
) -> _Pair:
    given = (query, key, cos, sin)
    query, key, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in given)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    cos, sin = (x.expand(len(query), -1, -1) for x in (cos, sin))
    with kernels_on(query.device):
        return kernels.rows.rotate_rows(query, key, cos, sin, transposed)


def _fake(query: torch.Tensor, key: torch.Tensor, *_: Any) -> _Pair:
    return query.new_empty(query.shape), key.new_empty(key.shape)


implement(_library, ROTATE, _run, _fake, _Rotate, "a rotation of query and key")
