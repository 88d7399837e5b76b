"""LongNet: a decoder language model whose attention is dilated, on sharded sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..agreement import agree
from ..checkpoint import CHECKPOINTS, run_checkpointed
from ..exchange import Exchange, Group, resolve_exchange
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_choice, check_positive_int
from .attention import MultiheadDilatedAttention, check_head_sizes, check_positive_float
from .rope import RotaryEmbedding, Rotation


@dataclass(frozen=True, kw_only=True)
class LongNetConfig:
    """The shape of a `LongNet`; two models with equal configs have the same parameters.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        num_layers: number of blocks.
        embed_dim: width of the residual stream.
        num_heads: query heads a block; divides `embed_dim`, and the head size must be even.
        num_kv_heads: key and value heads, a divisor of `num_heads`; None means `num_heads`.
        ffn_dim: width of the hidden layer of the MLP.
        segment_lengths: one per branch of the pattern, in positions; None means the whole document.
        dilation_rates: one per branch of the pattern, in positions.
        head_offsets: see `DilatedPattern`.
        head_branches: see `DilatedPattern`.
        rope_theta: base of the rotary wavelengths.
        norm_eps: epsilon of the layer norms.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is out of range; the message names it.
    """

    vocab_size: int = 256
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    ffn_dim: int
    segment_lengths: Sequence[int | None]
    dilation_rates: Sequence[int]
    head_offsets: str = "interleaved"
    head_branches: str = "all"
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "ffn_dim"):
            check_positive_int(name, getattr(self, name))
        *_, head_dim = check_head_sizes(self.embed_dim, self.num_heads, self.num_kv_heads)
        check_positive_float("norm_eps", self.norm_eps)
        RotaryEmbedding(head_dim, theta=check_positive_float("rope_theta", self.rope_theta))
        pattern = self.pattern
        # Lists (from JSON, say) become tuples, so that configs hash and compare by value.
        object.__setattr__(self, "segment_lengths", pattern.segment_lengths)
        object.__setattr__(self, "dilation_rates", pattern.dilation_rates)

    @property
    def pattern(self) -> DilatedPattern:
        """The pattern of every block."""
        return DilatedPattern(
            self.segment_lengths,
            self.dilation_rates,
            head_offsets=self.head_offsets,
            head_branches=self.head_branches,
        )


class LongNet(nn.Module):
    """A pre-norm decoder on dilated attention, for sequences that no single device holds.

    Blocks are norm -> attention -> residual, norm -> MLP -> residual; then a final norm and the
    transposed token embedding. Attention is LongNet's (arXiv 2307.02486); positions are rotary
    (arXiv 2104.09864) and global: they come from the layout, so that the logits of a position do
    not depend on the rank that holds it.

    Weights start normal: projections with standard deviation ``fan_in ** -0.5``, those that write
    into the residual stream divided by ``sqrt(2 * num_layers)`` (GPT-2). The embedding starts with
    ``0.5 * embed_dim ** -0.5``, for small first logits, and enters the residual stream multiplied
    by ``sqrt(embed_dim)`` (Vaswani et al. 2017, section 3.4).

    Args:
        config: the shape of the model.
        exchange: how remote rows travel; see `dilated_attention`.
        backend: which kernels compute; see `dilated_attention`.
        checkpoint: what backward finds of a block's activations, the rest of which it recomputes:
            ``"none"`` recomputes nothing, ``"full"`` the whole block, ``"keep_attention"`` all but
            its attention.

    Raises:
        ValueError: `exchange`, `backend` or `checkpoint` has an unknown value.
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        exchange: str = "auto",
        backend: str = "auto",
        checkpoint: str = "none",
    ) -> None:
        super().__init__()
        check_choice("checkpoint", checkpoint, CHECKPOINTS)
        self.config = config
        self.checkpoint = checkpoint
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.rope = RotaryEmbedding(config.embed_dim // config.num_heads, theta=config.rope_theta)
        self.blocks = nn.ModuleList(
            _Block(config, exchange=exchange, backend=backend) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weights from torch's random state."""
        residual = 1 / math.sqrt(2 * self.config.num_layers)
        nn.init.normal_(self.embedding.weight, std=0.5 * self.config.embed_dim**-0.5)
        for block in self.blocks:
            assert isinstance(block, _Block)
            for linear, gain in (
                (block.attention.q_proj, 1.0),
                (block.attention.k_proj, 1.0),
                (block.attention.v_proj, 1.0),
                (block.attention.out_proj, residual),
                (block.expand, 1.0),
                (block.contract, residual),
            ):
                nn.init.normal_(linear.weight, std=gain * linear.in_features**-0.5)
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        tokens: Tensor,
        *,
        group: Group = None,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Logits of the next token at every local position.

        Args:
            tokens: the local shard, int64, shape (batch, local_sequence).
            group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None
                for one process.
            layout: which positions each rank holds; None means contiguous equal shards.

        Returns:
            Logits, shape (batch, local_sequence, vocab_size), in the dtype of the parameters (or
            of autocast).

        Raises:
            TypeError: this rank's `tokens` are not int64.
            ValueError: this rank's tokens do not fit, or its layout is for another number of ranks
                or another local length; some other rank refused its arguments; and see
                `dilated_attention`.
        """
        rotation = self.rope(_agreed_positions(tokens, resolve_exchange(group), layout))
        hidden = self.embedding(tokens) * math.sqrt(self.config.embed_dim)
        for block in self.blocks:
            hidden = run_checkpointed(self.checkpoint, block, hidden, rotation, group, layout)
        return F.linear(self.norm(hidden), self.embedding.weight)


class _Block(nn.Module):
    """norm -> attention -> residual, norm -> MLP -> residual."""

    def __init__(self, config: LongNetConfig, *, exchange: str, backend: str) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.attention = MultiheadDilatedAttention(
            config.embed_dim,
            config.num_heads,
            segment_lengths=config.segment_lengths,
            dilation_rates=config.dilation_rates,
            head_offsets=config.head_offsets,
            head_branches=config.head_branches,
            num_kv_heads=config.num_kv_heads,
            exchange=exchange,
            backend=backend,
        )
        self.mlp_norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.expand = nn.Linear(config.embed_dim, config.ffn_dim)
        self.contract = nn.Linear(config.ffn_dim, config.embed_dim)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        group: Group,
        layout: SequenceLayout | None,
    ) -> Tensor:
        normed = self.attention_norm(hidden)
        attended, _ = self.attention(
            normed, normed, normed, is_causal=True, rope=rotation, group=group, layout=layout
        )
        hidden = hidden + attended
        contracted: Tensor = self.contract(F.gelu(self.expand(self.mlp_norm(hidden))))
        return hidden + contracted


def _agreed_positions(tokens: Tensor, ends: Exchange, layout: SequenceLayout | None) -> Tensor:
    """This rank's positions; if any rank's tokens do not fit the layout, an error on every rank.

    A rank that raised alone would leave the others waiting for it in the first attention.
    """
    positions, failure = None, None
    try:
        positions = _positions(tokens, ends, layout)
    except (TypeError, ValueError) as error:
        failure = error
    # What else must be equal on all ranks, the first attention compares.
    agree("LongNet", ends, None if failure else {}, failure, tokens.device)
    assert positions is not None
    return positions


def _positions(tokens: Tensor, ends: Exchange, layout: SequenceLayout | None) -> Tensor:
    """The global position of every local row: int64, shape (local_sequence,)."""
    if tokens.dtype != torch.int64:
        raise TypeError(f"tokens must be int64; got {tokens.dtype}")
    if tokens.dim() != 2:
        raise ValueError(
            f"tokens must have shape (batch, local_sequence); got {tuple(tokens.shape)}"
        )
    rows = tokens.shape[1]
    if layout is None:
        return torch.arange(ends.rank * rows, (ends.rank + 1) * rows, device=tokens.device)
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout or None; got {layout!r}")
    if layout.world_size != ends.world_size:
        raise ValueError(
            f"the layout is for {layout.world_size} ranks; the group has {ends.world_size}"
        )
    if rows != layout.local_length(ends.rank):
        raise ValueError(
            f"the layout gives this rank {layout.local_length(ends.rank)} positions; "
            f"got tokens of shape {tuple(tokens.shape)}"
        )
    return layout.positions(ends.rank, device=tokens.device)
