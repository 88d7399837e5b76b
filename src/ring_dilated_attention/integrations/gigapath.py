"""Slide encoders of Prov-GigaPath and LongViT on several GPUs, as they are.

Every rank calls the model with the whole slide, as on one GPU, and gets the whole result. In
between, each rank computes the encoder's layers for its shard of the tiles.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..exchange import Exchange, Group, one_group, resolve_exchange, together, untraced
from ..layout import SequenceLayout
from ..torch_op import sum_over_ranks
from .torchscale import attention_of, replace_dilated_attention, set_layout

__all__ = ["shard_slide_encoder"]

_NAME = "shard_slide_encoder"

_SIMILAR = 1e-2
"""Relative difference of what ranks were given, up to which it is the same slide. GPUs of different
kinds differ by less than 1e-3 in half precision; another slide, or order of tiles, by about 1."""


def shard_slide_encoder(
    model: nn.Module,
    *,
    group: Group = None,
    mesh: Group = None,
    **options: Any,
) -> int:
    """Have a slide encoder of Prov-GigaPath or LongViT compute each slide on all ranks of a group.

    The model is called as before, on every rank with the same whole slide of any number of tiles;
    ranks compare what they embed, which waits for the GPU once.
    Every rank gets the same result to the last bit: the embedding of the slide by class token or
    mean (``global_pool``), and those of all layers (``all_layer_embed=True``). Between the ranks
    the rows of the encoder are shared evenly, to 1% at most, the class token on the first one.
    flash-attn is not needed. Parameters, their names and the state dict stay what they are.

    Write the loss as for one GPU, on every rank, and **average the gradients over the ranks**:
    `DistributedDataParallel` does so. (Each rank's gradients of the encoder are those of its rows,
    times the number of ranks; each rank's gradients of what follows are complete.)

    In training mode, dropout draws other numbers on each rank, and stochastic depth (`DropPath`)
    drops the same layers on all. On one process only the encoder's attention is replaced.

    Args:
        model: a `LongNetViT` of prov-gigapath, a `LongViTForTCGAClassification` of torchscale's
            examples, or a module that holds some; changed in place, or not at all where this
            raises. A second call changes `group`.
        group: the ranks that share each slide: a ProcessGroup, a 1-D DeviceMesh, or None for one
            process.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        options: keyword arguments of `TorchscaleDilatedAttention`: `head_offsets`, `zero_keys`,
            `branch_gradients`, `exchange` and `backend`.

    Returns:
        How many attention modules now are this package's.

    Raises:
        TypeError: `model` is not a module, or an option is unknown.
        ValueError: options are given in a second call; the model has no such encoder, or one that
            cannot be sharded, because its forward is another one, say; and from forward, on every
            rank: ranks were given different slides or have different parameters or `global_pool`,
            or the encoder got other arguments than these models pass.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
    found = list(_models(model))
    if not found:
        raise ValueError(
            "the model holds no LongNetViT of prov-gigapath and no LongViTForTCGAClassification "
            f"of torchscale; got {type(model).__name__}. For other models replace the attention "
            "with integrations.torchscale.replace_dilated_attention, and shard the sequence"
        )
    group = one_group(group, mesh)
    ranks = resolve_exchange(group).world_size
    for path, each in found:
        if not isinstance(vars(each.encoder).get("forward"), _ShardedForward | None):
            where = f"{path}.encoder".lstrip(".")
            raise ValueError(f"{where}.forward has been replaced: shard the encoder before that")
    # A layout of one position a rank: every forward pass sets its own.
    layout = SequenceLayout.contiguous(ranks, ranks) if ranks > 1 else None
    encoders = list(dict.fromkeys(each.encoder for _, each in found))
    sharded = encoders[0] if len(encoders) == 1 else nn.ModuleList(encoders)
    count = replace_dilated_attention(sharded, group=group, layout=layout, **options)
    for _, each in found:
        vars(each.encoder).pop("forward", None)
        for module in attention_of(each.encoder.modules()):
            module.ignores_padding_mask = ranks > 1  # it is always the empty one
        if ranks > 1:
            each.encoder.forward = _ShardedForward(each, group)
    return count


def _models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules with a slide encoder, told by the names of their classes, and their paths."""
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        for name in kinds & {"LongNetViT", "LongViTForTCGAClassification"}:
            forward = _forward_of(module)
            if forward.split(".")[-2:] != [name, "forward"]:
                raise ValueError(
                    f"{path or 'the model itself'} has {forward}, and a sharded encoder returns "
                    f"only the rows that {name}.forward reads: shard a {name}, or replace the "
                    "attention alone, integrations.torchscale.replace_dilated_attention"
                )
            yield path, module if name == "LongNetViT" else module.model


def _forward_of(module: nn.Module) -> str:
    """The name of a module's forward, with its class, also where another was put in its place."""
    for forward in (module.forward, type(module).forward):
        written: Any = inspect.unwrap(forward)  # inside of accelerate's, or torch.compile's
        name = getattr(written, "__qualname__", None)  # of a partial: none
        if name is not None:
            return str(name)
    return "an object without a name"


class _ShardedForward:
    """The forward of a model's encoder whose rows are shared by the ranks of a group."""

    def __init__(self, model: Any, group: Group) -> None:
        self.model, self.group = model, group

    def __deepcopy__(self, memo: dict[int, Any]) -> _ShardedForward:
        return _ShardedForward(copy.deepcopy(self.model, memo), self.group)  # no copy of a group

    @property
    def has_class_token(self) -> bool:
        """Whether the model reads the row of position 0, and no mean contains it."""
        return hasattr(self.model, "cls_token")

    @property
    def reads_mean(self) -> bool:
        return not self.has_class_token or bool(self.model.global_pool)

    def __call__(
        self,
        src_tokens: None = None,
        *,
        token_embeddings: Tensor | None = None,
        return_all_hiddens: bool = False,
        **others: Any,
    ) -> dict[str, Any]:
        """What the encoder returns, with what the model pools in the place of all rows."""
        ends, encoder = resolve_exchange(self.group), self.model.encoder
        given = {"src_tokens": src_tokens, **others}
        layout = self._agree(ends, token_embeddings, given, return_all_hiddens)
        assert token_embeddings is not None
        set_layout(encoder, layout)
        shard = layout.shard(token_embeddings, ends.rank, 1)
        with _own_randomness(encoder, ends.rank, shard.device):
            found = type(encoder).forward(
                encoder,
                src_tokens=None,
                token_embeddings=shard,
                return_all_hiddens=return_all_hiddens,
            )
        return {
            **found,
            "encoder_out": self._pooled(ends, layout, found["encoder_out"]),
            "encoder_states": [self._pooled(ends, layout, x) for x in found["encoder_states"]],
            "encoder_embedding": None,
            "encoder_padding_mask": None,
        }

    @untraced
    def _agree(
        self, ends: Exchange, tokens: Any, given: dict[str, Any], all_layers: bool
    ) -> SequenceLayout:
        """The layout of a slide; an error on every rank unless all were given the same one."""
        device = tokens.device if isinstance(tokens, Tensor) else torch.device("cpu")
        with ends.calls.enter(_NAME, "inputs") as scope:
            with together(scope, ends, device) as agreed:
                layout = self._layout(tokens, given, ends.world_size)
                numbers = _numbers(tokens)
                agreed.on(
                    {
                        "shape": tuple(tokens.shape),
                        "dtype": str(tokens.dtype),
                        "all_layer_embed": all_layers,
                        "global_pool": self.reads_mean,
                        "training": self.model.encoder.training,
                    }
                )
            totals, scales = zip(*ends.share(numbers), strict=True)
            # NaN, of a slide that has some, is no difference.
            differ = [abs(x - totals[0]) > _SIMILAR * max(scales) for x in totals]
            other = [rank for rank, found in enumerate(differ) if found]
            scope.in_step = bool(other)  # every rank raises
            if other:
                raise ValueError(
                    f"ranks {other} embed the tiles of this slide differently than rank 0. Every "
                    "rank of the group must call the model with the same whole slide, tiles in the "
                    "same order, and have the same parameters: share slides out among groups, not "
                    "among the ranks of one, and average gradients over the ranks"
                )
        return layout

    def _layout(self, tokens: Any, given: dict[str, Any], ranks: int) -> SequenceLayout:
        """The layout of a slide; raises unless the encoder is called as the models call it."""
        others, got = [name for name, x in given.items() if x is not None and x is not False], ""
        if others or not isinstance(tokens, Tensor):
            got = ", ".join(others) or type(tokens).__name__
        elif tokens.dim() != 3 or tokens.shape[1] - self.has_class_token < self.reads_mean:
            got = str(tuple(tokens.shape))
        if got:
            raise ValueError(
                "a sharded slide encoder takes token_embeddings (batch, sequence, embed_dim) of a "
                f"slide with at least one tile; got {got}"
            )
        attention, length = attention_of(self.model.encoder.modules()), tokens.shape[1]
        # Then heads of all offsets have equally many of a shard's rows.
        multiple = math.lcm(*(rate for x in attention for rate in x.pattern.dilation_rates))
        if multiple * ranks > 0.01 * length:  # shards would differ by more than 1%
            multiple = 1
        return SequenceLayout.contiguous(length, ranks, multiple=multiple)

    @untraced
    def _pooled(self, ends: Exchange, layout: SequenceLayout, hidden: Tensor) -> Tensor:
        """The rows that a model reads, put together on all ranks: (batch, 1 or 2, embed_dim).

        `hidden` are this rank's rows, (batch, local_sequence, embed_dim). The row of position 0
        comes before the mean. The gradient of a row is the sum of all ranks' gradients of it.
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        rows, tiles = [], hidden
        if self.has_class_token:  # on the first rank; of no rows the sum is 0
            first = 1 if ends.rank == 0 else 0
            rows.append(hidden[:, :first].sum(1, keepdim=True, dtype=wide))
            tiles = hidden[:, first:]
        if self.reads_mean:
            count = layout.length - self.has_class_token
            rows.append(tiles.sum(1, keepdim=True, dtype=wide) / count)
        return sum_over_ranks(torch.cat(rows, 1), _NAME, ends).to(hidden.dtype)


@torch.no_grad()
def _numbers(tokens: Tensor) -> tuple[float, float]:
    """A sum over the rows with weights that depend on where they are, and its scale."""
    rows = tokens.sum(2, dtype=torch.promote_types(tokens.dtype, torch.float32))
    weights = torch.arange(rows.numel(), device=rows.device, dtype=torch.float64).cos()
    products = rows.flatten() * weights
    total, scale = torch.stack([products.sum(), products.norm()]).tolist()
    return total, scale


@contextmanager
def _own_randomness(module: nn.Module, rank: int, device: torch.device) -> Iterator[None]:
    """Have dropout draw other numbers on each rank, also where all were given the same seed.

    Afterwards torch's random state is as it was, but for one draw. Without active dropout nothing
    is drawn.
    """
    if not any(isinstance(x, nn.Dropout) and x.training and x.p > 0 for x in module.modules()):
        yield
        return
    seed = int(torch.randint(2**62, ())) + rank
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
