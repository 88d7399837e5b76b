"""The layer norm of a GELU by one kernel, as autograd and torch.compile see it: operators."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from .. import kernels
from ..engine import kernels_on
from .derivatives import below_autograd, define, implement, once_differentiable

_Library: Any = torch.library.Library  # its methods have no annotations
_library = _Library("ring_dilated_attention", "FRAGMENT")
GELU_NORM = define(
    _library,
    "gelu_norm(Tensor rows, Tensor weight, Tensor bias, float eps) "
    "-> (Tensor normed, Tensor statistics)",
)
"""(rows, weight, bias, eps) -> (normed, statistics); see `kernels.gelu_norm`; of any strides."""
GELU_NORM_BACKWARD = define(
    _library,
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
    normed: torch.Tensor = GELU_NORM(rows, weight, bias, eps)[0]
    return normed


class _GeluNorm(torch.autograd.Function):
    """Saved: rows, weight, bias, and the mean and the deviation of each row's GELU."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return below_autograd(GELU_NORM, *inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        rows, weight, bias, _ = inputs
        ctx.save_for_backward(rows, weight, bias, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dnormed: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        def gradient(*x: torch.Tensor) -> Any:
            return GELU_NORM_BACKWARD(*x)

        saved = ctx.saved_tensors
        return *once_differentiable("a GELU and its norm", gradient, dnormed, *saved), None


_Three: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows, weight, bias = (x.contiguous() for x in inputs[:3])
    with kernels_on(rows.device):
        return kernels.gelu_norm.gelu_norm_forward(rows, weight, bias, inputs[3])


def _backward(
    dnormed: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *rest: Any
) -> _Three:
    given = (x.contiguous() for x in (dnormed, rows, weight, *rest))
    with kernels_on(rows.device):
        drows, dweight, dbias = kernels.gelu_norm.gelu_norm_backward(*given)
    return drows, dweight.to(weight.dtype), dbias.to(bias.dtype)


def _fake_forward(rows: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    count = rows.numel() // rows.shape[-1]
    return rows.new_empty(rows.shape), rows.new_empty((count, 2), dtype=torch.float32)


def _fake_backward(dnormed: torch.Tensor, *inputs: torch.Tensor) -> _Three:
    rows, weight, bias, _ = (x.new_empty(x.shape) for x in inputs)
    return rows, weight, bias


implement(_library, GELU_NORM, _forward, _fake_forward, _GeluNorm, "a GELU and its norm")
implement(_library, GELU_NORM_BACKWARD, _backward, _fake_backward)
