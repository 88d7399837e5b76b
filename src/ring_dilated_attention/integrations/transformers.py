"""Hugging Face transformers: ``attn_implementation="ring_dilated_attention"``.

Importing this module registers the attention function with transformers; `set_attention` tells a
model its pattern, its group and its layout. They belong to the model: the registry is one for all
of them. Every rank calls the model with its own shard of the sequence:

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ...     attn_implementation="ring_dilated_attention",
    ... )
    >>> model = LlamaForCausalLM(config)
    >>> set_attention(model, DilatedPattern([16, None], [1, 4]))
    >>> model(torch.arange(50)[None]).logits.shape
    torch.Size([1, 50, 99])

Honoured: grouped queries, ``scaling``, ``is_causal`` (so encoders too), right padding as a 2-D
``attention_mask``, documents as ``position_ids`` that restart at 0 (with an ``attention_mask`` too)
or as ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (borders in the whole sequence), gradient
checkpointing. Everything else that attention is given is refused.

``save_pretrained`` keeps the pattern in ``config.json``, and ``from_pretrained`` restores it where
this module is imported; elsewhere transformers refuses the model's ``attn_implementation``. To make
that so, importing this module wraps ``PreTrainedModel.post_init``.

``generate`` works as it is, with a `DilatedCache`. On several ranks each of them calls it with the
whole prompt, which is sharded inside, and gets the same tokens; to sample, seed all ranks alike:

    >>> model.eval().generate(torch.arange(1, 50)[None], max_new_tokens=9).shape
    torch.Size([1, 58])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..exchange import Group, one_group, resolve_exchange
from ..functional import dilated_attention
from ..layout import SequenceLayout
from ..options import Schedule, check_options
from ..pattern import DilatedPattern, check_head_slice
from ..tiles import Backend
from .transformers_cache import DilatedCache as DilatedCache  # offered here
from .transformers_call import (
    ARGUMENT,
    SETTINGS,
    Call,
    Settings,
    by_name,
    check_asked,
    check_loss_arguments,
    forget_asked,
    is_cached,
    pattern_of_heads,
    prepared,
    rounded_count,
)
from .transformers_call import attention_mask as attention_mask  # offered here
from .transformers_generate import (
    CachedCall,
    attend_with_cache,
    prepare_cache_for_generation,
    prepared_with_cache,
    restored,
)
from .transformers_images import (
    check_images,
    check_one_tower,
    set_on_images,
    takes_images,
    tell_modules,
)
from .transformers_models import (
    Positions,
    check_model,
    erase,
    is_dense,
    kind_of,
    layout_kind,
    learns_next,
    restore_when_made,
    saved_kind,
    saved_pattern,
    without_adapters,
    without_head,
    write,
)
from .transformers_rows import shard_batch as shard_batch  # offered here

__all__ = [
    "NAME",
    "DilatedCache",
    "attention_forward",
    "attention_mask",
    "remove_attention",
    "set_attention",
    "set_layout",
    "shard_batch",
]

NAME = ARGUMENT
"""What ``attn_implementation`` has to be."""

_PREPARE_CACHE = "_prepare_cache_for_generation"  # of a model: where ``generate`` makes a cache
_HOOKS = "_ring_dilated_attention_hooks"  # of a model: what `remove_attention` takes away

_HARMLESS = frozenset(
    {
        "position_ids",  # the model's rotations have them
        "use_cache",
        "cache_position",
        "return_dict",
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
        "labels",
        "shift_labels",
        "seq_idx",  # of layers other than attention
    }
)
"""Keyword arguments of a model that reach its attention and mean nothing there."""


def set_attention(
    model: PreTrainedModel,
    pattern: DilatedPattern | None = None,
    *,
    group: Group = None,
    mesh: Group = None,
    layout: SequenceLayout | None = None,
    exchange: Schedule = "auto",
    backend: Backend = "auto",
    head_slice: Sequence[int] | None = None,
) -> None:
    """Give a model this package's attention, with these settings; again, to change them.

    From then on its forward takes this rank's shard of ``input_ids`` (or ``inputs_embeds``),
    ``attention_mask``, ``position_ids`` and labels; `shard_batch` makes one. Without position ids
    it gets those of the layout. Logits are those of the shard. On several ranks a loss needs
    ``shift_labels``, and ``num_items_in_batch`` as `labels_per_rank` returns it: then the average
    of the ranks' losses and gradients, which DDP and FSDP take, is that of the whole batch.

    A call with ``use_cache=True`` or a KV cache, as ``generate`` makes them, takes whole
    sequences on every rank, and returns what one process returns; see `DilatedCache`. The layout
    counts for prompts of its length; others are sharded zigzag.

    The config gets the pattern and the kind of the layout, so ``save_pretrained`` keeps them.

    Args:
        model: the model that will be called, with or without a head, or a PeftModel of one; changed
            in place, its ``attn_implementation`` and config too. Of a vision-language model, its
            language model. On several ranks a model whose layers are all full attention and MLPs,
            or experts.
        pattern: which keys each head sees; `DilatedPattern.dense` is what transformers computes.
            None, the default: the pattern that the model's config holds.
        group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None for
            one process.
        mesh: another name for `group`, as DTensor APIs call it; pass only one of the two.
        layout: which positions each rank holds, at least one; see `set_layout`. None: contiguous
            equal shards.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"auto"``, the default, gathers where they take no more memory than query and out.
        backend: kernels that compute the tiles: ``"auto"``, the default, takes the fastest that
            supports the tensors; ``"sdpa"``, ``"fa4"``, ``"cpu_flash"``, ``"cudnn"``, ``"flash"``,
            ``"efficient"``, ``"triton"`` and ``"eager"`` take that one or raise.
        head_slice: (start, stop, total): the KV heads of each layer that this rank computes, under
            tensor parallelism that is not by DTensors. None: those that the weights say, which are
            DTensors under transformers' ``tp_plan`` and torch's ``parallelize_module``; else all.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: the model is not supported, or no pattern is given and the config has none; the
            message says why.
    """
    group = one_group(group, mesh)
    model = without_adapters(model, resolve_exchange(group).world_size)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {kind_of(model)}")
    restored = pattern is None
    if restored:
        pattern = saved_pattern(model.config)
    if pattern is None:
        raise ValueError(
            f"pattern must be given: the config of this {type(model).__name__} holds none"
        )
    check_options(pattern=pattern, layout=layout, exchange=exchange, backend=backend)
    base: Any = without_head(model)
    of_images, ranks = takes_images(base), resolve_exchange(group).world_size
    if not of_images:
        check_one_tower(model)
    (check_images if of_images else check_model)(model, base, ranks)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    if base.config._attn_implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' "
            f"AttentionInterface; its attn_implementation stays {base.config._attn_implementation}"
        )
    _remove_hooks(model)
    settings = Settings(
        *(pattern, group, layout, exchange, backend),
        head_slice=None if head_slice is None else check_head_slice(head_slice),
        positions=Positions.of(base),
    )
    handles = set_on_images(base, settings) if of_images else _set_on_text(base, settings)
    if base is not model:
        setattr(model, SETTINGS, settings)
        if not of_images:
            handles.append(model.register_forward_pre_hook(before_head, with_kwargs=True))
            handles.append(model.register_forward_hook(after_head, with_kwargs=True))
    if hasattr(model, _PREPARE_CACHE):
        setattr(model, _PREPARE_CACHE, partial(prepare_cache_for_generation, model))
    setattr(model, _HOOKS, handles)
    kind = saved_kind(model.config) if restored and layout is None else layout_kind(layout)
    write(model.config, pattern, kind)


def _set_on_text(base: nn.Module, settings: Settings) -> list[RemovableHandle]:
    """Hook a decoder or an encoder, without its head."""
    setattr(base, SETTINGS, settings)
    return [
        base.register_forward_pre_hook(before_base, with_kwargs=True),
        base.register_forward_hook(after_base, with_kwargs=True),
    ]


def set_layout(model: PreTrainedModel, layout: SequenceLayout | None) -> None:
    """Tell a model which positions each rank holds from now on: for sequences of another length.

    Args:
        model: what `set_attention` was called with.
        layout: which positions each rank holds; None means contiguous equal shards.

    Raises:
        TypeError: `layout` is neither a `SequenceLayout` nor None.
        ValueError: `set_attention` was not called with this model.
    """
    if layout is not None and not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout or None, got {layout!r}")
    model = without_adapters(model)
    _check_is_set(model)
    settings = replace(getattr(model, SETTINGS), layout=layout)
    base = without_head(model)
    for module in (model, base):
        setattr(module, SETTINGS, settings)
    if takes_images(base):
        tell_modules(base, settings)
    write(model.config, settings.pattern, layout_kind(layout))


def remove_attention(
    model: PreTrainedModel, attn_implementation: str = "sdpa", *, dense: bool = False
) -> None:
    """Give a model transformers' own attention back, which is dense.

    Args:
        model: what `set_attention` was called with.
        attn_implementation: one of transformers'.
        dense: must be True where the pattern is not dense: the model then computes another function
            than before, and its config and what is saved no longer have the pattern.

    Raises:
        ValueError: `set_attention` was not called with this model, `dense` is missing, or
            transformers refuses.
    """
    model = without_adapters(model)
    _check_is_set(model)
    pattern = getattr(model, SETTINGS).pattern
    if not dense and not is_dense(pattern):
        raise ValueError(
            f"this {type(model).__name__} has the pattern {pattern}; transformers' own attention "
            "is dense, another function than the model was trained with: if you want that, call "
            "remove_attention(model, dense=True)"
        )
    model.set_attn_implementation(attn_implementation)
    _remove_hooks(model)
    erase(model.config)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in a layer.

    Args:
        module: the attention module; its ``is_causal`` counts where the argument is None.
        query: this rank's shard, (batch, heads, local_sequence, head_dim); tokens behind what a KV
            cache has are whole on every rank.
        key: (batch, kv_heads, local_sequence, head_dim).
        value: like `key`; in calls without a KV cache rows may be narrower (DeepSeek's latent
            attention): they are padded with zeros, which takes as long as if they were not.
        attention_mask: must be None: the model's hook has turned it into lengths.
        dropout: must be 0.
        scaling: factor on the scores; None: head_dim ** -0.5.
        is_causal: whether a query sees only keys at positions <= its own.
        kwargs: the `Call`; what means nothing to attention; or None.

    Returns:
        (out, None): out is (batch, local_sequence, heads, head_dim of value).

    Raises:
        ValueError: `set_attention` was not called, or an argument is not supported.
    """
    call = kwargs.pop(ARGUMENT, None)
    own: Any = getattr(module, SETTINGS, None)  # of a model of images
    if call is None and own is not None:
        call = Call(own, None, None)
    if not isinstance(call, Call):
        raise ValueError(
            f"no settings reached {type(module).__name__}: call "
            "ring_dilated_attention.integrations.transformers.set_attention(model, pattern) with "
            "the model that you call (it must hand keyword arguments down to its attention); where "
            "only a part of a model has a pattern, load the model with attn_implementation="
            f"{{'text_config': {NAME!r}}}, the name of that part's config; got {call!r}"
        )
    given = {name: x for name, x in kwargs.items() if x is not None and name not in _HARMLESS}
    if given.get("output_attentions") is False:
        del given["output_attentions"]
    if given:
        got = ", ".join(f"{name} ({type(x).__name__})" for name, x in sorted(given.items()))
        raise ValueError(f"dilated attention does not support {got}; leave it out, or pass None")
    if attention_mask is not None:
        raise ValueError(
            "a mask must be a right padding, given to the model as a 2-D attention_mask; "
            f"{type(module).__name__} got {type(attention_mask).__name__} of shape "
            f"{tuple(getattr(attention_mask, 'shape', ()))}"
        )
    if dropout:
        raise ValueError(
            "attention dropout is refused until it is exact and reproducible across ranks; set it "
            f"to 0.0 in the model's config; got {dropout}"
        )
    if key.shape[2] != query.shape[2] or getattr(module, "is_cross_attention", False):
        raise ValueError(
            "only self-attention is dilated, and a KV cache must be a DilatedCache; got query "
            f"{tuple(query.shape)} and key {tuple(key.shape)} in {type(module).__name__}"
        )
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    if causal is None:
        raise ValueError(f"{type(module).__name__} must have is_causal, or pass it; got None")
    check_asked(module, causal)
    if isinstance(call, CachedCall):
        return _attend_untraced(call, module, (query, key, value), causal, scaling), None
    settings, width = call.settings, value.shape[3]
    missing = max(0, query.shape[3] - width)
    out = dilated_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        (F.pad(value, (0, missing)) if missing else value).transpose(1, 2),
        pattern_of_heads(module, settings, query.shape[1], key.shape[1]),
        is_causal=causal,
        scale=scaling,
        documents=call.documents,
        lengths=call.lengths,
        group=settings.group,
        layout=settings.layout,
        exchange=settings.exchange,
        backend=settings.backend,
    )
    return out[..., :width] if missing else out, None


