"""Heads of attention: their numbers, their projections, and which of them a rank has.

Tensor parallelism cuts the projections of query, key and value by columns, so that every rank makes
a few heads. Their number does not say which ones they are; their weights, DTensors, do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine import autocast_dtype
from ..parallel import own_part
from ..pattern import HeadSlice, check_positive_int
from .modules import is_plain

NARROW = 1024
"""The width up to which copies of weights take the GPU less time than the launches they save."""


def check_head_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int | None
) -> tuple[int, int, int, int]:
    """(embed_dim, num_heads, num_kv_heads, head_dim); raises unless the numbers fit together."""
    embed_dim = check_positive_int("embed_dim", embed_dim)
    num_heads = check_positive_int("num_heads", num_heads)
    if num_kv_heads is None:
        num_kv_heads = num_heads
    num_kv_heads = check_positive_int("num_kv_heads", num_kv_heads)
    if embed_dim % num_heads:
        raise ValueError(f"num_heads must divide embed_dim {embed_dim}; got {num_heads}")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads {num_heads}; got {num_kv_heads}")
    return embed_dim, num_heads, num_kv_heads, embed_dim // num_heads


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
    """
    rows = inputs[0]
    if any(x is not rows for x in inputs) or not _can_join(layers, rows):
        results: Sequence[Any] = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    else:
        weight = torch.cat([*(layer.weight for layer in layers)])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        joint = F.linear(rows, weight, torch.cat([*biases]) if biases else None)
        results = torch.split(joint, [layer.out_features for layer in layers], dim=-1)
    return [result.unflatten(-1, (-1, head_dim)) for result in results]


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


class Heads(NamedTuple):
    """How many heads: of a layer, or those of them that a rank has."""

    query: int
    kv: int

    def __str__(self) -> str:
        return f"{self.query} query and {self.kv} KV heads"

    def is_fraction_of(self, layer: Heads) -> bool:
        """Whether these are as many KV heads of a layer as they are query heads, by fraction."""
        return self.query * layer.kv == self.kv * layer.query


def slice_of_heads(module: Any, query: Tensor, key: Tensor) -> HeadSlice | None:
    """The KV heads that a module of attention computes on this rank; None: all of them.

    Args:
        module: with `num_heads`, with `num_kv_heads` if there are fewer, with projections `q_proj`
            and `k_proj`, and perhaps with a `head_slice`, which is then the answer.
        query: what its projections made: (batch, local_sequence, heads, head_dim).
        key: what `k_proj` made: (batch, local_sequence, kv_heads, head_dim).

    Raises:
        ValueError: see `slice_of_projections`.
    """
    given: HeadSlice | None = getattr(module, "head_slice", None)
    if given is not None:
        return given
    layer = Heads(module.num_heads, getattr(module, "num_kv_heads", module.num_heads))
    own = Heads(query.shape[2], key.shape[2])
    # A module in place of a linear layer need not have a weight.
    weights = (getattr(module.q_proj, "weight", None), getattr(module.k_proj, "weight", None))
    return slice_of_projections(layer, own, weights, type(module).__name__)


def slice_of_projections(
    layer: Heads, own: Heads, weights: tuple[Any, Any], name: str
) -> HeadSlice | None:
    """The KV heads that this rank has of a layer.

    Args:
        layer: heads of the whole layer.
        own: heads that the projections have made on this rank.
        weights: of the projections of query and key, whose rows follow the order of the heads;
            None: it is not known which they are.
        name: of the layer, for messages.

    Returns:
        None where the rank has all heads.

    Raises:
        ValueError: the weights do not say which heads they are, or not all KV heads of the query
            heads are on this rank.
    """
    if own == layer:
        return None
    first = [_first_head(*each) for each in zip(weights, layer, own, strict=True)]
    known = [head for head in first if head is not None]
    if len(known) < 2 or not Heads(*known).is_fraction_of(layer) or not own.is_fraction_of(layer):
        raise ValueError(
            f"{name} has {own} on this rank, of {layer}, and its weights do not say which: tensor "
            "parallelism must shard the rows of both projections alike, by whole heads, over ranks "
            "whose number divides both (ColwiseParallel). Else name the heads by head_slice="
            "(start, stop, total), in KV heads"
        )
    return HeadSlice(known[1], known[1] + own.kv, layer.kv)


def _first_head(weight: Any, total: int, count: int) -> int | None:
    """The first of `count` heads of `total` whose rows of a weight this rank has, if it has."""
    rows = None if weight is None else rows_of(weight)
    if rows is None:
        return None
    whole = weight.shape[0]
    head, apart = divmod(rows.start * total, whole)
    is_whole = whole % total == 0 and not apart and len(rows) * total == count * whole
    return head if is_whole else None


def rows_of(weight: Tensor) -> range | None:
    """The rows of a DTensor that this rank has; None of a tensor that is whole, or cut otherwise.

    Rows are cut as `torch.chunk` cuts them, over one dimension of the mesh after the other.
    """
    mesh: Any = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.get_coordinate() is None:
        return None
    placements: Any = weight.placements  # type: ignore[attr-defined]
    if any(hasattr(x, "split_factor") for x in placements):
        return None  # FSDP over tensor parallelism, not gathered
    cuts = [x.is_shard(0) for x in placements]
    return own_part(mesh, cuts, weight.shape[0]) if any(cuts) else None
