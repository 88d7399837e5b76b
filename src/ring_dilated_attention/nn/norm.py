"""A LayerNorm that stays in half precision under autocast."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine import autocast_dtype
from ..kernels import normalizes_gelu
from ..parallel import is_dtensor
from ..torch_op import gelu_norm
from .modules import is_plain


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
    """What `LayerNorm.forward` does, by the parameters of any `nn.LayerNorm`."""
    shape, eps = norm.normalized_shape, norm.eps
    if rows.dtype not in (torch.bfloat16, torch.float16):
        return F.layer_norm(rows, shape, norm.weight, norm.bias, eps)
    weight, bias = (None if x is None else x.to(rows.dtype) for x in (norm.weight, norm.bias))
    casts = autocast_dtype(rows.device.type) is not None
    with torch.autocast(rows.device.type, enabled=False) if casts else nullcontext():
        if rows.device.type != "cpu" or weight is None:
            return F.layer_norm(rows, shape, weight, bias, eps)
        # On CPUs that adds up the gradients of weight and bias in half precision; this does not.
        normal = F.layer_norm(rows, shape, None, None, eps)
        return normal * weight if bias is None else torch.addcmul(bias, normal, weight)


def normalize_gelu(norm: nn.Module, rows: Tensor) -> Tensor:
    """``norm(F.gelu(rows))``, where `fits_one_kernel` by reading and writing each row once."""
    if not fits_one_kernel(norm, rows):
        found: Tensor = norm(F.gelu(rows))
        return found
    weight, bias = norm.weight, norm.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    assert isinstance(norm.eps, float)
    return gelu_norm(rows, weight, bias, norm.eps)


def fits_one_kernel(norm: nn.Module, rows: Tensor) -> bool:
    """Whether `normalize_gelu` takes one kernel for this module and these rows.

    It does for what the kernel was measured on, rows of half precision on GPUs, and where calling
    the module would do nothing else.
    """
    return (
        rows.is_cuda
        and rows.dtype in (torch.bfloat16, torch.float16)
        and is_plain(norm, LayerNorm)
        and type(norm.bias) is nn.Parameter
        and norm.normalized_shape == rows.shape[-1:]
        and not is_dtensor(rows)
        and (torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active())
        and _normalizes_gelu(rows.device, int(norm.normalized_shape[-1]))
    )


def _normalizes_gelu(device: torch.device, width: int) -> bool:
    return normalizes_gelu(device, width)


vars(_normalizes_gelu)["_dynamo_marked_constant"] = True  # as in slide.py
