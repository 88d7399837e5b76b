"""A block of a model, in three parts: up to the heads, attention, and the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..parallel import is_fully_sharded
from ..pattern import DilatedPattern
from ..torch_op import telling_ranks
from .attention import MultiheadDilatedAttention
from .checkpoint import Checkpoint, map_rows, run_checkpointed
from .config import LongNetConfig, SlideEncoderConfig
from .modules import IN_CHUNKS, LayerNorm, hooks_of, refuse_sharded_apart

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module, ABC):
    """norm -> attention -> residual, norm -> MLP -> residual.

    All but attention itself treats every row alone and can be done in chunks of rows. With chunks
    and ``keep_attention``, autograd holds of a block its input, and out and lse of its attention;
    backward recomputes query, key and value from the input, and everything else chunk by chunk.

    Args:
        config: the shape of the model.
        pattern: which keys each head sees.
        has_inner_norm: whether subclasses normalise what `contract` reads, by `inner_norm`.
        options: further keyword arguments of `MultiheadDilatedAttention`.
    """

    is_causal = False
    inner_norm: LayerNorm

    def __init__(
        self,
        config: LongNetConfig | SlideEncoderConfig,
        pattern: DilatedPattern,
        *,
        has_inner_norm: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        width, eps = config.embed_dim, config.norm_eps
        self.attention_norm = LayerNorm(width, eps=eps)
        self.attention = MultiheadDilatedAttention(
            width,
            config.num_heads,
            segment_lengths=pattern.segment_lengths,
            dilation_rates=pattern.dilation_rates,
            head_offsets=pattern.head_offsets,
            head_branches=pattern.head_branches,
            zero_keys=pattern.zero_keys,
            **options,
        )
        self.mlp_norm = LayerNorm(width, eps=eps)
        self.expand = nn.Linear(width, config.ffn_dim)
        if has_inner_norm:
            self.inner_norm = LayerNorm(config.ffn_dim, eps=eps)
        self.contract = nn.Linear(config.ffn_dim, width)

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
            ValueError: there are `chunk_rows`, and `fully_shard` was called with a submodule, or
                `attention` has hooks or another forward, which chunks would not call.
        """
        given: dict[str, Any] = {"is_causal": self.is_causal, **options}
        if attend is not None:
            given = {"attend": attend}
        is_one_chunk = chunk_rows is None or hidden.shape[1] <= chunk_rows
        if chunk_rows is None or (is_one_chunk and not torch.is_grad_enabled()):
            return run_checkpointed(checkpoint, [self], self._at_once, hidden, tables, given)
        refuse_sharded_apart(self, self._modules, IN_CHUNKS)
        # A rank without gradients whose rows are one chunk goes on, and is told.
        telling_ranks(given.get("group"), lambda _: self.refuse_own_call(), hidden)
        if checkpoint == "keep_attention":
            # Its chunks recompute the last part by themselves, from attention's out, which is kept.
            return self._in_chunks(hidden, tables, checkpoint, chunk_rows, given)
        return run_checkpointed(
            checkpoint, [self], self._in_chunks, hidden, tables, "none", chunk_rows, given
        )

    def refuse_own_call(self) -> None:
        """Raise a `ValueError` unless chunks may use the parts of attention without calling it.

        Its own hooks would not run, nor a forward of its own, nor that of a wrapper around it.
        """
        attention = self.attention
        own = getattr(attention.forward, "__func__", None) is not MultiheadDilatedAttention.forward
        if own or hooks_of(attention):
            what = "a forward of its own" if own else f"hooks ({', '.join(hooks_of(attention))})"
            raise ValueError(
                f"{type(self).__name__.removeprefix('FSDP')}.attention, a "
                f"{type(attention).__name__}, has {what}, and chunk_rows uses its parts without "
                "calling it: give chunk_rows=None, or put hooks on modules inside or around it"
            )

    def _at_once(self, hidden: Tensor, tables: tuple[Tensor, ...], given: dict[str, Any]) -> Tensor:
        """All rows at once: attention is called as a module, so that its hooks run."""
        # Ranks wait for the weights of what is under fully_shard by itself.
        inside = (self.attention_norm, *self.attention.modules())
        group = None if any(map(is_fully_sharded, inside)) else given.get("group")
        normed = telling_ranks(group, self.attention_norm, hidden)
        rope = self._rope(*tables)
        attended, _ = self.attention(normed, normed, normed, rope=rope, **given)
        del normed  # before the MLP makes what is wider
        # Without gradients nothing is kept for backward.
        return self._mlp(hidden + attended, in_chunks=not torch.is_grad_enabled())

    def _in_chunks(
        self,
        hidden: Tensor,
        tables: tuple[Tensor, ...],
        checkpoint: Checkpoint,
        chunk_rows: int,
        given: dict[str, Any],
    ) -> Tensor:
        """The parts of attention one by one: the first and the last in chunks of rows."""
        before = self._before_attention()
        attended = run_checkpointed(
            checkpoint, before, self._attend, hidden, tables, chunk_rows, given
        )
        modules = self._behind_attention()
        return map_rows(self._rest, hidden, attended, rows=chunk_rows, modules=modules)

    def _attend(
        self, hidden: Tensor, tables: tuple[Tensor, ...], chunk_rows: int, given: dict[str, Any]
    ) -> Tensor:
        modules = self._before_attention()
        heads = partial(map_rows, self._heads, rows=chunk_rows, modules=modules)
        made = telling_ranks(given.get("group"), heads, hidden, *tables)
        attend: Attend | None = given.get("attend")
        return attend(*made) if attend else self.attention.attend(*made, **given)

    def _before_attention(self) -> list[nn.Module]:
        """The modules that `_heads` uses: optimizers may have changed the others by then."""
        attention = self.attention
        return [self.attention_norm, attention.q_proj, attention.k_proj, attention.v_proj]

    def _behind_attention(self) -> list[nn.Module]:
        """The modules that `_rest` uses."""
        return [self.attention.out_proj, self.mlp_norm, self.expand, self.contract]

    def _rope(self, *tables: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The rotation of query and key that a block makes of its tables; None: there is none."""
        return None

    def _heads(self, hidden: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value of every row; the tables have a batch dimension."""
        normed = self.attention_norm(hidden)
        return self.attention.project(normed, normed, normed, rope=self._rope(*tables))

    def _rest(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What follows attention, for every row."""
        return self._mlp(hidden + self.attention.combine(attended), in_chunks=True)

    def _mlp(self, hidden: Tensor, *, in_chunks: bool) -> Tensor:
        """The norm, the MLP and the residual, for every row."""
        expanded = self.expand(self.mlp_norm(hidden))
        return hidden + self._contract(expanded, in_chunks=in_chunks)

    @abstractmethod
    def _contract(self, expanded: Tensor, *, in_chunks: bool) -> Tensor:
        """The MLP from its first projection on."""
