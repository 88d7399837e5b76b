"""An encoder of whole slides: from features and coordinates of tiles to a vector of the slide."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import _register_namedtuple

from ..documents import Integers
from ..exchange import Group, one_group, place_in
from ..functional import autocast_inputs
from ..layout import SequenceLayout
from ..options import Schedule
from ..parallel import fill, is_fully_sharded
from ..pattern import DilatedPattern
from ..tiles import Backend
from ..torch_op import agreed, sum_over_ranks, telling_ranks
from .block import Block
from .checkpoint import Checkpoint, check_checkpoint, map_rows, run_checkpointed
from .config import SlideEncoderConfig, block_patterns
from .gigapath import gigapath_fields, gigapath_key, gigapath_state, weights_of
from .maps import AttentionMaps, MapRecorder
from .modules import (
    IN_CHUNKS,
    LayerNorm,
    check_rows,
    is_plain,
    normalize_gelu,
    refuse_sharded_apart,
    without_weights,
)
from .slide_rows import Numbers, Rows, rows_of_batch, rows_of_pack, sizes_of_tiles
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
    """Encoded slides: vectors of class tokens and tiles, on this rank.

    Attributes:
        cls: the vector of the slide, that of its class token or, with ``pooling="mean"``, the mean
            of its tiles: shape (batch, 1, embed_dim) on the rank that holds position 0, (batch, 0,
            embed_dim) on the others. Of packed slides (own_slides, embed_dim): one row for each
            class token that this rank holds, by slide; on one process (slides, embed_dim).
        tiles: of its tiles, shape (batch, local_tiles, embed_dim).
        layers: with ``all_layers=True`` the vectors of the slide before the first block and after
            each, without the final norm: (num_layers + 1, ...), as `cls` behind it. Else (0, ...).
    """

    cls: Tensor
    tiles: Tensor
    layers: Tensor


_register_namedtuple(Encoded, serialized_type_name=f"{__name__}.Encoded")  # for torch.export.save


class SlideEncoder(nn.Module):
    """A pre-norm encoder on dilated attention for slides of any number of tiles, on any ranks.

    Features are projected, given a sine-cosine embedding of where the tile is, and go through
    `EncoderBlock`s and a final norm behind a class token: the shape of Prov-GigaPath's slide
    encoder (Xu et al. 2024, Nature 630), to train your own, or to run its published weights, which
    `from_gigapath` reads. There is no dropout.

    The sequence has one position more than the slide has tiles: the class token is position 0, tile
    i is position i + 1. Each rank passes the tiles of its positions. The rank that holds position 0
    (the first, in most layouts) therefore passes one tile less than it holds positions. Of packed
    slides each has its class token before its tiles: slide s begins at position documents[s] + s.

    The embedding of a tile's coordinates is computed in float32, also in a float64 model; with
    `grid_positions` the latter computes it in float64 and rounds it, as Prov-GigaPath does.
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
            eps = config.pooled_norm_eps
            self.pooled_norm = None if eps is None else LayerNorm(config.embed_dim, eps=eps)
        self.reset_parameters()

    @classmethod
    def from_gigapath(
        cls,
        file: str | os.PathLike[str] | Mapping[str, Any],
        *,
        global_pool: bool = False,
        max_wsi_size: int = 262_144,
        tile_size: float = 256.0,
        **options: Any,
    ) -> SlideEncoder:
        """Make the slide encoder of Prov-GigaPath with its weights, or with fine-tuned ones.

        Its outputs are those of prov-gigapath's `LongNetViT` in eval mode: ``cls`` is the last, and
        ``layers`` all that ``all_layer_embed=True`` gives. Neither gigapath, fairscale, timm nor
        flash-attn are needed.

        Args:
            file: slide_encoder.pth as published, or a file of `torch.save` with the same keys,
                behind a prefix, too, as in fine-tuned models; or the mapping that such a file
                holds. Only tensors are read of it, no code (``weights_only``).
            global_pool: as of prov-gigapath's `create_model`: whether the vector of a slide is the
                mean of its tiles, and not its class token.
            max_wsi_size: as of `create_model`: side of the largest slide in pixels, from which the
                segment lengths follow. Default 262,144, for inference; prov-gigapath's fine-tuning
                has 250,000.
            tile_size: side of a tile in units of the coordinates, from which they follow, too.
            options: keyword arguments of `SlideEncoder`, or fields of `SlideEncoderConfig`:
                `num_heads`, say, which weights do not tell (16 by default), or `branch_gradients`
                (``"detached"``, prov-gigapath's, by default).

        Returns:
            The encoder, on the CPU, in the dtype of the weights.

        Raises:
            TypeError: an option is unknown.
            ValueError: the file holds no such encoder, or weights are missing.
        """
        state = gigapath_state(file)
        fields = gigapath_fields(
            state, global_pool=global_pool, max_wsi_size=max_wsi_size, tile_size=tile_size
        )
        known = SlideEncoderConfig.__dataclass_fields__
        fields |= {name: options.pop(name) for name in list(options) if name in known}
        with torch.device("meta"):
            encoder = cls(SlideEncoderConfig(**fields), **options)
        weights = weights_of(state, encoder.state_dict())
        encoder.load_state_dict(weights, assign=True)
        return encoder

    def to_gigapath(self) -> dict[str, Tensor]:
        """The weights by prov-gigapath's keys: ``torch.save({"model": ...})`` is its file.

        Raises:
            ValueError: prov-gigapath's code would compute something else with them, by `config`.
        """
        if self.pooled_norm is None or not self.config.grid_positions:
            raise ValueError(
                "to_gigapath needs a SlideEncoder made by from_gigapath, or with pooled_norm_eps "
                "and grid_positions=True: prov-gigapath's code would compute something else"
            )
        return {gigapath_key(name): x for name, x in self.state_dict().items()}

    def reset_parameters(self) -> None:
        """Set the initial weights from torch's random state: see `EncoderBlock`."""
        fill(self.embedding.weight, nn.init.xavier_uniform_)
        nn.init.zeros_(self.embedding.bias)
        fill(self.cls_token, partial(nn.init.normal_, std=0.02))
        for block in self.blocks:
            assert isinstance(block, EncoderBlock)
            block.reset_parameters()
        for norm in (self.norm, self.pooled_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self,
        features: Tensor,
        coordinates: Tensor,
        *,
        lengths: Integers | None = None,
        documents: Integers | None = None,
        tile_size: Numbers | None = None,
        all_layers: bool = False,
        maps: bool = False,
        group: Group = None,
        mesh: Group = None,
        layout: SequenceLayout | None = None,
    ) -> Encoded | tuple[Encoded, AttentionMaps]:
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
            documents: borders of packed slides in tiles, (0, ..., tiles of all ranks), as
                cu_seqlens: ints, or a 1-D int32 or int64 tensor. Each slide is encoded as it would
                be alone; of a slide of no tiles there is the class token. The batch must be 1.
                None: each row is one slide. Under torch.compile a tensor on the CPU, on one
                process, serves all packs with one graph, as a tensor of `tile_size` does.
            tile_size: side of a tile in units of the coordinates: one number, or one for each slide
                (row of the batch); None: that of the config.
            all_layers: whether to return the vectors of the slides of all layers.
            maps: whether to return the attention maps of all layers, too: ``(Encoded,
                AttentionMaps)``. Without gradients. Each layer takes about one backward of its
                attention more, and until they are made, its query, key, value and lse are held.
            group: the ranks that share each slide: a ProcessGroup, a 1-D DeviceMesh, or None for
                one process.
            mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
            layout: which positions each rank holds, of a sequence of one position more than there
                are tiles, or of one more for each packed slide. None means contiguous equal shards;
                of packed slides `SequenceLayout.contiguous`.

        Returns:
            The vectors of the slides, and rows of the tiles. Backward must run on every rank, so
            every rank's loss must depend on them, also where there are no rows.

        Raises:
            TypeError, ValueError: the arguments do not fit, on this rank or on another; and see
                `dilated_attention`.
        """
        group = one_group(group, mesh)
        if maps and torch.is_grad_enabled():
            raise ValueError("maps have no gradients: call with maps=True under torch.no_grad()")
        if self.chunk_rows is not None:
            refuse_sharded_apart(self, ("embedding", "norm"), IN_CHUNKS)
        given = (features, coordinates, lengths, documents, tile_size, layout)
        places, rows = self._agreed(group, *given)
        told = None if is_fully_sharded(self.embedding) else group  # ranks wait for its weights
        hidden = telling_ranks(told, self._embed_all, features, places, rows)
        if MISCOUNTS_ROWS and torch.compiler.is_compiling():
            _sum_one_order_at_a_time()
        pooled = [self._pool(hidden, rows)] if all_layers else []
        recorder = MapRecorder(group=group, **rows.of_attention)
        for block in self.blocks:
            hidden = block(
                hidden,
                checkpoint=self.checkpoint,
                chunk_rows=self.chunk_rows,
                attend=partial(recorder.attend, block.attention) if maps else None,
                group=group,
                **rows.of_attention,
            )
            if all_layers:
                pooled.append(self._pool(hidden, rows))
        hidden = map_rows(self.norm, hidden, rows=self.chunk_rows, modules=(self.norm,))
        pooled.append(self._pool(hidden, rows))
        vectors = self._vectors(torch.stack(pooled), rows, group, hidden.dtype)
        encoded = Encoded(vectors[-1], rows.of_tiles(hidden), vectors[:-1])
        return (encoded, recorder.maps(rows)) if maps else encoded

    def _pool(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Of each slide, (batch, ..., embed_dim): its class token if it is here, or a sum."""
        if self.config.pooling == "cls":
            return rows.of_cls(hidden)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return rows.sums(rows.of_tiles(hidden).to(wide))

    def _vectors(self, pooled: Tensor, rows: Rows, group: Group, dtype: torch.dtype) -> Tensor:
        """The vectors of the slides of each layer, of what was pooled on all ranks."""
        if self.config.pooling == "mean":
            if group is not None:
                pooled = sum_over_ranks(pooled, "SlideEncoder", group)
            pooled = rows.own_means(pooled).to(dtype)
        vectors = pooled if self.pooled_norm is None else self.pooled_norm(pooled)
        return vectors if rows.packed is None else vectors.squeeze(1)

    def _embed_all(self, features: Tensor, places: Tensor, rows: Rows) -> Tensor:
        """The rows of the tiles, and of the class tokens that this rank has."""
        hidden = map_rows(
            self._embed, features, places, rows=self.chunk_rows, modules=(self.embedding,)
        )
        # On no rows where this rank has no class token, so that its parameter gets a gradient.
        # Selected: the gradient of a view of it would be a view of the gradient of all rows.
        cls = autocast_inputs(self.cls_token[0])[0].expand(len(hidden), rows.count, -1)
        return rows.joined(hidden, cls.to(hidden.dtype))

    def _embed(self, features: Tensor, places: Tensor) -> Tensor:
        embedded, width = self.embedding(features), self.config.embed_dim
        if self.config.grid_positions:
            places = places.floor().flip(-1)
            wide = torch.promote_types(embedded.dtype, torch.float32)
            position = sincos_positions(places, width, dtype=wide).float()
        else:
            position = sincos_positions(places, width)
        return autocast_inputs(embedded + position.to(embedded.dtype))[0]

    def _agreed(
        self,
        group: Group,
        features: Tensor,
        coordinates: Tensor,
        lengths: Integers | None,
        documents: Integers | None,
        tile_size: Numbers | None,
        layout: SequenceLayout | None,
    ) -> tuple[Tensor, Rows]:
        """The places of the tiles, in tiles, and the rows of this rank.

        If any rank's arguments do not fit, an error on every rank: one that raised alone would
        leave the others waiting for it in the first attention.
        """
        rows, places, failure = None, None, None
        rank, world_size = place_in(group)
        try:
            self._check_shapes(features, coordinates)
            slides = len(features)
            if documents is None:
                rows = rows_of_batch(features, lengths, rank, world_size, layout)
            else:
                rows = rows_of_pack(features, documents, rank, world_size, layout)
                slides = len(documents) - 1
            if lengths is not None and (documents is not None or self.config.pooling == "mean"):
                raise ValueError(
                    "lengths, of slides that are padded, are neither for packed slides nor for "
                    "pooling='mean': pack the slides without padding, and give documents alone"
                )
            sizes = sizes_of_tiles(tile_size, self.config.tile_size, slides, features.device)
            places = coordinates.to(torch.float64) / rows.by_tile(sizes)
        except Exception as error:  # whatever it is, the other ranks are to be told
            failure = error
        # What else must be equal on all ranks, the first attention compares.
        device = features.device if isinstance(features, Tensor) else torch.device("cpu")
        places = agreed(places, "SlideEncoder", group, failure, device)
        assert rows is not None
        return places, rows

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
