"""A LayerNorm that stays in half precision under autocast, and takes one pass each way."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from .. import kernels
from ..engine import autocast_dtype

_FEWEST_ROWS = 8192
"""From which our kernels save an H200 time; of fewer, the CPU decides how long a norm takes."""
_LEAST_CAPABILITY = (8, 0)
"""Of devices on which Triton computes in bfloat16."""


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, whose result under autocast has the dtype of a half-precision input.

    autocast makes `nn.LayerNorm` return float32, twice the memory of what comes in and of what the
    projection behind it reads. Means and variances are float32 here too; the weight and the bias
    are rounded to the dtype of the input. On GPUs, many such rows (8,192 on an H200) are read and
    written once in forward and once in backward, by Triton kernels.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimension.

        Args:
            input: shape (..., normalized_shape), floating.

        Returns:
            The shape of `input`; its dtype where that is bfloat16 or float16, else that of
            `nn.LayerNorm`.
        """
        return normalize(self, input)


def normalize(norm: nn.LayerNorm, rows: Tensor) -> Tensor:
    """What `LayerNorm` does, by the parameters of any `nn.LayerNorm`.

    Args:
        norm: its parameters, its epsilon and its shape are used.
        rows: shape (..., normalized_shape), floating.

    Returns:
        See `LayerNorm.forward`.
    """
    return normalized(rows, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def normalized(
    rows: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`normalize` by parameters that are given one by one, as `nn.LayerNorm` names them."""
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return F.layer_norm(rows, shape, weight, bias, eps)
    if weight is not None and bias is not None and _takes_one_pass(rows, weight, bias):
        found: Tensor = _OnePass.apply(rows, weight, bias, eps)  # type: ignore[no-untyped-call]
        return found
    weight, bias = (None if x is None else x.to(rows.dtype) for x in (weight, bias))
    casts = autocast_dtype(rows.device.type) is not None
    with torch.autocast(rows.device.type, enabled=False) if casts else nullcontext():
        return F.layer_norm(rows, shape, weight, bias, eps)


def _takes_one_pass(rows: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether our kernels compute it: on a GPU, of many rows, one dimension of which is normed."""
    if not rows.is_cuda or torch.compiler.is_compiling():  # which fuses it with what is around it
        return False
    width, tensors = rows.shape[-1], (rows, weight, bias)
    profile = kernels.profile_of(rows.device)
    return (
        weight.shape == bias.shape == (width,)
        and 0 < width <= kernels.MOST_NORM_COLUMNS
        and rows.numel() // width >= profile.rows(_FEWEST_ROWS)
        and profile.capability >= _LEAST_CAPABILITY
        and {type(x) for x in tensors} <= {Tensor, nn.Parameter}
        and {x.get_device() for x in tensors} == {torch.cuda.current_device()}
        and torch.float64 not in (weight.dtype, bias.dtype)
        # Of these `_OnePass` knows nothing.
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and kernels.has_triton()
    )


class _OnePass(torch.autograd.Function):
    """A LayerNorm of rows in half precision, by kernels that read and write each row once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        weight, bias = weight.contiguous(), bias.contiguous()
        out, numbers = kernels.norm_rows(rows.contiguous(), weight, bias, eps)
        ctx.save_for_backward(rows, weight, bias, numbers)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        rows, weight, bias, numbers = ctx.saved_tensors
        dout, contiguous = dout.contiguous(), rows.contiguous()
        if torch.is_grad_enabled():  # for gradients of these gradients
            rounded = [x.to(rows.dtype) for x in (weight, bias)]
            mean, rstd = numbers.view(2, *rows.shape[:-1], 1)
            drows, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
                dout, contiguous, list(weight.shape), mean, rstd, *rounded, [True, True, True]
            )
        else:
            drows, dweight, dbias = kernels.norm_gradients(dout, contiguous, numbers, weight)
        return drows, dweight.to(weight.dtype), dbias.to(bias.dtype), None
