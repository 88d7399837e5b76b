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
from ..torch_op import in_forward_mode
from .attention import MultiheadDilatedAttention
from .block import Attend, RowWise, behind_attention
from .hooks import is_plain, runs_hooks
from .longnet_block import LongNetBlock
from .norm import LayerNorm, normalized
from .projections import NARROW
from .rope import WideRotation


class Residual(NamedTuple):
    """The residual stream of a few rows, and an addition that the kernel of the next norm makes.

    Attributes:
        rows: (batch, rows, embed_dim).
        addition: contiguous, as many elements, in the same dtype; None: nothing is to be added.
    """

    rows: Tensor
    addition: Tensor | None = None

    def total(self) -> Tensor:
        """The residual stream: the shape and dtype of `rows`."""
        return self.rows if self.addition is None else self.rows + self.addition.view_as(self.rows)


class StepBlock:
    """A `LongNetBlock` for a few rows: the same functions, with its parameters looked up once.

    Calling a module takes a CPU about as long as multiplying a row by its weights, if these are
    few. Where the decoding kernels compute attention to the cache, Triton kernels also compute the
    sums, the norms and the rotation, and the products of few rows by weights that are not wide, if
    all modules are plain, all parameters have the dtype of the cache, norms have a bias and
    autocast is off. Modules with hooks, of subclasses (adapters,
    quantised weights) or with sharded weights are called as they are; so is the block, where that
    holds for it or its attention.

    Args:
        block: whose parameters are read in every call.
        chunk_rows: with more rows, the block is called with it; None: never.
        joins: whether copies of the weights of query, key and value are made side by side, for one
            product of them all, where these are plain and at most `projections.NARROW` wide. Those
            weights are then read in the first call that needs them so, and not again.
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
        self._layers, self._joins = layers, joins
        self._joint: _Joint | None = None
        norms = self._attention_norm, self._mlp_norm
        self._by_kernels = _kind_by_kernel(norms, (*layers, *others))
        self._products = None
        if self._by_kernels is not None:
            self._products = _products(norms, (*layers, *others), self._head_dim)

    def __call__(
        self, residual: Residual, rotation: WideRotation, cache: DilatedKVCache, step: Step
    ) -> Residual:
        """Go through the block, without gradients.

        Args:
            residual: the residual stream in front of the block, of the next positions.
            rotation: of these positions.
            cache: of the block; it has the positions afterwards.
            step: what the blocks share.

        Returns:
            The residual stream behind the block.
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
                if self._products is not None and kernels.computes_products(rows):
                    return Residual(
                        _by_products(residual.total(), self._products, rotation, attend)
                    )
                return self._by_kernel(residual, rotation, attend)
        hidden = residual.total()
        attended = attend(*self._heads(hidden, rotation)).flatten(2)
        return Residual(
            behind_attention(hidden, attended, self._combine, self._mlp_norm, self._mlp)
        )

    def _is_by_kernel(self, rows: Tensor, rotation: WideRotation, cache: DilatedKVCache) -> bool:
        """Whether Triton kernels compute the sums, the norms and the rotation."""
        kind = rows.dtype, rows.device
        if self._by_kernels != (*kind, rows.shape[-1]) or type(rows) is not Tensor:
            return False
        if (cache.keys.dtype, cache.keys.device) != kind or not _is_readable(rows):
            return False
        # The compiler merges these operations itself, and neither it nor tangents pass a kernel.
        if torch.compiler.is_compiling() or in_forward_mode():
            return False
        if autocast_dtype(rows.device.type) is not None:
            return False
        try:
            by_kernel = steps_by_kernel(cache, self._backend)
        except ValueError:  # attention raises it, and tells the other ranks
            return False
        return by_kernel and rotation.fits_kernels(rows, self._head_dim)

    def _by_kernel(self, residual: Residual, rotation: WideRotation, attend: Attend) -> Residual:
        """`__call__` by Triton kernels: what is not attention's has the shape (rows, columns)."""
        batch, count, _ = residual.rows.shape
        hidden, normed = self._sum_and_norm(residual, self._attention_norm)
        joint = self._joined()
        if joint is None:
            parts: Sequence[Tensor] = [layer(normed) for layer in self._layers]
        else:
            parts = joint.product(normed).split_with_sizes(joint.columns, -1)
        # In place: the products have just been allocated, and nothing else refers to them.
        kernels.turn_heads_(parts[0], parts[1], *rotation)
        attended = attend(*[x.view(batch, count, -1, self._head_dim) for x in parts])
        combined = self._combine(attended.reshape(batch * count, -1))
        hidden, normed = self._sum_and_norm(Residual(hidden, combined), self._mlp_norm)
        return Residual(hidden, self._mlp(normed))

    def _joined(self) -> _Joint | None:
        """Copies of the weights of query, key and value, made when they are first needed."""
        if self._joins:
            self._joint, self._joins = _joint(self._layers), False
        return self._joint

    @staticmethod
    def _sum_and_norm(residual: Residual, norm: RowWise) -> tuple[Tensor, Tensor]:
        """The residual stream; and the norm of its rows, of shape (rows, columns)."""
        assert isinstance(norm, _Norm)
        assert norm.bias is not None
        return kernels.norm_of_sum(*residual, norm.weight, norm.bias, norm.eps)

    def _heads(self, hidden: Tensor, rotation: WideRotation) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, by heads."""
        normed = self._attention_norm(hidden)
        joint = self._joined()
        if joint is None:
            parts = [layer(normed) for layer in self._layers]
            columns: Sequence[int] = [part.shape[-1] for part in parts]
            rows = torch.cat(parts, -1)
        else:
            rows, columns = joint.product(normed), joint.columns
        heads = rows.view(*rows.shape[:2], -1, self._head_dim)
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
    """Linear layers of the same rows in one product; `columns` of each."""

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
    if not is_plain(layer, nn.Linear):
        return layer
    return _Linear(*_weight_and_bias(layer))


def _norm(norm: LayerNorm) -> RowWise:
    if not is_plain(norm, LayerNorm):
        return norm
    return _Norm(norm.normalized_shape, *_weight_and_bias(norm), norm.eps)


def _weight_and_bias(layer: nn.Linear | LayerNorm) -> tuple[Tensor, Tensor | None]:
    """Of a module that `is_plain`, without asking `nn.Module` for each, as there."""
    own = layer._parameters
    if "bias" in own:
        return cast(Tensor, own["weight"]), own["bias"]
    return cast(Tensor, own["weight"]), layer.bias


def _joint(layers: Sequence[RowWise]) -> _Joint | None:
    """Copies of their weights in one product.

    None where a layer is not a plain `nn.Linear`, autocast is on, the rows are wider than `NARROW`,
    or the layers differ in dtype or in whether they have a bias.
    """
    plain = [layer for layer in layers if isinstance(layer, _Linear)]
    if len(plain) < len(layers) or any(layer.weight.dim() != 2 for layer in plain):
        return None
    like = plain[0].weight
    if like.shape[1] > NARROW or autocast_dtype(like.device.type) is not None:
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
    """The dtype, device and width of the rows that kernels take between these layers, if any.

    Args:
        norms: of attention and of the MLP.
        layers: of query, key, value, out, and the two of the MLP.
    """
    parameters: list[Tensor] = []
    for layer in layers:
        if not isinstance(layer, _Linear) or layer.weight.dim() != 2:
            return None
        parameters += layer.weight, *([] if layer.bias is None else [layer.bias])
    weights = [cast(_Linear, layer).weight for layer in layers]
    width = weights[0].shape[1]
    if width > kernels.MOST_WIDTH or not weights[3].shape[0] == weights[5].shape[0] == width:
        return None
    for norm in norms:
        if not isinstance(norm, _Norm) or norm.shape != (width,):
            return None
        for x in (norm.weight, norm.bias):
            if x is None or x.shape != (width,) or not _is_readable(x):
                return None
            parameters.append(x)
    kind = weights[0].dtype, weights[0].device
    # Else one may be sharded, or have a tangent.
    if not all(type(x) is nn.Parameter and (x.dtype, x.device) == kind for x in parameters):
        return None
    return *kind, width


class _Products(NamedTuple):
    """The layers of a block as `kernels.product` takes them."""

    attention_norm: tuple[Tensor, Tensor, float]
    heads: list[tuple[Tensor, Tensor | None]]
    combine: tuple[Tensor, Tensor | None]
    mlp_norm: tuple[Tensor, Tensor, float]
    expand: tuple[Tensor, Tensor | None]
    contract: tuple[Tensor, Tensor | None]


def _products(
    norms: Sequence[RowWise], layers: Sequence[RowWise], head_dim: int
) -> _Products | None:
    """The layers of a block of which `_kind_by_kernel` is not None; None: they do not fit.

    Args:
        norms: of attention and of the MLP.
        layers: of query, key, value, out, and the two of the MLP.
        head_dim: of query and key.
    """
    linears = [(cast(_Linear, x).weight, cast(_Linear, x).bias) for x in layers]
    query, width = linears[0][0].shape
    key, expand = linears[1][0].shape[0], linears[4][0].shape[0]
    # A kernel reads as much as it is told, where torch raises what does not fit.
    sizes = (query, width), (key, width), (key, width), (width, query), (expand, width)
    for (weight, bias), size in zip(linears, (*sizes, (width, expand)), strict=True):
        if weight.shape != size or not _is_readable(weight):
            return None
        if bias is not None and not (bias.shape == size[:1] and _is_readable(bias)):
            return None
    if query % head_dim or key % head_dim or len({bias is None for _, bias in linears[:3]}) > 1:
        return None
    attention_norm, mlp_norm = (
        (x.weight, cast(Tensor, x.bias), x.eps) for x in cast("Sequence[_Norm]", norms)
    )
    return _Products(attention_norm, linears[:3], linears[3], mlp_norm, *linears[4:])


def _by_products(
    hidden: Tensor, products: _Products, rotation: WideRotation, attend: Attend
) -> Tensor:
    """The residual stream behind a block: products, with all that comes before and after them."""
    heads = kernels.product_of_heads(hidden, products.attention_norm, products.heads, *rotation)
    attended = attend(*heads).flatten(2).contiguous()
    hidden = kernels.product(attended, products.combine, addition=hidden)
    inner = kernels.product(hidden, products.expand, norm=products.mlp_norm, gelu=True)
    return kernels.product(inner, products.contract, addition=hidden)


def _is_readable(tensor: Tensor) -> bool:
    """Whether its elements lie in memory one after the other, as they are."""
    return tensor.is_contiguous() and not tensor.is_neg()
