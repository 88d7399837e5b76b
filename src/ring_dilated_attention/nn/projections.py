"""Several linear layers of the same rows, in one product where that costs no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine import autocast_dtype
from ..parallel import is_dtensor
from .hooks import is_plain

NARROW = 1024
"""The width up to which copies of weights take the GPU less time than the launches they save."""


def project_heads(
    layers: Sequence[nn.Linear], inputs: Sequence[Tensor], head_dim: int
) -> list[Tensor]:
    """What each layer makes of its input, by heads.

    Under autocast, which copies weights to half precision anyway, layers of one and the same input
    share a product: copies of their weights are made side by side, and the input is cast once,
    forward and backward. Few rows of a wide model, as in decoding, are projected one by one, since
    autocast keeps its copies of the weights from call to call. Layers with hooks, of subclasses
    (adapters, quantised weights) or with sharded weights (DTensor) are called one by one.

    Args:
        layers: of equal `in_features`.
        inputs: of each layer, shape (..., in_features).
        head_dim: divides each layer's `out_features`.

    Returns:
        Of each layer, shape (..., heads, head_dim): views of one tensor where they share a product.

    Raises:
        ValueError: there are no rows, and torch has no product of none with these sharded weights.
    """
    rows = inputs[0]
    if any(x is not rows for x in inputs) or not _can_join(layers, rows):
        results: Sequence[Any] = _one_by_one(layers, inputs)
    else:
        weight = torch.cat([*(layer.weight for layer in layers)])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        joint = F.linear(rows, weight, torch.cat([*biases]) if biases else None)
        results = torch.split(joint, [layer.out_features for layer in layers], dim=-1)
    return [result.unflatten(-1, (-1, head_dim)) for result in results]


def _one_by_one(layers: Sequence[nn.Linear], inputs: Sequence[Tensor]) -> list[Any]:
    if inputs[0].numel() or not is_dtensor(getattr(layers[0], "weight", None)):
        return [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    try:
        return [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    except RuntimeError as error:
        raise ValueError(
            f"this rank has no rows, shape {tuple(inputs[0].shape)}, and torch does not compute "
            "the product of none with a weight that is a DTensor (tensor parallelism): use a "
            "layout that gives every rank some positions"
        ) from error


def _can_join(layers: Sequence[nn.Linear], rows: Tensor) -> bool:
    dtype = autocast_dtype(rows.device.type)
    if len(layers) < 2 or dtype in (None, torch.float32) or rows.dtype == torch.float64:
        return False
    width = rows.shape[-1]
    if width > NARROW and not torch.compiler.is_compiling() and rows.numel() < width**2:
        return False
    return all(
        is_plain(layer, nn.Linear)
        and layer.weight.dtype == torch.float32
        and (layer.bias is None) == (layers[0].bias is None)
        # Else gradients of some would keep the memory of all.
        and {p.requires_grad for p in layer.parameters()} == {layers[0].weight.requires_grad}
        for layer in layers
    )
