"""A block of an encoder, in three parts: up to the heads, attention, and the rest."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint import run_checkpointed
from .attention import MultiheadDilatedAttention
from .chunked import map_rows
from .norm import LayerNorm
from .slide_config import SlideEncoderConfig


class EncoderBlock(nn.Module):
    """norm -> attention -> residual, norm -> MLP -> residual, with MAGNETO's sub-LN in both.

    MAGNETO (Wang et al. 2022, arXiv 2210.06423) also normalises what the output projections of
    attention and of the MLP read. torchscale's encoders do the same, in other words: their
    inner_attn_ln, fc1, ffn_layernorm and fc2 are attention.norm, expand, inner_norm and contract.

    All but attention itself treats every row alone and can be done in chunks of rows; see
    `LongNetBlock` for what autograd then holds.

    Args:
        config: the shape of the encoder.
        exchange: how remote rows travel; see `dilated_attention`.
        backend: which kernels compute; see `dilated_attention`.
    """

    def __init__(self, config: SlideEncoderConfig, *, exchange: str, backend: str) -> None:
        super().__init__()
        width, eps = config.embed_dim, config.norm_eps
        self.gain = math.sqrt(math.log(2 * config.num_layers))
        self.attention_norm = LayerNorm(width, eps=eps)
        self.attention = MultiheadDilatedAttention(
            width,
            config.num_heads,
            segment_lengths=config.segment_lengths,
            dilation_rates=config.dilation_rates,
            head_offsets=config.head_offsets,
            zero_keys=config.zero_keys,
            branch_gradients=config.branch_gradients,
            layer_norm=True,
            layer_norm_eps=eps,
            gamma_init=self.gain,
            exchange=exchange,
            backend=backend,
        )
        self.mlp_norm = LayerNorm(width, eps=eps)
        self.expand = nn.Linear(width, config.ffn_dim)
        self.inner_norm = LayerNorm(config.ffn_dim, eps=eps)
        self.contract = nn.Linear(config.ffn_dim, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set MAGNETO's initial weights for an encoder (arXiv 2210.06423, section 2.3)."""
        self.attention.reset_parameters()
        for norm in (self.attention_norm, self.mlp_norm, self.inner_norm):
            norm.reset_parameters()
        for linear in (self.expand, self.contract):
            nn.init.xavier_normal_(linear.weight, gain=self.gain)
            nn.init.zeros_(linear.bias)

    def forward(
        self,
        hidden: Tensor,
        *,
        checkpoint: str = "none",
        chunk_rows: int | None = None,
        **options: Any,
    ) -> Tensor:
        """Go through the block.

        Args:
            hidden: shape (batch, local_sequence, embed_dim).
            checkpoint: see `SlideEncoder`.
            chunk_rows: see `SlideEncoder`.
            options: keyword arguments of `MultiheadDilatedAttention.attend`.

        Returns:
            The shape and dtype of `hidden`.
        """
        if chunk_rows is not None and checkpoint == "keep_attention":
            # Its chunks recompute the last part by themselves, from attention's out, which is kept.
            return self._through(hidden, checkpoint, chunk_rows, options)
        return run_checkpointed(checkpoint, self._through, hidden, "none", chunk_rows, options)

    def _through(
        self, hidden: Tensor, checkpoint: str, chunk_rows: int | None, options: dict[str, Any]
    ) -> Tensor:
        attended = run_checkpointed(checkpoint, self._attend, hidden, chunk_rows, options)
        attention = self.attention
        modules = [attention.out_proj, self.mlp_norm, self.expand, self.inner_norm, self.contract]
        if attention.norm is not None:
            modules.append(attention.norm)
        # A chunk's intermediates do not live long enough to be worth a second GELU.
        rest = partial(self._rest, keep_inner=chunk_rows is not None)
        return map_rows(rest, hidden, attended, rows=chunk_rows, modules=modules)

    def _attend(self, hidden: Tensor, chunk_rows: int | None, options: dict[str, Any]) -> Tensor:
        attention = self.attention
        modules = (self.attention_norm, attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = map_rows(self._heads, hidden, rows=chunk_rows, modules=modules)
        return attention.attend(query, key, value, **options)

    def _heads(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value of every row."""
        normed = self.attention_norm(hidden)
        return self.attention.project(normed, normed, normed)

    def _rest(self, hidden: Tensor, attended: Tensor, *, keep_inner: bool) -> Tensor:
        """What follows attention, for every row.

        The widest tensors are those between the MLP's two projections. Unless `keep_inner`,
        autograd holds the first projection's result alone: the GELU and its norm, which are cheap,
        run again in backward.
        """
        hidden = hidden + self.attention.combine(attended)
        expanded = self.expand(self.mlp_norm(hidden))
        return hidden + run_checkpointed("none" if keep_inner else "full", self._contract, expanded)

    def _contract(self, expanded: Tensor) -> Tensor:
        contracted: Tensor = self.contract(self.inner_norm(F.gelu(expanded)))
        return contracted
