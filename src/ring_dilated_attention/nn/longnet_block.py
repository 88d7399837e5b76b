"""A block of the language model."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import Schedule
from ..tiles import Backend
from .attention import MultiheadDilatedAttention
from .block import Block
from .config import LongNetConfig
from .norm import LayerNorm
from .rope import Rotation


class LongNetBlock(Block):
    """A causal `Block` with layer norms and rotated queries and keys.

    Its tables are the `cos` and `sin` of a `Rotation` with a batch dimension.

    Args:
        config: the shape of the model.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"auto"`` gathers where all of them are at most the size of a shard.
        backend: kernels that compute the tiles, one of `tiles.BACKENDS`; ``"auto"``, the default,
            takes the fastest one that supports the tensors, and any other name is used or refused.
    """

    is_causal = True
    attention_norm: LayerNorm
    mlp_norm: LayerNorm

    def __init__(self, config: LongNetConfig, *, exchange: Schedule, backend: Backend) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(config.embed_dim, eps=config.norm_eps)
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
        self.mlp_norm = LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.expand = nn.Linear(config.embed_dim, config.ffn_dim)
        self.contract = nn.Linear(config.ffn_dim, config.embed_dim)

    def _heads(self, hidden: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        normed = self.attention_norm(hidden)
        rotation = Rotation(*tables)
        return self.attention.project(normed, normed, normed, rope=rotation.__call__)

    def _contract(self, expanded: Tensor, *, in_chunks: bool) -> Tensor:
        contracted: Tensor = self.contract(F.gelu(expanded))
        return contracted
