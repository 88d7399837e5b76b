"""Dilated attention as modules: with projections, and without parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..documents import Integers
from ..exchange import Group, one_group
from ..functional import dilated_attention
from ..layout import SequenceLayout
from ..options import (
    AttentionOptions,
    BranchGradients,
    OptionFields,
    Schedule,
    check_options,
    read_options,
)
from ..parallel import fill, is_dtensor, is_fully_sharded
from ..pattern import (
    DilatedPattern,
    HeadBranches,
    HeadOffsets,
    HeadSlice,
    Length,
    check_positive_float,
    in_brief,
)
from ..tiles import Backend
from ..torch_op import padding, telling_ranks
from .heads import check_head_sizes, project_heads, slice_of_heads
from .modules import LayerNorm, check_rows, without_weights
from .positions import rotate_both

if TYPE_CHECKING:
    from typing_extensions import Unpack  # torch needs it; typing has it from Python 3.11 on


class _NotFused:
    """In place of a weight: torch's containers call a fused kernel with plain tensors alone."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


class MultiheadDilatedAttention(nn.Module):
    """Multi-head dilated attention with projections, in the style of `nn.MultiheadAttention`.

    Differs from it: batch first always; a pattern in place of masks; the sequence may be sharded
    over the ranks of a group; attention weights, and masks other than a right padding, are refused,
    never ignored. There is no dropout: it is refused until it is exact and reproducible across
    ranks. It may stand in for the `self_attn` of `nn.TransformerEncoderLayer`.

    Weights start as in MAGNETO (Wang et al. 2022, arXiv 2210.06423): Xavier-normal, with gain
    `gamma_init` for the value and output projections, biases 0. Its sub-LN, a LayerNorm on the
    concatenated heads in front of the output projection, is `layer_norm=True`; MAGNETO's gain for a
    decoder of N layers is ``sqrt(log(2 N))``.

    Args:
        embed_dim: width of query, key, value and output.
        num_heads: query heads; divides `embed_dim`.
        segment_lengths: one per branch, in positions; None means the whole document, a
            `Window` a sliding window; see `DilatedPattern`.
        dilation_rates: one per branch, in positions.
        head_offsets: ``"interleaved"``, the default, or ``"blocked"``; see `DilatedPattern`.
        head_branches: ``"all"``, the default, or ``"split"``; see `DilatedPattern`.
        zero_keys: as torchscale pads segments; see `DilatedPattern`. Default False (the paper).
        branch_gradients: ``"exact"``, the default, or ``"detached"``; see `AttentionOptions`.
        num_kv_heads: key and value heads, a divisor of `num_heads`; None means `num_heads`.
        bias: whether the four projections have a bias.
        layer_norm: whether to normalise the concatenated heads (MAGNETO's sub-LN).
        layer_norm_eps: its epsilon.
        gamma_init: MAGNETO's gain at initialisation.
        scale: factor on the scores; None means ``head_dim ** -0.5``.
        exchange: how rows travel between ranks, ``"auto"``, the default, or one of those of
            `AttentionOptions`.
        backend: kernels that compute the tiles, ``"auto"``, the default, or one of those of
            `AttentionOptions`.
        device: where to make the parameters.
        dtype: of the parameters.

    Attributes:
        head_slice: the KV heads that this rank computes under tensor parallelism, (start, stop,
            total), as `integrations.tensor_parallel.HeadParallel` sets it. None, the default: those
            that the projections' weights say, where they are DTensors; else all.

    Raises:
        TypeError: a size, length or rate is not an int.
        ValueError: a size, length, rate, epsilon, gain or scale is out of range, heads do not
            divide evenly, or an option has an unknown value.
    """

    head_slice: HeadSlice | None = None
    # For nn.TransformerEncoder and its layers, which read these of attention: a fused kernel of
    # torch's, which would attend densely, is not taken.
    batch_first = True
    _qkv_same_embed_dim = False
    in_proj_bias = None
    in_proj_weight = _NotFused()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        segment_lengths: Sequence[Length],
        dilation_rates: Sequence[int],
        head_offsets: HeadOffsets = "interleaved",
        head_branches: HeadBranches = "all",
        zero_keys: bool = False,
        branch_gradients: BranchGradients = "exact",
        num_kv_heads: int | None = None,
        bias: bool = True,
        layer_norm: bool = False,
        layer_norm_eps: float = 1e-5,
        gamma_init: float = 1.0,
        scale: float | None = None,
        exchange: Schedule = "auto",
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.pattern = DilatedPattern(
            segment_lengths,
            dilation_rates,
            head_offsets=head_offsets,
            head_branches=head_branches,
            zero_keys=zero_keys,
        )
        check_options(exchange=exchange, backend=backend, branch_gradients=branch_gradients)
        self.branch_gradients = branch_gradients
        self.embed_dim, self.num_heads, self.num_kv_heads, self.head_dim = check_head_sizes(
            embed_dim, num_heads, num_kv_heads
        )
        self.gamma_init = check_positive_float("gamma_init", gamma_init)
        self.scale = None if scale is None else check_positive_float("scale", scale)
        self.exchange = exchange
        self.backend = backend
        kv_dim = self.num_kv_heads * self.head_dim
        with without_weights(self, device):
            self.q_proj = nn.Linear(embed_dim, embed_dim, bias, dtype=dtype)
            self.k_proj = nn.Linear(embed_dim, kv_dim, bias, dtype=dtype)
            self.v_proj = nn.Linear(embed_dim, kv_dim, bias, dtype=dtype)
            self.out_proj = nn.Linear(embed_dim, embed_dim, bias, dtype=dtype)
            self.norm = (
                LayerNorm(
                    embed_dim,
                    eps=check_positive_float("layer_norm_eps", layer_norm_eps),
                    dtype=dtype,
                )
                if layer_norm
                else None
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weights of MAGNETO (arXiv 2210.06423, section 2.3)."""
        for linear, gain in (
            (self.q_proj, 1.0),
            (self.k_proj, 1.0),
            (self.v_proj, self.gamma_init),
            (self.out_proj, self.gamma_init),
        ):
            fill(linear.weight, partial(nn.init.xavier_normal_, gain=gain))
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        need_weights: bool = False,
        average_attn_weights: bool = True,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        documents: Integers | None = None,
        lengths: Integers | None = None,
        sink: Tensor | None = None,
        softcap: float | None = None,
        rope: Callable[[Tensor], Tensor] | None = None,
        group: Group = None,
        mesh: Group = None,
        layout: SequenceLayout | None = None,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, None]:
        """Project, attend, project back.

        Args:
            query: shape (batch, local_sequence, embed_dim), in the dtype of the parameters; under
                autocast float32, bfloat16 or float16.
            key: shape (batch, local_sequence, embed_dim).
            value: shape (batch, local_sequence, embed_dim).
            is_causal: whether a query sees only keys at positions <= its own.
            need_weights: must be False: the weights are never formed.
            average_attn_weights: of no effect, as there are no weights.
            attn_mask: must be None: the pattern and `is_causal` are the only masks. With
                `is_causal`, on one process, it may be the causal mask, (sequence, sequence), which
                torch's containers pass beside it.
            key_padding_mask: the local shard of a right padding, bool, shape (batch,
                local_sequence), True where a position is padding, or what torch's containers make
                of it, 0 and -inf; `lengths` is cheaper. Heads are 0 in padded positions, so the
                output there is that of `combine` for zeros.
            documents: cumulative lengths ``[0, ..., n]`` of packed documents, as in
                `dilated_attention`. None: one document. `document_positions` gives the positions
                for `rope`.
            lengths: (batch,) ints, valid positions of each row, as in `dilated_attention`. None: no
                padding.
            sink: (heads,), scores of one more key of each head, of value 0, as in
                `dilated_attention`. None: there is none.
            softcap: of the scores, as in `AttentionOptions`. None: they are not capped.
            rope: applied to the projected query and key, shape (batch, local_sequence, heads or
                kv_heads, head_dim), and returns that shape; a `Rotation` is one.
            group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None
                for one process.
            mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
            layout: which positions each rank holds; None means contiguous equal shards.
            attend: computes attention of the projected heads, as a step with a KV cache does, in
                place of the method `attend`, whose options are then left aside.

        Returns:
            (output, None): output has shape (batch, local_sequence, embed_dim); the None stands
            where `nn.MultiheadAttention` returns its weights.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: `attn_mask` or `need_weights` is given, a shape does not fit, or for the
                reasons of `dilated_attention`.
        """
        group = one_group(group, mesh)
        if need_weights is not False:
            raise ValueError(
                "need_weights must be False: dilated attention never forms the weights; "
                f"got {in_brief(need_weights)}"
            )
        if attn_mask is not None and not (
            is_causal and group is None and _is_causal_mask(attn_mask, query)
        ):
            raise ValueError(
                "attn_mask must be None; use is_causal, documents and lengths, and the pattern for "
                f"what a head sees; got {type(attn_mask).__name__}"
            )
        key_padding_mask = _as_padding(key_padding_mask)

        def heads(*inputs: Tensor) -> tuple[Tensor, ...]:
            for name, tensor in zip(("query", "key", "value"), inputs, strict=True):
                check_rows(name, tensor, self.embed_dim, "(batch, local_sequence, ")
            return self.project(*inputs, rope=rope)

        # Ranks wait for the weights of what is under fully_shard by itself.
        apart = any(map(is_fully_sharded, (self.q_proj, self.k_proj, self.v_proj)))
        told = None if apart else group
        q_bnhd, k_bnhd, v_bnhd = telling_ranks(told, heads, query, key, value)
        if attend is not None:
            return self.combine(attend(q_bnhd, k_bnhd, v_bnhd)), None
        options: dict[str, Any] = {"is_causal": is_causal, "sink": sink, "softcap": softcap}
        options |= {"documents": documents, "group": group, "layout": layout}
        if lengths is None and not is_dtensor(q_bnhd):  # the first layer reads a mask for all
            options |= padding(self, key_padding_mask, q_bnhd, layout, group)
        else:
            options |= {"lengths": lengths, "key_padding_mask": key_padding_mask}
        return self.combine(self.attend(q_bnhd, k_bnhd, v_bnhd, **options)), None

    # The three parts of forward: the first and the last treat every row alone.
    # One legend: b batch, n local_sequence, h heads or kv_heads, d head_dim, e embed_dim.

    def project(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        rope: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """The first part of `forward`, whose arguments these are: heads, and their rotation.

        Returns:
            query, shape (batch, local_sequence, heads, head_dim), and key and value, with kv_heads.
        """
        layers, inputs = (self.q_proj, self.k_proj, self.v_proj), (query, key, value)
        if rope is None:
            return tuple(project_heads(layers, inputs, self.head_dim))
        # The value by itself: it would keep the memory of a joint tensor, which rotations leave.
        q_bnhd, k_bnhd = project_heads(layers[:2], inputs[:2], self.head_dim)
        rotated = rotate_both(rope, q_bnhd, k_bnhd)
        return *rotated, *project_heads(layers[2:], inputs[2:], self.head_dim)

    def attend(self, q_bnhd: Tensor, k_bnhd: Tensor, v_bnhd: Tensor, **options: Any) -> Tensor:
        """The second part of `forward`: `dilated_attention`, with the shape of `q_bnhd`.

        Options are those of `dilated_attention` that `forward` has. By default there are none.
        """
        out_bnhd: Tensor = dilated_attention(
            q_bnhd,
            k_bnhd,
            v_bnhd,
            self.pattern,
            scale=self.scale,
            exchange=self.exchange,
            backend=self.backend,
            branch_gradients=self.branch_gradients,
            head_slice=slice_of_heads(self, q_bnhd, k_bnhd),
            **options,
        )
        return out_bnhd

    def combine(self, out_bnhd: Tensor) -> Tensor:
        """The last part of `forward`: (batch, local_sequence, embed_dim) of all heads."""
        out_bne = out_bnhd.flatten(2)
        if self.norm is not None:
            out_bne = self.norm(out_bne)
        combined: Tensor = self.out_proj(out_bne)
        return combined

    def extra_repr(self) -> str:
        """What `repr` shows of the arguments."""
        heads = f"num_heads={self.num_heads}"
        if self.num_kv_heads != self.num_heads:
            heads += f", num_kv_heads={self.num_kv_heads}"
        return f"{self.pattern}, {heads}"


def _is_causal_mask(mask: Any, query: Any) -> bool:
    """Whether a mask, of bools or of 0 and -inf, hides exactly the keys behind each query."""
    hidden = _as_padding(mask)
    if not isinstance(hidden, Tensor) or hidden.dtype != torch.bool:
        return False
    n = query.shape[1] if isinstance(query, Tensor) and query.dim() == 3 else -1
    return hidden.shape == (n, n) and torch.equal(hidden, torch.ones_like(hidden).triu(1))


def _as_padding(mask: Any) -> Any:
    """A bool mask of one that is added to scores, where it has no numbers but 0 and -inf."""
    if not isinstance(mask, Tensor) or not mask.is_floating_point():
        return mask
    hidden = mask == -torch.inf
    return hidden if bool((hidden | (mask == 0)).all()) else mask


class DilatedAttention(nn.Module):
    """`dilated_attention` with its options fixed: no parameters, no projections.

    Args:
        pattern: which keys each head sees.
        options: see `AttentionOptions`; None: its defaults.
        fields: fields of `AttentionOptions` by name, in place of those of `options`.

    Attributes:
        options: the `AttentionOptions`, which may be replaced between calls.

    Raises:
        TypeError: `pattern` is not a `DilatedPattern`, or an option has the wrong type.
        ValueError: an option has a value that is not allowed.
    """

    def __init__(
        self,
        pattern: DilatedPattern,
        options: AttentionOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> None:
        super().__init__()
        check_options(pattern=pattern)
        self.pattern = pattern
        self.options = read_options("DilatedAttention", options, fields)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        documents: Integers | None = None,
        lengths: Integers | None = None,
        key_padding_mask: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Attend: `dilated_attention` explains the arguments, and what is raised.

        Returns:
            The shape and dtype of `query`.
        """
        return dilated_attention(
            query,
            key,
            value,
            self.pattern,
            self.options,
            documents=documents,
            lengths=lengths,
            key_padding_mask=key_padding_mask,
            sink=sink,
        )

    def extra_repr(self) -> str:
        """What `repr` shows of the arguments."""
        given = self.options
        heads = "" if given.head_slice is None else f", head_slice={tuple(given.head_slice)}"
        return f"{self.pattern}, is_causal={given.is_causal}{heads}"
