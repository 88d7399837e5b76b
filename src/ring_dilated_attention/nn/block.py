"""A block of the language model, in three parts: up to the heads, attention, and the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint import run_checkpointed
from ..exchange import Group
from ..layout import SequenceLayout
from .attention import MultiheadDilatedAttention
from .chunked import map_rows
from .config import LongNetConfig
from .rope import Rotation


class LongNetBlock(nn.Module):
    """norm -> attention -> residual, norm -> MLP -> residual.

    All but attention itself treats every row alone and can be done in chunks of rows. With chunks
    and ``keep_attention``, autograd holds of a block its input, and out and lse of its attention;
    backward recomputes query, key and value from the input, and everything else chunk by chunk.

    Args:
        config: the shape of the model.
        exchange: how remote rows travel; see `dilated_attention`.
        backend: which kernels compute; see `dilated_attention`.
    """

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
        documents: Sequence[int] | None = None,
        group: Group = None,
        layout: SequenceLayout | None = None,
        *,
        checkpoint: str = "none",
        chunk_rows: int | None = None,
    ) -> Tensor:
        """Go through the block.

        Args:
            hidden: shape (batch, local_sequence, embed_dim).
            rotation: of every local row.
            documents: see `dilated_attention`.
            group: see `dilated_attention`.
            layout: see `dilated_attention`.
            checkpoint: see `LongNet`.
            chunk_rows: see `LongNet`.

        Returns:
            The shape and dtype of `hidden`.
        """
        if chunk_rows is not None and checkpoint == "keep_attention":
            # Its chunks recompute the last part by themselves, from attention's out, which is kept.
            return self._through(hidden, rotation, documents, group, layout, checkpoint, chunk_rows)
        return run_checkpointed(
            checkpoint,
            self._through,
            hidden,
            rotation,
            documents,
            group,
            layout,
            "none",
            chunk_rows,
        )

    def _through(
        self,
        hidden: Tensor,
        rotation: Rotation,
        documents: Sequence[int] | None,
        group: Group,
        layout: SequenceLayout | None,
        checkpoint: str,
        chunk_rows: int | None,
    ) -> Tensor:
        attended = run_checkpointed(
            checkpoint, self._attend, hidden, rotation, documents, group, layout, chunk_rows
        )
        attention = self.attention
        modules = (attention.out_proj, self.mlp_norm, self.expand, self.contract)
        return map_rows(self._rest, hidden, attended, rows=chunk_rows, modules=modules)

    def _attend(
        self,
        hidden: Tensor,
        rotation: Rotation,
        documents: Sequence[int] | None,
        group: Group,
        layout: SequenceLayout | None,
        chunk_rows: int | None,
    ) -> Tensor:
        attention = self.attention
        modules = (self.attention_norm, attention.q_proj, attention.k_proj, attention.v_proj)
        cos, sin = (table[None] for table in rotation)  # rows are dimension 1
        query, key, value = map_rows(
            self._heads, hidden, cos, sin, rows=chunk_rows, modules=modules
        )
        return attention.attend(
            query,
            key,
            value,
            is_causal=True,
            documents=documents,
            group=group,
            layout=layout,
        )

    def _heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value of every row."""
        normed = self.attention_norm(hidden)
        return self.attention.project(
            normed, normed, normed, rope=Rotation(cos[0], sin[0]).__call__
        )

    def _rest(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What follows attention, for every row."""
        hidden = hidden + self.attention.combine(attended)
        contracted: Tensor = self.contract(F.gelu(self.expand(self.mlp_norm(hidden))))
        return hidden + contracted
