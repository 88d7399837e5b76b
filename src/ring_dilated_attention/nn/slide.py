"""An encoder of whole slides: from features and coordinates of tiles to a vector of the slide."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from ..documents import Integers, ints_or_tensor
from ..exchange import Group, one_group, place_in
from ..functional import autocast_inputs
from ..layout import SequenceLayout
from ..options import Schedule, check_options
from ..parallel import fill, is_fully_sharded
from ..pattern import DilatedPattern
from ..tiles import Backend
from ..torch_op import agreed, telling_ranks
from .block import Block
from .checkpoint import Checkpoint, check_checkpoint, map_rows, run_checkpointed
from .config import SlideEncoderConfig, block_patterns
from .modules import (
    IN_CHUNKS,
    LayerNorm,
    check_rows,
    is_plain,
    normalize_gelu,
    refuse_sharded_apart,
    without_weights,
)
from .positions import checked_lengths
from .spatial import sincos_positions


class EncoderBlock(Block):
    """A `Block` with MAGNETO's sub-LN in attention and in the MLP.

    MAGNETO (Wang et al. 2022, arXiv 2210.06423) also normalises what the output projections of
    attention and of the MLP read. torchscale's encoders do the same, in other words: their
    inner_attn_ln, fc1, ffn_layernorm and fc2 are attention.norm, expand, inner_norm and contract.

    Args:
        config: the shape of the encoder.
        pattern: which keys each head sees.
        exchange: as for `SlideEncoder`.
        backend: as for `SlideEncoder`.
    """

    def __init__(
        self,
        config: SlideEncoderConfig,
        pattern: DilatedPattern,
        *,
        exchange: Schedule,
        backend: Backend,
    ) -> None:
        self.gain = math.sqrt(math.log(2 * config.num_layers))
        with without_weights(self):
            super().__init__(
                config,
                pattern,
                has_inner_norm=True,
                branch_gradients=config.branch_gradients,
                layer_norm=True,
                layer_norm_eps=config.norm_eps,
                gamma_init=self.gain,
                exchange=exchange,
                backend=backend,
            )
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

    def _contract(self, expanded: Tensor, *, in_chunks: bool) -> Tensor:
        """The MLP from its first projection on.

        The widest tensors are those between the MLP's two projections. Unless it is done in chunks,
        whose intermediates do not live long, autograd holds the first projection's result alone:
        the GELU and its norm, which are cheap, run again in backward.
        """
        modules, is_traced = (self.inner_norm, self.contract), torch.compiler.is_compiling()
        weights = [] if is_traced else [x for module in modules for x in module.parameters()]
        by_functorch = torch._C._are_functorch_transforms_active() and not is_traced
        # In backward tensors of functional_call are gone.
        if in_chunks or by_functorch or not all(isinstance(x, nn.Parameter) for x in weights):
            return self._normed(expanded)
        if is_traced or not (is_plain(modules[0], LayerNorm) and is_plain(modules[1], nn.Linear)):
            return run_checkpointed("full", modules, self._normed, expanded)
        # The same without a checkpoint's hooks, which take the CPU 0.3 ms.
        return map_rows(self._normed, expanded, rows=max(1, expanded.shape[1]), modules=modules)

    def _normed(self, expanded: Tensor) -> Tensor:
        contracted: Tensor = self.contract(normalize_gelu(self.inner_norm, expanded))
        return contracted


class Encoded(NamedTuple):
    """What a rank gets of an encoded slide.

    Attributes:
        cls: of the class token, shape (batch, 1, embed_dim) on the rank that holds position 0,
            (batch, 0, embed_dim) on the others.
        tiles: of its tiles, shape (batch, local_tiles, embed_dim).
    """

    cls: Tensor
    tiles: Tensor


_register_namedtuple(Encoded, serialized_type_name=f"{__name__}.Encoded")  # for torch.export.save


class SlideEncoder(nn.Module):
    """A pre-norm encoder on dilated attention for slides of any number of tiles, on any ranks.

    Features are projected, given a sine-cosine embedding of where the tile is, and go through
    `EncoderBlock`s and a final norm behind a class token: the shape of Prov-GigaPath's slide
    encoder (Xu et al. 2024, Nature 630), to train your own. To run its published weights, shard
    its own code: see `integrations.gigapath`. There is no dropout.

    The sequence has one position more than the slide has tiles: the class token is position 0, tile
    i is position i + 1. Each rank passes the tiles of its positions. The rank that holds position 0
    (the first, in most layouts) therefore passes one tile less than it holds positions.

    The embedding of a tile's coordinates is computed in float32, also in a float64 model.
    Under autocast the residual stream and the norms have autocast's dtype. With ``keep_attention``
    and `chunk_rows`, a rank holds for every block two tensors of the size of its residual stream
    and an lse.

    Args:
        config: the shape of the encoder.
        exchange: how rows travel between ranks, as in `dilated_attention`; default ``"auto"``.
        backend: kernels that compute the tiles, as in `dilated_attention`; default ``"auto"``.
        checkpoint: what backward recomputes: ``"none"``, the default, only the GELU of each MLP and
            the norm after it; ``"full"`` every block; ``"keep_attention"`` every block except its
            attention.
        chunk_rows: number of rows at a time for everything position-wise (projections, norms, MLP),
            which is computed again in backward, so that intermediates exist for this many rows
            only. None, the default: all rows at once.

    Raises:
        TypeError: `chunk_rows` is not an int.
        ValueError: an option has an unknown value, or `chunk_rows` is below 1.
    """

    def __init__(
        self,
        config: SlideEncoderConfig,
        *,
        exchange: Schedule = "auto",
        backend: Backend = "auto",
        checkpoint: Checkpoint = "none",
        chunk_rows: int | None = None,
    ) -> None:
        super().__init__()
        check_checkpoint(checkpoint, 1, chunk_rows)
        self.config = config
        self.checkpoint = checkpoint
        self.chunk_rows = chunk_rows
        with without_weights(self):
            self.embedding = nn.Linear(config.in_dim, config.embed_dim)
            self.cls_token = nn.Parameter(torch.empty(1, 1, config.embed_dim))
            self.blocks = nn.ModuleList(
                EncoderBlock(config, pattern, exchange=exchange, backend=backend)
                for pattern in block_patterns(config)
            )
            self.norm = LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weights from torch's random state: see `EncoderBlock`."""
        fill(self.embedding.weight, nn.init.xavier_uniform_)
        nn.init.zeros_(self.embedding.bias)
        fill(self.cls_token, partial(nn.init.normal_, std=0.02))
        for block in self.blocks:
            assert isinstance(block, EncoderBlock)
            block.reset_parameters()
        self.norm.reset_parameters()

    def forward(
        self,
        features: Tensor,
        coordinates: Tensor,
        *,
        lengths: Integers | None = None,
        group: Group = None,
        mesh: Group = None,
        layout: SequenceLayout | None = None,
    ) -> Encoded:
        """Encode the tiles that this rank holds, among those that all ranks hold.

        Args:
            features: shape (batch, local_tiles, in_dim), in the dtype of the parameters; under
                autocast float32, bfloat16 or float16.
            coordinates: where the tiles are, shape (batch, local_tiles, 2), integers, float32 or
                float64. Under `fully_shard` with a MixedPrecisionPolicy pass integers: it casts
                floating arguments.
            lengths: (batch,) ints, how many tiles each slide of the batch has, where slides are
                padded at their ends. Attention never sees padding, but projections and MLPs are
                computed for it: pad with zeros, since values there that are NaN or overflow
                make gradients of the weights NaN. None: all of them.
            group: the ranks that share each slide: a ProcessGroup, a 1-D DeviceMesh, or None for
                one process.
            mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
            layout: which positions each rank holds, of a sequence of one position more than there
                are tiles; None means contiguous equal shards.

        Returns:
            Rows of the class token and of the tiles. Backward must run on every rank, so every
            rank's loss must depend on them, also where there are no rows.

        Raises:
            TypeError, ValueError: the arguments do not fit, on this rank or on another; and see
                `dilated_attention`.
        """
        group = one_group(group, mesh)
        if self.chunk_rows is not None:
            refuse_sharded_apart(self, ("embedding", "norm"), IN_CHUNKS)
        coordinates, at, positions = self._agreed(features, coordinates, lengths, group, layout)
        told = None if is_fully_sharded(self.embedding) else group  # ranks wait for its weights
        hidden = telling_ranks(told, self._embed_all, features, coordinates, at)
        if MISCOUNTS_ROWS and torch.compiler.is_compiling():
            _sum_one_order_at_a_time()
        for block in self.blocks:
            hidden = block(
                hidden,
                checkpoint=self.checkpoint,
                chunk_rows=self.chunk_rows,
                lengths=positions,
                group=group,
                layout=layout,
            )
        hidden = map_rows(self.norm, hidden, rows=self.chunk_rows, modules=(self.norm,))
        if at is None:
            return Encoded(hidden[:, :0], hidden)
        cls, after = hidden[:, at : at + 1], hidden[:, at + 1 :]
        return Encoded(cls, torch.cat([hidden[:, :at], after], 1) if at else after)

    def _embed_all(self, features: Tensor, coordinates: Tensor, at: int | None) -> Tensor:
        """The rows of the tiles, and of the class token where this rank has it."""
        hidden = map_rows(
            self._embed, features, coordinates, rows=self.chunk_rows, modules=(self.embedding,)
        )
        count = 0 if at is None else 1
        # On no rows where this rank has no class token, so that its parameter gets a gradient.
        # Selected: the gradient of a view of it would be a view of the gradient of all rows.
        cls = autocast_inputs(self.cls_token[0])[0].expand(len(hidden), count, -1)
        return torch.cat([hidden[:, : at or 0], cls.to(hidden.dtype), hidden[:, at or 0 :]], 1)

    def _embed(self, features: Tensor, coordinates: Tensor) -> Tensor:
        embedded = self.embedding(features)
        tiles = coordinates.to(torch.float64) / self.config.tile_size
        position = sincos_positions(tiles, self.config.embed_dim).to(embedded.dtype)
        return autocast_inputs(embedded + position)[0]

    def _agreed(
        self,
        features: Tensor,
        coordinates: Tensor,
        lengths: Integers | None,
        group: Group,
        layout: SequenceLayout | None,
    ) -> tuple[Tensor, int | None, Integers | None]:
        """The coordinates, the local row of the class token if it is here, positions of each slide.

        If any rank's arguments do not fit, an error on every rank: one that raised alone would
        leave the others waiting for it in the first attention.
        """
        at, failure = None, None
        positions: Integers | None = None
        rank, world_size = place_in(group)
        try:
            self._check_shapes(features, coordinates)
            at = _row_of_cls(features.shape[1], rank, world_size, layout)
            local = features.shape[1] + (0 if at is None else 1)
            total = local * world_size if layout is None else layout.length
            positions = _positions(lengths, len(features), total - 1)
        except Exception as error:  # whatever it is, the other ranks are to be told
            failure = error
        # What else must be equal on all ranks, the first attention compares.
        device = features.device if isinstance(features, Tensor) else torch.device("cpu")
        coordinates = agreed(coordinates, "SlideEncoder", group, failure, device)
        return coordinates, at, positions

    def _check_shapes(self, features: Tensor, coordinates: Tensor) -> None:
        check_rows("features", features, self.config.in_dim, "(batch, local_tiles, ")
        check_rows("coordinates", coordinates, 2, "(batch, local_tiles, ")
        kind = coordinates.dtype
        if kind in (torch.float16, torch.bfloat16, torch.bool) or kind.is_complex:
            raise TypeError(
                f"coordinates must be integers, float32 or float64; got {kind}. Under fully_shard "
                "with a MixedPrecisionPolicy, which casts floating arguments and rounds them, pass "
                "coordinates.round().long(), or set cast_forward_inputs=False"
            )
        if features.shape[:2] != coordinates.shape[:2]:
            raise ValueError(
                "features and coordinates must have the same batch and tiles; got shapes "
                f"{tuple(features.shape)} and {tuple(coordinates.shape)}"
            )


