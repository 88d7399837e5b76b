"""torchscale's DilatedAttention, computed by this package: for Prov-GigaPath, LongViT and others.

The constructor, the names of the parameters, the arguments and result of forward and, by default,
the function computed are those of torchscale's components dilated_attention.py and
multihead_attention.py. torchscale itself is not needed, nor is flash-attn.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..exchange import Group, one_group, resolve_exchange, settle
from ..layout import SequenceLayout
from ..nn import MultiheadDilatedAttention
from ..nn.modules import hooks_of, is_plain, normalize
from ..options import check_options
from ..pattern import check_positive_float, in_brief
from ..tiles import Backend

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

__all__ = ["TorchscaleDilatedAttention", "replace_dilated_attention", "set_layout"]

_SUBMODULES = ("k_proj", "v_proj", "q_proj", "out_proj", "inner_attn_ln")
"""Of torchscale's `DilatedAttention`, in its order."""

_CLASS_TOKENS = ("cls_token", "class_token", "cls_embedding", "class_embedding", "dist_token")
"""What models call a parameter that they put before their sequence."""

_UNSUPPORTED = {
    "cross_attention": "self_attention must be True, encoder_decoder_attention False",
    "args.seq_parallel": "pass group=, the ranks that share each sequence",
    "args.xpos_rel_pos": "xPos rotates by positions that a shard does not know",
    "args.multiway": "its split position counts rows that other ranks may hold",
    "incremental_state": "use replicated_query_attention to decode",
    "attn_mask": "use is_causal, and the pattern for what a head sees (torchscale's decoder passes "
    "a mask where args.flash_attention is False: set it to True)",
    "rel_pos": "dilated attention takes no bias",
    "is_first_step": "use replicated_query_attention to decode",
}
"""Arguments of torchscale that must be None or False, and why, or what to do instead."""


_DEFAULTS = {"head_offsets": "blocked", "zero_keys": True, "branch_gradients": "detached"}


class _OfGroup(nn.Module):
    """A module that a group of ranks runs together."""

    group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self.group)] = self.group  # which cannot be copied
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new


