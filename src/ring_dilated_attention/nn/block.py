"""A block of a model, in three parts: up to the heads, attention, and the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from ..parallel import gather_weights_in, is_fully_sharded
from ..torch_op import telling_ranks
from .attention import MultiheadDilatedAttention
from .checkpoint import Checkpoint, map_rows, run_checkpointed
from .modules import IN_CHUNKS, refuse_sharded_apart

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
T = TypeVar("T")


class Block(nn.Module, ABC):
    """norm -> attention -> residual, norm -> MLP -> residual.

    All but attention itself treats every row alone and can be done in chunks of rows. With chunks
    and ``keep_attention``, autograd holds of a block its input, and out and lse of its attention;
    backward recomputes query, key and value from the input, and everything else chunk by chunk.
    """

    is_causal = False
    attention_norm: nn.Module
    attention: MultiheadDilatedAttention
    mlp_norm: nn.Module
    expand: nn.Linear
    contract: nn.Linear

    def forward(
        self,
        hidden: Tensor,
        *tables: Tensor,
        checkpoint: Checkpoint = "none",
        chunk_rows: int | None = None,
        attend: Attend | None = None,
        **options: Any,
    ) -> Tensor:
        """Go through the block.

        Args:
            hidden: shape (batch, local_sequence, embed_dim).
            tables: what the heads of a row need beside it, shape (batch, local_sequence, ...); that
                batch may be 1.
            checkpoint: what backward finds of the block's activations: ``"none"``, ``"full"`` or
                ``"keep_attention"``.
            chunk_rows: rows per chunk of the position-wise parts (projections and MLP); None:
                all rows at once.
            attend: what computes attention of query, key and value, each (batch, local_sequence,
                heads or kv_heads, head_dim), instead of `MultiheadDilatedAttention.attend`.
            options: further keyword arguments of `MultiheadDilatedAttention.attend`.

        Returns:
            The shape and dtype of `hidden`.

        Raises:
            ValueError: there are `chunk_rows`, and `fully_shard` was called with a submodule.
        """
        gather_weights_in(self.attention, ("project", "combine"))
        if attend is None:
            attend = partial(self.attention.attend, is_causal=self.is_causal, **options)
        is_one_chunk = chunk_rows is None or hidden.shape[1] <= chunk_rows
        if is_one_chunk and not torch.is_grad_enabled():  # nothing is kept for backward
            heads = self._told(attend, self._heads, hidden, *tables)
            return self._rest(hidden, attend(*heads), in_chunks=True)
        if chunk_rows is not None:
            refuse_sharded_apart(self, self._modules, IN_CHUNKS)
        if chunk_rows is not None and checkpoint == "keep_attention":
            # Its chunks recompute the last part by themselves, from attention's out, which is kept.
            return self._through(hidden, tables, checkpoint, chunk_rows, attend)
        return run_checkpointed(
            checkpoint, [self], self._through, hidden, tables, "none", chunk_rows, attend
        )

    def _through(
        self,
        hidden: Tensor,
        tables: tuple[Tensor, ...],
        checkpoint: Checkpoint,
        chunk_rows: int | None,
        attend: Attend,
    ) -> Tensor:
        attended = run_checkpointed(
            checkpoint,
            self._before_attention(),
            self._attend,
            hidden,
            tables,
            chunk_rows,
            attend,
        )
        rest = partial(self._rest, in_chunks=chunk_rows is not None)
        return map_rows(rest, hidden, attended, rows=chunk_rows, modules=self._behind_attention())

    def _attend(
        self,
        hidden: Tensor,
        tables: tuple[Tensor, ...],
        chunk_rows: int | None,
        attend: Attend,
    ) -> Tensor:
        modules = self._before_attention()
        heads = partial(map_rows, self._heads, rows=chunk_rows, modules=modules)
        return attend(*self._told(attend, heads, hidden, *tables))

    def _told(self, attend: Attend, heads: Callable[..., T], *inputs: Tensor) -> T:
        """The heads; the ranks that are about to attend are told where this fails."""
        group = attend.keywords.get("group") if isinstance(attend, partial) else None
        # Ranks wait for the weights of what is under fully_shard by itself.
        apart = any(map(is_fully_sharded, (self.attention, *self._before_attention())))
        return telling_ranks(None if apart else group, heads, *inputs)

    def _before_attention(self) -> list[nn.Module]:
        """The modules that `_heads` uses: optimizers may have changed the others by then."""
        attention = self.attention
        return [self.attention_norm, attention.q_proj, attention.k_proj, attention.v_proj]

    def _behind_attention(self) -> list[nn.Module]:
        """The modules that `_rest` uses."""
        return [self.attention.out_proj, self.mlp_norm, self.expand, self.contract]

    @abstractmethod
    def _heads(self, hidden: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value of every row; the tables have a batch dimension."""

    def _rest(self, hidden: Tensor, attended: Tensor, *, in_chunks: bool) -> Tensor:
        """What follows attention, for every row."""
        hidden = hidden + self.attention.combine(attended)
        expanded = self.expand(self.mlp_norm(hidden))
        return hidden + self._contract(expanded, in_chunks=in_chunks)

    @abstractmethod
    def _contract(self, expanded: Tensor, *, in_chunks: bool) -> Tensor:
        """The MLP from its first projection on."""