def _check_is_set(model: nn.Module) -> None:
    if not hasattr(model, _HOOKS):
        raise ValueError(
            f"call set_attention first, with this very {type(model).__name__}; it was not called"
        )


# torch.compile cannot trace what a cache becomes.
_attend_untraced: Any = torch.compiler.disable(attend_with_cache)  # type: ignore[no-untyped-call]


def _remove_hooks(model: PreTrainedModel) -> None:
    for module in (model, without_head(model)):
        for handle in getattr(module, _HOOKS, ()):
            handle.remove()
        if SETTINGS in module.__dict__ and takes_images(module):
            tell_modules(module, None)
        for name in (SETTINGS, _HOOKS, _PREPARE_CACHE):
            if name in module.__dict__:
                delattr(module, name)


restore_when_made(set_attention)
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)


def before_base(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a decoder or encoder: its arguments, by name."""
    settings, given = getattr(module, SETTINGS), by_name(module, args, kwargs)
    forget_asked()
    if is_cached(given):
        return (), _prepared_with_cache_untraced(module, settings, given)
    prepare = prepared if settings.group is None else _prepared_untraced
    return (), prepare(module, settings, given)


def after_base(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Behind it: the cache has what the call added, and hidden states are where the input was."""
    if isinstance(kwargs.get(ARGUMENT), CachedCall):
        return _restored_untraced(module, args, kwargs, output)
    return None


def before_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a head: checks its loss, and says of how many columns it needs hidden states."""
    settings, given = getattr(module, SETTINGS), by_name(module, args, kwargs)
    if settings.group is not None:
        _check_loss_untraced(type(module).__name__, settings, given)
    elif failure := rounded_count(given):
        raise failure
    if not is_cached(given):
        return ((), without_labels(given)) if own_loss(module, settings, given) else None
    kept = given.get("logits_to_keep")
    # A negative number, or a tensor, may name any column: the head chooses among all of them.
    return args, {**kwargs, ARGUMENT: kept if isinstance(kept, int) and kept > 0 else 0}


# torch.compile cannot trace what ranks tell each other, nor what a cache becomes.
_prepared_untraced: Any = torch.compiler.disable(prepared)  # type: ignore[no-untyped-call]
_prepared_with_cache_untraced: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    prepared_with_cache
)
_restored_untraced: Any = torch.compiler.disable(restored)  # type: ignore[no-untyped-call]
_check_loss_untraced: Any = torch.compiler.disable(  # type: ignore[no-untyped-call]
    check_loss_arguments
)


_IGNORED = -100  # transformers' label of what is not learnt


@dataclass(frozen=True, eq=False)
class Labels:
    """What the loss of a call needs, which goes with the call to the hook behind the head.

    Attributes:
        labels: of this rank's shard, (batch, local_sequence), -100 where nothing is learnt.
        divisor: ``num_items_in_batch``: what the sum is divided by.
    """

    labels: Tensor
    divisor: Tensor | float


def own_loss(module: nn.Module, settings: Settings, given: dict[str, Any]) -> bool:
    """Whether the loss of a call is computed here and not by the head.

    Args:
        module: the model with its head.
        settings: of `set_attention`.
        given: arguments of its forward, by name.
    """
    if settings.group is None or given.get("labels") is None or learns_next(type(module).__name__):
        return False
    return resolve_exchange(settings.group).world_size > 1


def without_labels(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a head, so that it computes logits alone and the hook behind it the loss.

    Args:
        given: its arguments by name, with ``labels`` and ``num_items_in_batch``.
    """
    labels = Labels(given["labels"], given["num_items_in_batch"])
    return {**given, "labels": None, "num_items_in_batch": None, ARGUMENT: labels}


def after_head(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """The hook behind a head: the loss, where `without_labels` has taken the labels out."""
    given = kwargs.get(ARGUMENT)
    if not isinstance(given, Labels):
        return None
    logits = output.logits.flatten(0, 1)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    labels = given.labels.reshape(-1).to(logits.device)
    total = nn.functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
    divisor = given.divisor
    output.loss = total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)
    return output