class TorchscaleDilatedAttention(_OfGroup, MultiheadDilatedAttention):
    """torchscale's `DilatedAttention`, on one device or on a sequence sharded over many.

    By default it computes what weights trained with torchscale expect: blocked head offsets, short
    segments filled up with zero keys, and no gradient through the weights that mix the branches.
    `options` choose LongNet's definition instead, one by one. Weights start as those of
    `MultiheadDilatedAttention`.

    It differs from torchscale in this: it honours `key_padding_mask`, which torchscale drops where
    `args.flash_attention` is set; a position whose lse happens to be exactly 0 is not taken for one
    that no branch covers; results of a segment whose length is no multiple of the rate are where
    they belong, which torchscale shifts in all but the first; and sequences are sharded over
    `group`, in any layout, with exact gradients. What it does not support it refuses.

    Args:
        args: torchscale's configuration. Read are `segment_length` and `dilated_ratio` (lists of
            ints, or their text), `layernorm_eps` (with `subln`), `flash_attention` (False: plain
            torch operations compute, see `backend`), `seq_parallel` (True needs a `group`),
            `xpos_rel_pos` and `multiway` (both must be False).
        embed_dim: width of query, key, value and output.
        num_heads: divides `embed_dim`.
        dropout: of the attention weights; above 0 it is refused in training mode.
        self_attention: must be True.
        encoder_decoder_attention: must be False.
        subln: whether to normalise the concatenated heads (`inner_attn_ln`).
        group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None for
            one process.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        layout: which positions each rank holds; None means contiguous equal shards. `set_layout`
            changes it.
        backend: kernels that compute the tiles, one of those of `AttentionOptions`. None:
            ``"auto"``, or ``"eager"`` where `args.flash_attention` is False.
        options: `head_offsets`, `zero_keys`, `branch_gradients` and `exchange` of
            `MultiheadDilatedAttention`. By default the first three are torchscale's: ``"blocked"``,
            True and ``"detached"``; the LongNet paper's are ``"interleaved"``, False and
            ``"exact"``, which takes a tenth less time from about 10,000 tokens on.

    Raises:
        AttributeError: `args` lacks what is read of it.
        TypeError: a value has the wrong type.
        ValueError: a value is not supported; the message says which.
    """

    ignores_padding_mask = False  # set where the mask is known to be empty

    def __init__(
        self,
        args: Any,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        subln: bool = False,
        *,
        group: Group = None,
        mesh: Group = None,
        layout: SequenceLayout | None = None,
        backend: Backend | None = None,
        **options: Any,
    ) -> None:
        group = one_group(group, mesh)
        of_args = ["xpos_rel_pos", "multiway", *(["seq_parallel"] if group is None else [])]
        _refuse_unsupported(
            cross_attention=encoder_decoder_attention or not self_attention,
            **{f"args.{name}": getattr(args, name, None) for name in of_args},
        )
        if backend is None:
            backend = "auto" if getattr(args, "flash_attention", True) else "eager"
        if not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout must lie in [0, 1]; got {dropout!r}")
        lengths, rates = (  # lists of ints, or their text
            ast.literal_eval(x) if isinstance(x, str) else x
            for x in (args.segment_length, args.dilated_ratio)
        )
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths=lengths,
            dilation_rates=rates,
            backend=backend,
            **{**_DEFAULTS, **options},
        )
        self.args, self.dropout = args, float(dropout)
        self.group, self.layout = group, layout
        eps = check_positive_float("args.layernorm_eps", args.layernorm_eps) if subln else 0.0
        self.inner_attn_ln = nn.LayerNorm(embed_dim, eps=eps) if subln else None
        # In torchscale's order, by which the state dict of an optimizer goes.
        made = self._modules
        self._modules = {name: made[name] for name in _SUBMODULES if name in made}

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: None = None,
        rel_pos: None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Project, attend, project back.

        Args:
            query: this rank's shard, shape (batch, local_sequence, embed_dim).
            key: the shape of `query`.
            value: the shape of `query`.
            incremental_state: must be None.
            key_padding_mask: boolean, (batch, local_sequence), True where a position is padding,
                which must be at the end of the sequence; see `dilated_attention`.
            attn_mask: must be None.
            rel_pos: must be None.
            is_first_step: must be False.
            is_causal: whether a query sees only keys at its own position and before.

        Returns:
            (output, None): output has the shape of `query`.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is not supported, a shape does not fit, dropout is above 0 in
                training mode, and see `dilated_attention`.
        """
        _refuse_unsupported(
            incremental_state=incremental_state,
            attn_mask=attn_mask,
            rel_pos=rel_pos,
            is_first_step=is_first_step,
        )
        if self.dropout and self.training:
            raise ValueError(
                "attention dropout is refused until it is exact and reproducible across ranks; set "
                f"dropout to 0.0, or call eval(); got dropout {self.dropout} in training mode"
            )
        return super().forward(
            query,
            key,
            value,
            is_causal=is_causal,
            key_padding_mask=None if self.ignores_padding_mask else key_padding_mask,
            group=self.group,
            layout=self.layout,
        )

    def combine(self, out_bnhd: Tensor) -> Tensor:
        """As of `MultiheadDilatedAttention`, with torchscale's norm."""
        out_bne = out_bnhd.flatten(2)
        if (norm := self.inner_attn_ln) is not None:
            out_bne = normalize(norm, out_bne) if is_plain(norm, nn.LayerNorm) else norm(out_bne)
        combined: Tensor = self.out_proj(out_bne)
        return combined


