"""A block of the language model as a step of generation goes through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decode import DilatedKVCache, Step, attend_in_step
from ..engine import autocast_dtype
from .attention import MultiheadDilatedAttention
from .block import RowWise, behind_attention
from .hooks import is_plain, runs_hooks
from .longnet_block import LongNetBlock
from .norm import LayerNorm, normalized
from .projections import NARROW
from .rope import WideRotation

_Projection: TypeAlias = Callable[[Tensor], tuple[Tensor, Sequence[int]]]
"""From rows to query, key and value side by side, and how many columns each has."""


class StepBlock:
    """A `LongNetBlock` for a few rows: the same functions, with its parameters looked up once.

    Calling a module takes a CPU about as long as multiplying a row by its weights, if these are
    few. Modules with hooks, of subclasses (adapters, quantised weights) or with sharded weights are
    called as they are; so is the block, where that holds for it or its attention.

    Args:
        block: whose parameters are read in every call.
        chunk_rows: with more rows, the block is called with it; None: never.
        joins: whether copies of the weights of query, key and value are made side by side, for one
            product of them all, where these are plain and at most `projections.NARROW` wide. Those
            weights are then read now, and not again.
    """

    def __init__(self, block: LongNetBlock, *, chunk_rows: int | None, joins: bool) -> None:
        attention = block.attention
        self._block, self._chunk_rows = block, chunk_rows
        self._is_plain = is_plain_block(block)
        self._scale, self._backend = attention.scale, attention.backend
        self._head_dim = attention.head_dim
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._project = _projection(layers, joins=joins)
        self._attention_norm, self._mlp_norm = map(_norm, (block.attention_norm, block.mlp_norm))
        self._combine, self._expand, self._contract = map(
            _linear, (attention.out_proj, block.expand, block.contract)
        )

    def __call__(
        self, hidden: Tensor, rotation: WideRotation, cache: DilatedKVCache, step: Step
    ) -> Tensor:
        """Go through the block, without gradients.

        Args:
            hidden: shape (batch, rows, embed_dim), of the next positions.
            rotation: of these positions.
            cache: of the block; it has the positions afterwards.
            step: what the blocks share.

        Returns:
            The shape and dtype of `hidden`.
        """
        most = self._chunk_rows
        attend = partial(
            attend_in_step, cache=cache, scale=self._scale, backend=self._backend, step=step
        )
        if not self._is_plain or (most is not None and hidden.shape[1] > most):
            found: Tensor = self._block(hidden, *rotation.narrow(), chunk_rows=most, attend=attend)
            return found
        attended = attend(*self._heads(hidden, rotation)).flatten(2)
        return behind_attention(hidden, attended, self._combine, self._mlp_norm, self._mlp)

    def _heads(self, hidden: Tensor, rotation: WideRotation) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, by heads."""
        joint, columns = self._project(self._attention_norm(hidden))
        heads = joint.view(*joint.shape[:2], -1, self._head_dim)
        query_heads, kv_heads = columns[0] // self._head_dim, columns[1] // self._head_dim
        turning, value = heads.split_with_sizes((query_heads + kv_heads, kv_heads), 2)
        query, key = rotation.turned(turning).split_with_sizes((query_heads, kv_heads), 2)
        return query, key, value

    def _mlp(self, normed: Tensor) -> Tensor:
        return self._contract(F.gelu(self._expand(normed)))


def is_plain_block(block: nn.Module) -> bool:
    """Whether a block and its attention, though not their layers, are what their classes say."""
    return (
        type(block) is LongNetBlock
        and type(block.attention) is MultiheadDilatedAttention
        and not vars(block.attention).keys() & {"project", "combine"}  # set on it alone
        and block.attention.norm is None
        and not runs_hooks(block)
    )


def _linear(layer: nn.Linear) -> RowWise:
    if not is_plain(layer, nn.Linear):
        return layer
    return partial(F.linear, weight=layer.weight, bias=layer.bias)


def _norm(norm: LayerNorm) -> RowWise:
    if not is_plain(norm, LayerNorm):
        return norm
    return partial(
        normalized, shape=norm.normalized_shape, weight=norm.weight, bias=norm.bias, eps=norm.eps
    )


def _projection(layers: Sequence[nn.Linear], *, joins: bool) -> _Projection:
    functions = [_linear(layer) for layer in layers]

    def one_by_one(rows: Tensor) -> tuple[Tensor, Sequence[int]]:
        parts = [function(rows) for function in functions]
        return torch.cat(parts, -1), [part.shape[-1] for part in parts]

    if not joins or not all(is_plain(layer, nn.Linear) for layer in layers):
        return one_by_one
    like = layers[0]
    if like.in_features > NARROW or autocast_dtype(like.weight.device.type) is not None:
        return one_by_one
    if len({(layer.bias is None, layer.weight.dtype) for layer in layers}) > 1:
        return one_by_one
    columns = [layer.out_features for layer in layers]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    bias = torch.cat(biases) if biases else None
    return lambda rows: (F.linear(rows, weight, bias), columns)
