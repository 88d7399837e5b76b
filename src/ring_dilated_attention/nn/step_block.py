"""A block of the language model as a step of generation goes through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels
from ..decode import DilatedKVCache, Step, attend_in_step, steps_by_kernel
from ..engine import autocast_dtype, kernels_on
from .attention import MultiheadDilatedAttention
from .block import Attend, RowWise, behind_attention
from .hooks import is_plain, runs_hooks
from .longnet_block import LongNetBlock
from .norm import LayerNorm, normalized
from .projections import NARROW
from .rope import WideRotation


class Residual(NamedTuple):
    """The residual stream of a few rows, and what is still to be added to it.

    Attributes:
        rows: (batch, rows, embed_dim).
        addition: as many elements, row after row, in the same dtype; None: nothing is to be added.
    """

    rows: Tensor
    addition: Tensor | None = None

    def total(self) -> Tensor:
        """The residual stream: the shape and dtype of `rows`."""
        return self.rows if self.addition is None else self.rows + self.addition.view_as(self.rows)


class StepBlock:
    """A `LongNetBlock` for a few rows: the same functions, with its parameters looked up once.

    Calling a module takes a CPU about as long as multiplying a row by its weights, if these are
    few. Where the decoding kernels compute attention, kernels also compute sums, norms and the
    rotation, of rows in the dtype of all weights. Modules with hooks, of subclasses (adapters,
    quantised weights) or with sharded weights are called as they are; so is the block, where that
    holds for it or its attention.

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
        layers = [_linear(x) for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
        others = [_linear(x) for x in (attention.out_proj, block.expand, block.contract)]
        self._attention_norm, self._mlp_norm = map(_norm, (block.attention_norm, block.mlp_norm))
        self._combine, self._expand, self._contract = others
        self._layers, self._joint = layers, _joint(layers) if joins else None
        norms = self._attention_norm, self._mlp_norm
        self._by_kernels = _kind_by_kernel(norms, (*layers, *others))

    def __call__(
        self, residual: Residual, rotation: WideRotation, cache: DilatedKVCache, step: Step
    ) -> Residual:
        """Go through the block, without gradients.

        Args:
            residual: in front of the block, of the next positions.
            rotation: of these positions.
            cache: of the block; it has the positions afterwards.
            step: what the blocks share.

        Returns:
            Behind the block.
        """
        rows, most = residual.rows, self._chunk_rows
        attend = partial(
            attend_in_step, cache=cache, scale=self._scale, backend=self._backend, step=step
        )
        if not self._is_plain or (most is not None and rows.shape[1] > most):
            hidden, tables = residual.total(), rotation.narrow()
            return Residual(self._block(hidden, *tables, chunk_rows=most, attend=attend))
        if self._is_by_kernel(rows, rotation, cache):
            with kernels_on(rows.device):
                return self._by_kernel(residual, rotation, attend)
        hidden = residual.total()
        attended = attend(*self._heads(hidden, rotation)).flatten(2)
        return Residual(
            behind_attention(hidden, attended, self._combine, self._mlp_norm, self._mlp)
        )

    def _is_by_kernel(self, rows: Tensor, rotation: WideRotation, cache: DilatedKVCache) -> bool:
        """Whether kernels compute what stands between the products."""
        return (
            self._by_kernels == (rows.dtype, rows.device, rows.shape[-1])
            and rows.dtype == cache.keys.dtype
            and type(rows) is Tensor
            and rows.is_contiguous()
            and not torch.compiler.is_compiling()  # which makes kernels of its own
            and steps_by_kernel(cache, self._backend)
            and autocast_dtype(rows.device.type) is None
            and rotation.is_of(rows.shape[:2], self._head_dim)
        )

    def _by_kernel(self, residual: Residual, rotation: WideRotation, attend: Attend) -> Residual:
        """`__call__` by kernels: everything but attention has the shape (rows, columns)."""
        batch, count, _ = residual.rows.shape
        hidden, normed = self._sum_and_norm(residual, self._attention_norm)
        if self._joint is None:
            parts: Sequence[Tensor] = [layer(normed) for layer in self._layers]
        else:
            parts = self._joint.product(normed).split_with_sizes(self._joint.columns, -1)
        # In place: a plain linear layer has made them for nobody else.
        kernels.turn_heads_(parts[0], parts[1], *rotation)
        attended = attend(*[x.view(batch, count, -1, self._head_dim) for x in parts])
        combined = self._combine(attended.reshape(batch * count, -1))
        hidden, normed = self._sum_and_norm(Residual(hidden, combined), self._mlp_norm)
        return Residual(hidden, self._mlp(normed))

    @staticmethod
    def _sum_and_norm(residual: Residual, norm: RowWise) -> tuple[Tensor, Tensor]:
        """The residual stream; and the norm of its rows, of shape (rows, columns)."""
        assert isinstance(norm, _Norm)
        assert norm.bias is not None
        return kernels.norm_of_sum(*residual, norm.weight, norm.bias, norm.eps)

    def _heads(self, hidden: Tensor, rotation: WideRotation) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, by heads."""
        normed = self._attention_norm(hidden)
        if self._joint is None:
            parts = [layer(normed) for layer in self._layers]
            joint = torch.cat(parts, -1)
            columns: Sequence[int] = [part.shape[-1] for part in parts]
        else:
            joint, columns = self._joint.product(normed), self._joint.columns
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


@dataclass(slots=True)
class _Linear:
    """A plain linear layer, by its parameters."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)


class _Joint(NamedTuple):
    """Linear layers of the same rows, one below the other: how many columns each has."""

    product: _Linear
    columns: Sequence[int]


@dataclass(slots=True)
class _Norm:
    """A plain `LayerNorm`, by its parameters."""

    shape: tuple[int, ...]
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        return normalized(rows, self.shape, self.weight, self.bias, self.eps)


def _linear(layer: nn.Linear) -> RowWise:
    return _Linear(layer.weight, layer.bias) if is_plain(layer, nn.Linear) else layer


def _norm(norm: LayerNorm) -> RowWise:
    if not is_plain(norm, LayerNorm):
        return norm
    return _Norm(norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _joint(layers: Sequence[RowWise]) -> _Joint | None:
    """One product of copies of their weights; None where they are not plain, narrow and alike."""
    plain = [layer for layer in layers if isinstance(layer, _Linear)]
    like = plain[0].weight if len(plain) == len(layers) else None
    if like is None or like.shape[1] > NARROW or autocast_dtype(like.device.type) is not None:
        return None
    if len({(layer.bias is None, layer.weight.dtype) for layer in plain}) > 1:
        return None
    weight = torch.cat([layer.weight.detach() for layer in plain])
    biases = [layer.bias.detach() for layer in plain if layer.bias is not None]
    product = _Linear(weight, torch.cat(biases) if biases else None)
    return _Joint(product, [len(layer.weight) for layer in plain])


def _kind_by_kernel(
    norms: Sequence[RowWise], layers: Sequence[RowWise]
) -> tuple[torch.dtype, torch.device, int] | None:
    """Of rows, between whose products kernels compute, dtype, device and width; None: they do not.

    Args:
        norms: of attention and of the MLP.
        layers: of query, key, value, out, and the two of the MLP.
    """
    if not all(isinstance(layer, _Linear) for layer in layers):
        return None
    weights = [cast(_Linear, layer).weight for layer in layers]
    width = weights[0].shape[1]
    if width > kernels.MOST_WIDTH or not weights[3].shape[0] == weights[5].shape[0] == width:
        return None
    for norm in norms:
        if not isinstance(norm, _Norm) or norm.bias is None or norm.shape != (width,):
            return None
        if not (norm.weight.is_contiguous() and norm.bias.is_contiguous()):
            return None
        weights += norm.weight, norm.bias
    kind = weights[0].dtype, weights[0].device
    return (*kind, width) if all((x.dtype, x.device) == kind for x in weights) else None