def replace_dilated_attention(
    model: nn.Module,
    *,
    group: Group = None,
    mesh: Group = None,
    layout: SequenceLayout | None = None,
    **options: Any,
) -> int:
    """Replace every `DilatedAttention` of torchscale in a model by a `TorchscaleDilatedAttention`.

    The projections and the norm themselves go over, with their parameters, dtypes and devices, and
    so does the training mode: optimizers, state dicts and references to parameters stay valid. A
    module that stands in several places is replaced by one. Modules are told by the name of their
    class and their `args`. Modules of this package get the group and the layout, and keep
    their other options. On several ranks, stochastic depth (`DropPath`) drops the same sequences on
    all: each rank must run every `DropPath` of the model.

    Args:
        model: changed in place, or not at all where this raises.
        group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None for
            one process.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        layout: which positions each rank holds; None means contiguous equal shards. `set_layout`
            changes it.
        options: `head_offsets`, `zero_keys`, `branch_gradients`, `exchange` and `backend` of
            `TorchscaleDilatedAttention`.

    Returns:
        How many modules now are this package's.

    Raises:
        TypeError: `model` is not a module, or an option is unknown.
        ValueError: the model holds no such module, or is one; one is not supported, by its class,
            its hooks or its `args`; options are given, and modules of this package are there
            already; or, on several ranks, the model has other modules that mix rows (attention that
            is not dilated, experts, `embed_positions`), or a class token and no layout (see
            `gigapath.shard_slide_encoder`).
    """
    group = one_group(group, mesh)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}")
    ranks = resolve_exchange(group).world_size
    _refuse_class_token(model, group, layout)
    _refuse_mixed_rows(model, ranks)
    ours: list[_OfGroup] = []
    replacements: dict[nn.Module, _OfGroup] = {}
    for path, module in model.named_modules():
        if isinstance(module, _OfGroup):
            ours.append(module)
        elif ranks > 1 and type(module).__name__ == "DropPath":
            replacements[module] = SharedDropPath(module, group)
        elif hasattr(module, "args") and "DilatedAttention" in _names_of(module):
            replacements[module] = _replacement(path, module, group, layout, options)
    kept, new = map(attention_of, (ours, replacements.values()))
    if not kept and not new:
        raise ValueError(
            "replace_dilated_attention found no DilatedAttention of torchscale in this "
            f"{type(model).__name__}; pass the model that holds torchscale's LongNet encoder"
        )
    if kept and options:
        raise ValueError(
            f"{len(kept)} modules are this package's already and keep their options; got "
            f"{', '.join(options)}: pass them in the first call"
        )
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                setattr(parent, name, replacements[child])
    for module in ours:
        module.group = group
    for module in kept:
        module.layout = layout
    return len(kept) + len(new)


def set_layout(model: nn.Module, layout: SequenceLayout | None) -> int:
    """Set which positions each rank holds from now on, in every module that was replaced.

    Call it for each sequence whose length differs, unless shards are contiguous and equal.

    Args:
        model: its modules of this package are changed.
        layout: which positions each rank holds; None means contiguous equal shards.

    Returns:
        The number of modules updated.

    Raises:
        TypeError: `layout` is neither a `SequenceLayout` nor None.
        ValueError: no module was replaced; or `layout` is None, and the model has a class token:
            see `replace_dilated_attention`.
    """
    check_options(layout=layout)
    told = attention_of(model.modules())
    if not told:
        raise ValueError(
            f"set_layout found no TorchscaleDilatedAttention in this {type(model).__name__}; "
            "call replace_dilated_attention first"
        )
    _refuse_class_token(model, told[0].group, layout)
    for module in told:
        module.layout = layout
    return len(told)


def attention_of(modules: Iterable[nn.Module]) -> list[TorchscaleDilatedAttention]:
    return [module for module in modules if isinstance(module, TorchscaleDilatedAttention)]


