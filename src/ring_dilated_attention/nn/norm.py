"""A LayerNorm that stays in half precision under autocast."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine import autocast_dtype


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, whose result under autocast has the dtype of a half-precision input.

    autocast makes `nn.LayerNorm` return float32, twice the memory of what comes in and of what the
    projection behind it reads. Means and variances are float32 here too; the weight and the bias
    are rounded to the dtype of the input. Their gradients are added up in float32, also on CPUs,
    where those of `nn.LayerNorm` are not.
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
    weight, bias = (None if x is None else x.to(rows.dtype) for x in (weight, bias))
    casts = autocast_dtype(rows.device.type) is not None
    with torch.autocast(rows.device.type, enabled=False) if casts else nullcontext():
        if rows.device.type != "cpu" or weight is None:
            return F.layer_norm(rows, shape, weight, bias, eps)
        # On CPUs that adds up the gradients of weight and bias in half precision; this does not.
        normal = F.layer_norm(rows, shape, None, None, eps)
        return normal * weight if bias is None else torch.addcmul(bias, normal, weight)