def _positions(lengths: Integers | None, batch: int, most: int) -> Integers | None:
    """Positions of each slide, the class token's included: slides have `most` tiles at most."""
    known, tiles = ints_or_tensor("lengths", lengths)
    if tiles is not None:  # not known while torch.compile traces: attention refuses a negative one
        return torch.where(tiles < 0, tiles, tiles + 1)
    if known is None:
        return None
    return [count + 1 for count in checked_lengths(known, batch, 0, most)]


def _row_of_cls(
    tiles: int, rank: int, world_size: int, layout: SequenceLayout | None
) -> int | None:
    """The local row of position 0; None where another rank holds it."""
    if layout is None:
        return None if rank else 0
    check_options(layout=layout)
    layout.check_ranks(world_size)
    first = layout.pieces[0]
    own = first.rank == rank
    # Not `- own`: torch 2.11 cannot compile a changing length minus a bool.
    expected = layout.local_length(rank) - (1 if own else 0)
    if tiles != expected:
        raise ValueError(
            f"the layout gives this rank {expected} tiles{' beside the class token' * own}; got "
            f"{tiles}. It must have one position more than the slide has tiles, for the class token"
        )
    return first.local if own else None


MISCOUNTS_ROWS = "2.10" <= torch.__version__ < "2.12"  # as versions compare, not as text
"""Whether Inductor fails in gradients of norms where the rows are a changing number and one more,
as those of tiles and a class token are. Its code for GPUs that sums several orders of a tensor at
once has ``2 * 1 + n // 16`` there where ``2 * (1 + n // 16)`` is meant, and backward raises
RuntimeError. torch 2.12 writes parentheses."""


def _sum_one_order_at_a_time() -> None:
    """Called by the tracer, before anything is compiled."""
    from torch._inductor import config

    config.triton.mix_order_reduction = False


# What `torch.compiler.assume_constant_result` does, which takes a second to import the compiler.
vars(_sum_one_order_at_a_time)["_dynamo_marked_constant"] = True