def _replacement(
    path: str, old: Any, group: Group, layout: SequenceLayout | None, options: dict[str, Any]
) -> TorchscaleDilatedAttention:
    lost = hooks_of(old)
    if not path:
        lost.append("no module around it that could hold another")
    if type(old).__name__ != "DilatedAttention":
        lost.append("a class of its own, which may compute something else")
    if "forward" in vars(old):
        lost.append("another forward, as checkpoint_wrapper of fairscale gives it")
    if lost:
        raise ValueError(
            f"{path or 'the model itself'}, a {type(old).__name__}, has {' and '.join(lost)}: "
            "replace the attention inside of a model before anything is put on it, or by hand"
        )
    with torch.device("meta"):
        new = TorchscaleDilatedAttention(
            old.args,
            old.embed_dim,
            old.num_heads,
            old.dropout,
            old.self_attention,
            old.encoder_decoder_attention,
            old.inner_attn_ln is not None,
            group=group,
            layout=layout,
            **options,
        )
    for name in _SUBMODULES:
        setattr(new, name, getattr(old, name))
    new.training = old.training
    return new


def _refuse_unsupported(**arguments: Any) -> None:
    """Raise a `ValueError` unless these arguments, of `_UNSUPPORTED`, are None or False."""
    for name, given in arguments.items():
        if given is not None and given is not False:
            raise ValueError(
                f"{name} must be None or False: {_UNSUPPORTED[name]}; got {in_brief(given)}"
            )


def _refuse_class_token(model: nn.Module, group: Group, layout: SequenceLayout | None) -> None:
    """Raise a `ValueError` if every rank would put a class token before its shard."""
    ranks = resolve_exchange(group).world_size
    names = (name for name, _ in model.named_parameters())
    found = [name for name in names if name.rpartition(".")[2] in _CLASS_TOKENS]
    if ranks > 1 and found and layout is None:  # a layout makes the longer shard an error
        raise ValueError(
            f"the model has a class token ({found[0]}), which each of the {ranks} ranks would put "
            "before its shard: use integrations.gigapath.shard_slide_encoder, which shards behind "
            "it, or pass a layout in which one rank holds its position; got layout=None"
        )


def _names_of(module: nn.Module) -> list[str]:
    return [kind.__name__ for kind in type(module).__mro__]


def _refuse_mixed_rows(model: nn.Module, ranks: int) -> None:
    """Raise a `ValueError` for a model that mixes rows in other modules than dilated attention."""
    for name, module in model.named_modules() if ranks > 1 else ():
        kinds = _names_of(module)
        if "MultiheadAttention" in kinds and "DilatedAttention" not in kinds:
            found = "attention that is not dilated"
        elif getattr(module, "is_moe_layer", False):
            found = "a layer of experts (moe_freq)"
        elif name.rpartition(".")[2] == "embed_positions":
            found = "an embedding of positions (None where token_embeddings have theirs)"
        else:
            continue
        raise ValueError(
            f"{name or 'the model itself'}, a {type(module).__name__}, is {found}, which on each "
            f"of {ranks} ranks would see the rows of that rank alone: pass the part of the model "
            "whose other modules treat every row alone, an encoder, say, or use one rank"
        )


class SharedDropPath(_OfGroup):
    """Stochastic depth that drops the same sequences on every rank, and scales the others up."""

    def __init__(self, drop_path: nn.Module, group: Group) -> None:
        super().__init__()
        self.drop_prob = float(getattr(drop_path, "drop_prob", None) or 0)
        self.training = drop_path.training
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Drop sequences of (batch, local_sequence, embed_dim), as the first rank draws them."""
        if not self.training or not self.drop_prob:
            return x
        ends = resolve_exchange(self.group)
        kept = torch.rand(len(x)) >= self.drop_prob  # on every rank: all stay in step
        with ends.calls.enter("DropPath", "forward") as scope:
            settle(scope, ends, x.device)
            kept = torch.tensor(ends.share(kept.tolist())[0])
        scale = kept.to(x.device, x.dtype) / ((1 - self.drop_prob) or 1.0)  # all dropped: by 0
        return x * scale.view(-1, *[1] * (x.dim() - 1))
