"""Both ends of a language model: from tokens to the residual stream, and from it to logits."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import autocast_inputs
from .config import LongNetConfig


class TokenEnds(nn.Module):
    """The embedding of tokens, whose weights the logits have too, and the last norm."""

    config: LongNetConfig
    embedding: nn.Embedding
    norm: nn.LayerNorm

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream in front of the first block.

        Args:
            tokens: int64, shape (batch, rows).

        Returns:
            Shape (batch, rows, embed_dim).
        """
        embedded: Tensor = self.embedding(tokens) * math.sqrt(self.config.embed_dim)
        return autocast_inputs(embedded)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, from the residual stream behind the last block.

        Args:
            hidden: shape (batch, rows, embed_dim).

        Returns:
            Shape (batch, rows, vocab_size).
        """
        return F.linear(self.norm(hidden), self.embedding.weight)
