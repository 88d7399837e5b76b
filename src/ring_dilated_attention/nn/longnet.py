"""LongNet: a decoder language model whose attention is dilated, on sharded sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..documents import Integers
from ..exchange import Group, one_group
from ..layout import SequenceLayout
from ..options import Schedule
from ..parallel import fill, refuse_beside_wrapper
from ..pattern import DilatedPattern
from ..tiles import Backend
from ..torch_op import telling_ranks
from .block import Block
from .checkpoint import Checkpoint, check_checkpoint, map_rows, run_checkpointed
from .config import LongNetConfig, block_patterns
from .generate import TokenGenerator
from .modules import IN_CHUNKS, LayerNorm, refuse_sharded_apart, without_weights
from .positions import RotaryEmbedding, Rotation, agreed_positions


class LongNetBlock(Block):
    """A causal `Block` with layer norms and rotated queries and keys.

    Its tables are the `cos` and `sin` of a `Rotation` with a batch dimension.

    Args:
        config: the shape of the model.
        pattern: which keys each head sees.
        exchange: as for `LongNet`.
        backend: as for `LongNet`.
    """

    is_causal = True

    def __init__(
        self,
        config: LongNetConfig,
        pattern: DilatedPattern,
        *,
        exchange: Schedule,
        backend: Backend,
    ) -> None:
        super().__init__(
            config,
            pattern,
            num_kv_heads=config.num_kv_heads,
            exchange=exchange,
            backend=backend,
        )

    def _rope(self, *tables: Tensor) -> Callable[[Tensor], Tensor]:
        return Rotation(*tables).__call__  # a tuple's tensors fully_shard would cast

    def _contract(self, expanded: Tensor, *, in_chunks: bool) -> Tensor:
        contracted: Tensor = self.contract(F.gelu(expanded))
        return contracted


class LongNet(TokenGenerator):
    """A pre-norm decoder on dilated attention, for sequences that no single device holds.

    Blocks are norm -> attention -> residual, norm -> MLP -> residual; then a final norm and the
    transposed token embedding. Attention is LongNet's (arXiv 2307.02486); positions are rotary
    (arXiv 2104.09864) and global: they come from the layout, so that the logits of a position do
    not depend on the rank that holds it.

    Weights start normal: projections with standard deviation ``fan_in ** -0.5``, those that write
    into the residual stream divided by ``sqrt(2 * num_layers)`` (GPT-2). The embedding starts with
    ``0.5 * embed_dim ** -0.5``, for small first logits, and enters the residual stream multiplied
    by ``sqrt(embed_dim)`` (Vaswani et al. 2017, section 3.4).

    Under autocast the residual stream has autocast's dtype. With ``checkpoint="keep_attention"``
    and `chunk_rows`, a rank holds for every block two tensors of the size of its residual stream
    (the block's input and the out of its attention) and an lse; `loss` never makes all logits. With
    `checkpoint_blocks` N it holds the input of every Nth block only.

    Args:
        config: the shape of the model.
        exchange: how rows travel between ranks, as in `dilated_attention`; default ``"auto"``.
        backend: kernels that compute the tiles, as in `dilated_attention`; default ``"auto"``.
        checkpoint: what backward recomputes: ``"none"``, the default, nothing; ``"full"`` every
            block; ``"keep_attention"`` every block except its attention.
        checkpoint_blocks: with ``"keep_attention"``, N stores the input of every Nth block only;
            the others are recomputed, everything except attention once more. Default 1.
        chunk_rows: number of rows at a time for everything position-wise (embedding, norms,
            projections, MLP, logits and their loss), which is computed again in backward, so that
            intermediates exist for this many rows only. None, the default: all rows at once.

    Raises:
        TypeError: `chunk_rows` or `checkpoint_blocks` is not an int.
        ValueError: `exchange`, `backend` or `checkpoint` has an unknown value, `chunk_rows` or
            `checkpoint_blocks` is below 1, or the latter above 1 with another `checkpoint`.
    """

    def __init__(
        self,
        config: LongNetConfig,
        *,
        exchange: Schedule = "auto",
        backend: Backend = "auto",
        checkpoint: Checkpoint = "none",
        checkpoint_blocks: int = 1,
        chunk_rows: int | None = None,
    ) -> None:
        super().__init__()
        check_checkpoint(checkpoint, checkpoint_blocks, chunk_rows)
        self.config = config
        self.checkpoint = checkpoint
        self.checkpoint_blocks = checkpoint_blocks
        self.chunk_rows = chunk_rows
        width, heads = config.embed_dim, config.num_heads
        with without_weights(self):
            self.embedding = nn.Embedding(config.vocab_size, width)
            self.rope = RotaryEmbedding(width // heads, theta=config.rope_theta)
            self.blocks = nn.ModuleList(
                LongNetBlock(config, pattern, exchange=exchange, backend=backend)
                for pattern in block_patterns(config)
            )
            self.norm = LayerNorm(width, eps=config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weights from torch's random state.

        They are the same for a model that was made on the meta device (``to_empty`` comes first),
        and under `fully_shard`, where all ranks make this call.
        """
        residual = 1 / math.sqrt(2 * self.config.num_layers)
        std = 0.5 * self.config.embed_dim**-0.5
        fill(self.embedding.weight, partial(nn.init.normal_, std=std))
        self.norm.reset_parameters()
        for block in self.blocks:
            assert isinstance(block, LongNetBlock)
            block.attention_norm.reset_parameters()
            block.mlp_norm.reset_parameters()
            for linear, gain in (
                (block.attention.q_proj, 1.0),
                (block.attention.k_proj, 1.0),
                (block.attention.v_proj, 1.0),
                (block.attention.out_proj, residual),
                (block.expand, 1.0),
                (block.contract, residual),
            ):
                std = gain * linear.in_features**-0.5
                fill(linear.weight, partial(nn.init.normal_, std=std))
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        documents: Integers | None = None,
        group: Group = None,
        mesh: Group = None,
        layout: SequenceLayout | None = None,
    ) -> Tensor:
        """Logits of the next token at every local position; with labels, their loss instead.

        Args:
            tokens: the local shard, int64, shape (batch, local_sequence).
            labels: as in `loss`, which this call then is: the form of it for a model inside of
                another module, such as DistributedDataParallel. None: logits.
            documents: cumulative lengths ``[0, ..., n]`` of documents packed in the whole sequence
                of n positions (not in this rank's shard): ints, or a 1-D int32 or int64 tensor;
                attention never crosses their borders. None: one document. Rotary positions restart
                at each.
            group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None
                for one process.
            mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
            layout: which positions each rank holds; None means contiguous equal shards.

        Returns:
            Logits, shape (batch, local_sequence, vocab_size), in the dtype of the parameters (or
            of autocast); or the loss, a scalar.

        Raises:
            TypeError: this rank's `tokens` are not int64.
            ValueError: this rank's tokens do not fit, or its layout is for another number of ranks
                or another local length; some other rank refused its arguments; with labels, the
                model is in DistributedDataParallel, which must be called instead; and see
                `dilated_attention`.
            IndexError: a token is not in the vocabulary (on CPUs; a GPU stops at an assertion).
        """
        group = one_group(group, mesh)
        if labels is not None:
            refuse_beside_wrapper(self)
        refuse_sharded_apart(self, ("embedding",), "the logits have its weights, too")
        if self.chunk_rows is not None:
            refuse_sharded_apart(self, ("norm",), IN_CHUNKS)
        hidden = self._hidden(tokens, labels, documents, group, layout)
        modules = (self.norm, self.embedding)
        if labels is None:
            return map_rows(self.logits, hidden, rows=self.chunk_rows, modules=modules)
        losses = map_rows(self._losses, hidden, labels, rows=self.chunk_rows, modules=modules)
        return losses.sum()

    def loss(self, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Cross-entropy, in nats, summed over the local positions.

        It calls the module with these labels, so that hooks run, those of `fully_shard` too.

        Args:
            tokens: the local shard, int64, shape (batch, local_sequence).
            labels: the token that follows each of `tokens`, whichever rank holds it; the shape and
                dtype of `tokens`. Where it is -100, nothing is learnt.
            options: `documents`, `group`, `mesh` and `layout`, as for `forward`. The last label of
                a document counts like any other.

        Returns:
            A scalar, summed in float32 (float64 for float64 parameters); 0 where there is no local
            position. The loss of the whole sequence is the sum over ranks, as its gradient is; what
            averages gradients, as DDP and FSDP do, wants it divided by `labels_per_rank`.

        Raises:
            TypeError: this rank's `tokens` or `labels` are not int64.
            ValueError: as in `forward`, or the labels have another shape than the tokens; or the
                model is in DistributedDataParallel, which must be called instead.
        """
        refuse_beside_wrapper(self)
        # None would be a call for logits: as anything else that is no tensor, it is refused.
        loss: Tensor = self(tokens, "None" if labels is None else labels, **options)
        return loss

    def _hidden(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        documents: Integers | None,
        group: Group,
        layout: SequenceLayout | None,
    ) -> Tensor:
        """The residual stream after the last block: (batch, local_sequence, embed_dim)."""
        positions, documents, _ = agreed_positions(
            tokens, group, layout, documents=documents, labels=labels
        )
        rotation = self.rope(positions[None])
        embed = partial(map_rows, self.embed, rows=self.chunk_rows, modules=(self.embedding,))
        hidden = telling_ranks(group, embed, tokens)
        around: Checkpoint = "keep_attention" if self.checkpoint_blocks > 1 else "none"
        through = partial(
            self._through,
            checkpoint=self.checkpoint,
            chunk_rows=self.chunk_rows,
            documents=documents,
            group=group,
            layout=layout,
        )
        for first in range(0, len(self.blocks), self.checkpoint_blocks):
            blocks = self.blocks[first : first + self.checkpoint_blocks]
            hidden = run_checkpointed(around, blocks, through, blocks, hidden, rotation)
        return hidden

    def _through(
        self, blocks: nn.ModuleList, hidden: Tensor, rotation: Rotation, **options: Any
    ) -> Tensor:
        for block in blocks:
            hidden = block(hidden, rotation.cos, rotation.sin, **options)
        return hidden

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of every row: shape (batch, rows), float32 or float64."""
        logits = self.logits(hidden).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
