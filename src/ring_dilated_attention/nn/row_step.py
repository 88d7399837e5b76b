"""A step of generation by a small model on a CPU: one token of one row of the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from ..decode import DilatedKVCache, RowAttention
from ..engine import autocast_dtype
from .config import LongNetConfig
from .hooks import is_plain
from .longnet_block import LongNetBlock
from .norm import LayerNorm
from .rope import is_plain_rope
from .step_block import is_plain_block
from .step_capture import TakeStep
from .token_ends import TokenEnds

if TYPE_CHECKING:
    from .token_generator import TokenGenerator

_TURNED = 64
"""Positions whose rotations are made together."""

_MOST_WIDTH = 512
"""Up to this width weights are copied, and operations take a CPU longer to begin than to do."""

_MOST_EMBEDDING = 1 << 19
"""Up to this many elements the embedding is copied, too: of more, a copy takes a CPU longer than it
saves in a hundred steps."""

_SQRT_HALF = math.sqrt(0.5)

_Linear: TypeAlias = tuple[Tensor, Tensor]
"""Weight, laid out by `_by_columns`, and bias."""

_Norm: TypeAlias = tuple[Tensor, Tensor, float]
"""Weight, bias and epsilon."""


class _Layer(NamedTuple):
    """What a step needs of a block; weights are laid out by `_by_columns`.

    Attributes:
        project: of value, query and key, one below the other; the query times the factor on scores.
        combine: weight and, as a last column, bias.
        expand: times sqrt(1/2).
        contract: weight times sqrt(1/2) and, as a last column, bias.
    """

    attention_norm: _Norm
    project: _Linear
    combine: Tensor
    mlp_norm: _Norm
    expand: _Linear
    contract: Tensor


class RowStep:
    """`LongNet.step` of one token of one row, in few operations and in memory that stays.

    A step of a small model takes a CPU about as long as its operations take to begin. So a product
    writes where the next operation reads, one product rotates query and key of all heads, and what
    the layers have in common is worked out once.

    Some weights are copied; the model's weights must stay as they are.

    Args:
        model: as `fits` says.
        caches: of its blocks, which hold the same positions.
        under_autocast: what takes a step under autocast, whose casts this does not follow.
    """

    def __init__(
        self, model: TokenGenerator, caches: Sequence[DilatedKVCache], under_autocast: TakeStep
    ) -> None:
        config, like = model.config, model.embedding.weight
        heads, width = config.num_heads, config.embed_dim
        kv_heads, head_dim = config.num_kv_heads or heads, width // heads
        self._under_autocast = under_autocast
        self._rope, self._caches, self._shape = model.rope, caches, (width,)
        turning = heads + kv_heads
        with torch.inference_mode(False), torch.no_grad():
            self._layers = [_layer_of(cast(LongNetBlock, block)) for block in model.blocks]
            # Query and key, rotated, then value, and query and key as they were.
            rows = like.new_empty(2 * turning + kv_heads, head_dim)
            self._embedded, self._unembed, self._factor = _embedding_of(like)
            self._norm = _norm_of(model.norm)
            # A bias is the last column of its weight, and these have a 1 behind them.
            self._attended, self._gated = (like.new_ones(n + 1) for n in (width, config.ffn_dim))
            self._expanded, self._gate = like.new_empty(config.ffn_dim), self._gated[:-1]
        self._turned, self._joint = rows[:turning], rows[turning:].view(-1)
        self._unturned = rows[turning + kv_heads :]
        query, out = (
            x.view(1, kv_heads, -1, head_dim) for x in (rows[:heads], self._attended[:-1])
        )
        key_value = rows[heads : turning + kv_heads].unsqueeze(0)
        self._attention = RowAttention(caches, query, key_value, out)
        self._rotations: dict[int, Tensor] = {}

    @staticmethod
    def fits(model: TokenGenerator, caches: Sequence[DilatedKVCache]) -> bool:
        """Whether this computes the steps of a model, which are many.

        Not of a wide model, whose arithmetic takes longer than that, nor of one whose modules have
        hooks, are of subclasses (adapters, quantised weights) or do not have weights of one dtype,
        or whose blocks have different patterns.
        """
        blocks, dtype = list(model.blocks), caches[0].keys.dtype
        return (
            model.config.embed_dim <= _MOST_WIDTH
            and getattr(model.embed, "__func__", None) is TokenEnds.embed
            and getattr(model.logits, "__func__", None) is TokenEnds.logits
            and is_plain_rope(model.rope)
            and is_plain(model.embedding, nn.Embedding)
            and model.embedding.max_norm is None
            and _is_plain_layer(model.norm, LayerNorm)
            and all(parameter.dtype == dtype for parameter in model.parameters())
            and all(_is_plain(block, model.config) for block in blocks)
            and all(cache.plan == caches[0].plan for cache in caches)
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
        if autocast_dtype("cpu") is not None:
            return self._under_autocast(tokens)
        attention, shape = self._attention, self._shape
        joint, attended, expanded = self._joint, self._attended, self._expanded
        gate, gated = self._gate, self._gated
        attention.begin()
        rotation = self._rotation(self._caches[0].known_lengths[0])
        row = torch.embedding(self._embedded, tokens.view(()))
        if self._factor != 1:
            row.mul_(self._factor)
        for number, layer in enumerate(self._layers):
            normed = torch.layer_norm(row, shape, *layer.attention_norm)
            weight, bias = layer.project
            torch.addmv(bias, weight, normed, out=joint)
            torch.mm(self._unturned, rotation, out=self._turned)
            attention.attend(number)
            row.addmv_(layer.combine, attended)
            normed = torch.layer_norm(row, shape, *layer.mlp_norm)
            weight, bias = layer.expand
            torch.addmv(bias, weight, normed, out=expanded)
            # The GELU of x is sqrt(1/2) (y + y erf(y)) where y = sqrt(1/2) x is what was expanded:
            # it takes less than half as long as F.gelu.
            torch.addcmul(expanded, expanded, torch.erf(expanded, out=gate), out=gate)
            row.addmv_(layer.contract, gated)
        attention.finish()
        normed = torch.layer_norm(row, shape, *self._norm)
        return torch.mv(self._unembed, normed).view(1, 1, -1)

    def _rotation(self, position: int) -> Tensor:
        """What a row of query or key is multiplied by, (head_dim, head_dim)."""
        found = self._rotations.get(position)
        if found is None:
            positions = torch.arange(position, position + _TURNED, device=self._joint.device)
            cos, sin = (table.squeeze(1) for table in self._rope.wide(positions))
            half = cos.shape[1] // 2
            matrices = self._joint.new_zeros(_TURNED, 2 * half, 2 * half)
            for apart, table in ((0, cos), (half, sin[:, half:]), (-half, sin[:, :half])):
                matrices.diagonal(apart, 1, 2).copy_(table)
            self._rotations = dict(enumerate(matrices.unbind(), position))
            found = self._rotations[position]
        return found


def _is_plain(block: nn.Module, config: LongNetConfig) -> bool:
    """Whether a block is what its class and the configuration say, all parameters given."""
    if not is_plain_block(block):
        return False
    block = cast(LongNetBlock, block)
    attention = block.attention
    norms = block.attention_norm, block.mlp_norm
    projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj
    return (
        attention.num_heads == config.num_heads
        and attention.num_kv_heads == (config.num_kv_heads or config.num_heads)
        and attention.head_slice is None
        and all(_is_plain_layer(norm, LayerNorm) for norm in norms)
        and all(
            _is_plain_layer(layer, nn.Linear)
            for layer in (*projections, block.expand, block.contract)
        )
        and block.expand.out_features == block.contract.in_features == config.ffn_dim
    )


def _is_plain_layer(layer: nn.Module, kind: type[nn.Module]) -> bool:
    return is_plain(layer, kind) and type(layer.bias) is nn.Parameter


def _embedding_of(weight: Tensor) -> tuple[Tensor, Tensor, float]:
    """What rows are taken of, what multiplies the last one, and the factor on rows that is left."""
    factor = math.sqrt(weight.shape[1])
    if weight.numel() > _MOST_EMBEDDING:
        return weight.detach(), weight.detach(), factor
    return weight * factor, _by_columns(weight), 1.0


def _layer_of(block: LongNetBlock) -> _Layer:
    attention = block.attention
    scale = attention.head_dim**-0.5 if attention.scale is None else attention.scale
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    weight = torch.cat([value.weight, query.weight * scale, key.weight])
    bias = torch.cat([value.bias, query.bias * scale, key.bias])
    return _Layer(
        _norm_of(block.attention_norm),
        (_by_columns(weight), bias),
        _with_bias(attention.out_proj, 1.0),
        _norm_of(block.mlp_norm),
        (_by_columns(block.expand.weight * _SQRT_HALF), block.expand.bias * _SQRT_HALF),
        _with_bias(block.contract, _SQRT_HALF),
    )


def _with_bias(linear: nn.Linear, factor: float) -> Tensor:
    """The weight times a factor and, as a last column, the bias: the product adds it."""
    return _by_columns(torch.cat([linear.weight * factor, linear.bias[:, None]], 1))


def _by_columns(weight: Tensor) -> Tensor:
    """A copy whose columns are contiguous: a CPU multiplies it by a row in half of the time."""
    return weight.t().contiguous().t()


def _norm_of(norm: nn.LayerNorm) -> _Norm:
    return norm.weight.detach(), norm.bias.detach(), norm.eps
