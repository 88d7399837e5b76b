"""What modules do to rows by a kernel each, as autograd and torch.compile see it: operators."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from .. import kernels
from ..engine import kernels_on
from .derivatives import define, implement, once_differentiable

_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
_Three: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

GELU_NORM = define(
    "gelu_norm(Tensor rows, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor normed, Tensor statistics)",
)
"""(rows, weight, bias, eps) -> (normed, statistics); see `kernels.gelu_norm`; of any strides."""
GELU_NORM_BACKWARD = define(
    "gelu_norm_backward(Tensor dnormed, Tensor rows, Tensor weight, Tensor bias, "
    "Tensor statistics) -> (Tensor drows, Tensor dweight, Tensor dbias)",
)
"""(dnormed, rows, weight, bias, statistics) -> (drows, dweight, dbias), each as its input."""


def gelu_norm(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """The layer norm of the GELU (by the error function) of rows, computed in float32.

    Args:
        rows: (..., width), where `kernels.takes_rows` says so.
        weight: (width,), floating.
        bias: like `weight`.
        eps: added to variances.

    Returns:
        The shape and dtype of `rows`, contiguous.
    """
    normed: torch.Tensor = _normed(rows, weight, bias, eps)[0]
    return normed


class _GeluNorm(torch.autograd.Function):
    """Saved: rows, weight, bias, and the mean and the deviation of each row's GELU."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        rows, weight, bias, _ = inputs
        ctx.save_for_backward(rows, weight, bias, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dnormed: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        given = dnormed, *ctx.saved_tensors
        return *once_differentiable("a GELU and its norm", GELU_NORM_BACKWARD, *given), None


def _gelu_norm(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows, weight, bias = (x.contiguous() for x in inputs[:3])
    with kernels_on(rows.device):
        return kernels.gelu_norm.gelu_norm_forward(rows, weight, bias, inputs[3])


def _gelu_norm_backward(
    dnormed: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *rest: Any
) -> _Three:
    given = (x.contiguous() for x in (dnormed, rows, weight, *rest))
    with kernels_on(rows.device):
        drows, dweight, dbias = kernels.gelu_norm.gelu_norm_backward(*given)
    return drows, dweight.to(weight.dtype), dbias.to(bias.dtype)


def _fake_gelu_norm(rows: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    count = rows.numel() // rows.shape[-1]
    return rows.new_empty(rows.shape), rows.new_empty((count, 2), dtype=torch.float32)


def _fake_gelu_norm_backward(dnormed: torch.Tensor, *inputs: torch.Tensor) -> _Three:
    rows, weight, bias, _ = (x.new_empty(x.shape) for x in inputs)
    return rows, weight, bias


_normed = implement(GELU_NORM, _gelu_norm, _fake_gelu_norm, _GeluNorm, "a GELU and its norm")
implement(GELU_NORM_BACKWARD, _gelu_norm_backward, _fake_gelu_norm_backward)


ROTATE = define(
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
    rotated: _Pair = _rotated(query, key, cos, sin, False)
    return rotated


class _Rotate(torch.autograd.Function):
    """Linear in query and key: its gradient is its transpose, whose gradient is the rotation."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[2:4])
        (ctx.transposed,) = inputs[4]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ROTATE(*gradients, *ctx.saved_tensors, not ctx.transposed), None, None, None


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, transposed: bool
) -> _Pair:
    given = (query, key, cos, sin)
    query, key, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in given)
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    cos, sin = (x.expand(len(query), -1, -1) for x in (cos, sin))
    with kernels_on(query.device):
        return kernels.rows.rotate_rows(query, key, cos, sin, transposed)


_rotated = implement(
    ROTATE,
    _rotate,
    lambda query, key, *_: (query.new_empty(query.shape), key.new_empty(key.shape)),
    _Rotate,
    "a rotation of query and key",
)
