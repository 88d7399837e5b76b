"""A step of generation by a small model on a CPU: one token of one row of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..decode import DilatedKVCache, RowAttention
from ..engine import autocast_dtype
from .attention import MultiheadDilatedAttention
from .hooks import is_plain, runs_hooks
from .longnet_block import LongNetBlock
from .norm import LayerNorm
from .projections import NARROW

if TYPE_CHECKING:
    from .token_generator import TokenGenerator

_TURNED = 16
"""Positions whose rotations are made together."""


class _Layer(NamedTuple):
    """A block's parameters: of each norm and each linear layer its weight and its bias.

    Attributes:
        project: query, key and value, one below the other; the query times the factor on scores.
    """

    attention_norm: LayerNorm
    project: tuple[Tensor, Tensor]
    combine: tuple[Tensor, Tensor]
    mlp_norm: LayerNorm
    expand: tuple[Tensor, Tensor]
    contract: tuple[Tensor, Tensor]


class RowStep:
    """`LongNet.step` of one token of one row, in few operations and in memory that stays.

    A step of a small model takes a CPU about as long as its operations take to begin. So a product
    writes where the next operation reads, one product rotates query and key of all heads, and what
    the layers have in common is worked out once.

    Weights of query, key and value are copied; the model's weights must stay as they are.

    Args:
        model: as `fits` says.
        caches: of its blocks, which hold the same positions.
    """

    def __init__(self, model: TokenGenerator, caches: Sequence[DilatedKVCache]) -> None:
        config, like = model.config, model.embedding.weight
        heads, width = config.num_heads, config.embed_dim
        kv_heads, head_dim = config.num_kv_heads or heads, width // heads
        self._model, self._caches, self._shape = model, caches, (width,)
        turning = heads + kv_heads
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [_layer_of(cast(LongNetBlock, block)) for block in model.blocks]
            joint = like.new_empty((turning + kv_heads) * head_dim)
            turned = like.new_empty(turning, head_dim)
            self._normed, self._added = like.new_empty(width), like.new_empty(width)
            self._expanded = like.new_empty(config.ffn_dim)
        self._joint, self._turned = joint, turned
        self._unturned, value = joint.view(-1, head_dim).split_with_sizes((turning, kv_heads))
        query, key = turned.split_with_sizes((heads, kv_heads))
        self._attention = RowAttention(
            caches, query.view(1, kv_heads, -1, head_dim), key.unsqueeze(0), value.unsqueeze(0)
        )
        self._attended = self._attention.out.view(width)
        self._rotations: dict[int, Tensor] = {}

    @staticmethod
    def fits(model: TokenGenerator, caches: Sequence[DilatedKVCache]) -> bool:
        """Whether this computes the steps of a model, which are many.

        Not of a wide model, whose arithmetic takes longer than that, nor of one whose modules have
        hooks, are of subclasses (adapters, quantised weights) or do not have weights of one dtype.
        """
        blocks, dtype = list(model.blocks), caches[0].keys.dtype
        return (
            model.config.embed_dim <= NARROW
            and all(parameter.dtype == dtype for parameter in model.parameters())
            and all(_is_plain(block) for block in blocks)
            and all(
                RowAttention.fits(cache, cast(LongNetBlock, block).attention.backend)
                for block, cache in zip(blocks, caches, strict=True)
            )
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits of what follows the next token; the caches then hold it.

        Args:
            tokens: int64, shape (1, 1).

        Returns:
            Shape (1, 1, vocab_size).
        """
        attention, shape = self._attention, self._shape
        joint, attended, normed, expanded = self._joint, self._attended, self._normed, self._expanded
        attention.begin()
        rotation = self._rotation(self._caches[0].known_lengths[0])
        hidden = self._model.embed(tokens)
        row = hidden.view(-1)
        for number, layer in enumerate(self._layers):
            norm = layer.attention_norm
            normed = F.layer_norm(row, shape, norm.weight, norm.bias, norm.eps)
            weight, bias = layer.project
            torch.addmv(bias, weight, normed, out=joint)
            torch.mm(self._unturned, rotation, out=self._turned)
            attention.attend(number)
            weight, bias = layer.combine
            row.addmv_(weight, attended).add_(bias)
            norm = layer.mlp_norm
            normed = F.layer_norm(row, shape, norm.weight, norm.bias, norm.eps)
            weight, bias = layer.expand
            torch.addmv(bias, weight, normed, out=expanded)
            weight, bias = layer.contract
            row.addmv_(weight, F.gelu(expanded)).add_(bias)
        attention.finish()
        return self._model.logits(hidden)

    def _rotation(self, position: int) -> Tensor:
        """What a row of query or key is multiplied by, (head_dim, head_dim)."""
        found = self._rotations.get(position)
        if found is None:
            positions = torch.arange(position, position + _TURNED)
            cos, sin = (table.squeeze(1) for table in self._model.rope.wide(positions))
            matrices = cos.diag_embed() + sin.diag_embed().roll(cos.shape[1] // 2, 1)
            both = zip(positions.tolist(), matrices.to(self._joint.dtype).unbind(), strict=True)
            self._rotations = dict(both)
            found = self._rotations[position]
        return found


def _is_plain(block: nn.Module) -> bool:
    if type(block) is not LongNetBlock or runs_hooks(block):
        return False
    attention = block.attention
    norms = block.attention_norm, block.mlp_norm
    linears = (
        attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj,
        block.expand, block.contract,
    )  # fmt: skip
    return (
        type(attention) is MultiheadDilatedAttention
        and attention.norm is None
        and attention.head_slice is None
        and all(is_plain(norm, LayerNorm) for norm in norms)
        and all(is_plain(layer, nn.Linear) and layer.bias is not None for layer in linears)
    )


def _layer_of(block: LongNetBlock) -> _Layer:
    attention = block.attention
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    weight = torch.cat([query.weight * scale, key.weight, value.weight])
    bias = torch.cat([query.bias * scale, key.bias, value.bias])
    combine, expand, contract = (
        (layer.weight.detach(), layer.bias.detach())
        for layer in (attention.out_proj, block.expand, block.contract)
    )
    return _Layer(
        block.attention_norm, (weight, bias), combine, block.mlp_norm, expand, contract
    )
