"""A LayerNorm that stays in half precision under autocast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, whose result under autocast has the dtype of a half-precision input.

    autocast makes `nn.LayerNorm` return float32, twice the memory of what comes in and of what the
    projection behind it reads. Means and variances are float32 here too; the weight and the bias
    are rounded to the dtype of the input.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimension.

        Args:
            input: shape (..., normalized_shape), floating.

        Returns:
            The shape of `input`; its dtype where that is bfloat16 or float16, else that of
            `nn.LayerNorm`.
        """
        if input.dtype not in (torch.bfloat16, torch.float16):
            return super().forward(input)
        weight, bias = (
            None if parameter is None else parameter.to(input.dtype)
            for parameter in (self.weight, self.bias)
        )
        with torch.autocast(input.device.type, enabled=False):
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)
