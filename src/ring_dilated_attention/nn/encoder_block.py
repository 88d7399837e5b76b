"""A block of an encoder."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from ..functional import Schedule
from ..parallel import fill
from ..tiles import Backend
from .attention import MultiheadDilatedAttention
from .block import Block
from .checkpoint import run_checkpointed
from .chunked import map_rows
from .hooks import is_plain
from .initial import without_weights
from .norm import LayerNorm, normalize_gelu
from .slide_config import SlideEncoderConfig


class EncoderBlock(Block):
    """A `Block` with MAGNETO's sub-LN in attention and in the MLP.

    MAGNETO (Wang et al. 2022, arXiv 2210.06423) also normalises what the output projections of
    attention and of the MLP read. torchscale's encoders do the same, in other words: their
    inner_attn_ln, fc1, ffn_layernorm and fc2 are attention.norm, expand, inner_norm and contract.

    Args:
        config: the shape of the encoder.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"auto"`` gathers where all of them are at most the size of a shard.
        backend: kernels that compute the tiles, one of `tiles.BACKENDS`; ``"auto"``, the default,
            takes the fastest one that supports the tensors, and any other name is used or refused.
    """

    attention_norm: LayerNorm
    mlp_norm: LayerNorm

    def __init__(self, config: SlideEncoderConfig, *, exchange: Schedule, backend: Backend) -> None:
        super().__init__()
        width, eps = config.embed_dim, config.norm_eps
        self.gain = math.sqrt(math.log(2 * config.num_layers))
        with without_weights(self):
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
            fill(linear.weight, partial(nn.init.xavier_normal_, gain=self.gain))
            nn.init.zeros_(linear.bias)

    def _behind_attention(self) -> list[nn.Module]:
        norm = self.attention.norm
        return [*super()._behind_attention(), self.inner_norm, *([] if norm is None else [norm])]

    def _heads(self, hidden: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        normed = self.attention_norm(hidden)
        return self.attention.project(normed, normed, normed)

    def _contract(self, expanded: Tensor, *, in_chunks: bool) -> Tensor:
        """The MLP from its first projection on.

        The widest tensors are those between the MLP's two projections. Unless it is done in chunks,
        whose intermediates do not live long, autograd holds the first projection's result alone:
        the GELU and its norm, which are cheap, run again in backward.
        """
        if in_chunks:
            return self._normed(expanded)
        modules = self.inner_norm, self.contract
        if torch.compiler.is_compiling():
            return run_checkpointed("full", modules, self._normed, expanded)
        if torch._C._are_functorch_transforms_active():
            return self._normed(expanded)
        if is_plain(self.inner_norm, LayerNorm) and is_plain(self.contract, nn.Linear):
            # Like a checkpoint, without its hooks, which take the CPU a millisecond.
            rows = max(1, expanded.shape[1])
            return map_rows(self._normed, expanded, rows=rows, modules=modules)
        return run_checkpointed("full", modules, self._normed, expanded)

    def _normed(self, expanded: Tensor) -> Tensor:
        contracted: Tensor = self.contract(normalize_gelu(self.inner_norm, expanded))
        return contracted
