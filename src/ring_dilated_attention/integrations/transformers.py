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

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ..exchange import Group, one_group, resolve_exchange
from ..functional import dilated_attention
from ..layout import SequenceLayout
from ..options import Schedule, check_options
from ..parallel import comparing
from ..pattern import DilatedPattern, check_head_slice
from ..tiles import Backend
from .transformers_cache import DilatedCache as DilatedCache  # offered here
from .transformers_call import (
    SETTINGS,
    Call,
    Labels,
    Settings,
    agree_on_loss,
    by_name,
    check_call,
    is_cached,
    layout_in_words,
    pattern_of_heads,
    prepared,
    rounded_count,
)
from .transformers_call import shard_batch as shard_batch  # offered here
from .transformers_generate import (
    CachedCall,
    attend_with_cache,
    prepare_cache_for_generation,
    prepared_with_cache,
    restored,
)
from .transformers_support import (
    HARMLESS,
    NAME,
    Positions,
    check_model,
    erase,
    learns_next,
    saved,
    takes_images,
    with_embeddings,
    without_adapters,
    without_head,
    write,
)

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

_PREPARE_CACHE = "_prepare_cache_for_generation"  # of a model: where ``generate`` makes a cache
_HOOKS = "_ring_dilated_attention_hooks"  # of a model: what `remove_attention` takes away


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

    The config gets the pattern, so ``save_pretrained`` keeps it.

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
    ranks = resolve_exchange(group).world_size
    model = without_adapters(model, ranks)
    if not isinstance(model, PreTrainedModel):
        parts = model.children() if isinstance(model, nn.Module) else ()
        held = [type(x).__name__ for x in parts if isinstance(x, PreTrainedModel)]
        around = f" around a {held[0]}: call set_attention before it is wrapped" if held else ""
        raise TypeError(
            f"model must be a transformers.PreTrainedModel, got {type(model).__name__}{around}"
        )
    pattern = saved(model.config) if pattern is None else pattern
    if pattern is None:
        raise ValueError(
            f"pattern must be given: the config of this {type(model).__name__} holds none"
        )
    check_options(pattern=pattern, layout=layout, exchange=exchange, backend=backend)
    base: Any = without_head(model)
    check_model(model, base, ranks)
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
    _tell(model, settings)
    if takes_images(base):
        handles = [base.register_forward_pre_hook(_before_images, with_kwargs=True)]
        if ranks > 1:
            handles.append(with_embeddings(base).embeddings.register_forward_hook(_shard_images))
    else:
        handles = [
            base.register_forward_pre_hook(_before_base, with_kwargs=True),
            base.register_forward_hook(_after_base, with_kwargs=True),
        ]
        if base is not model:
            handles.append(model.register_forward_pre_hook(_before_head, with_kwargs=True))
            handles.append(model.register_forward_hook(_after_head, with_kwargs=True))
    if hasattr(model, _PREPARE_CACHE):
        setattr(model, _PREPARE_CACHE, partial(prepare_cache_for_generation, model))
    setattr(model, _HOOKS, handles)
    write(model.config, pattern)


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
    _tell(model, replace(_settings_of(model), layout=layout))


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
    pattern = _settings_of(model).pattern
    if not dense and pattern.branches != DilatedPattern.dense().branches:
        raise ValueError(
            f"this {type(model).__name__} has the pattern {pattern}; transformers' own attention "
            "is dense, another function than the model was trained with: if you want that, call "
            "remove_attention(model, dense=True)"
        )
    model.set_attn_implementation(attn_implementation)
    _remove_hooks(model)
    erase(model.config)


def _settings_of(model: nn.Module) -> Settings:
    if not hasattr(model, _HOOKS):
        raise ValueError(
            f"call set_attention first, with this very {type(model).__name__}; it was not called"
        )
    settings: Settings = getattr(model, SETTINGS)
    return settings


def _holders(model: Any) -> list[Any]:
    """The modules that have the settings; of images all: nothing goes from call to attention."""
    base = without_head(model)
    return [model, *base.modules()] if takes_images(base) else [model, base]


def _tell(model: Any, settings: Settings) -> None:
    for module in _holders(model):
        setattr(module, SETTINGS, settings)


def _remove_hooks(model: Any) -> None:
    for module in _holders(model):
        for handle in getattr(module, _HOOKS, ()):
            handle.remove()
        for name in (SETTINGS, _HOOKS, _PREPARE_CACHE):
            vars(module).pop(name, None)


# --- what transformers calls


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
    call = kwargs.pop(NAME, None)
    own: Any = getattr(module, SETTINGS, None)  # of a model of images
    if call is None and own is not None:
        call = Call(own)
    if not isinstance(call, Call):
        raise ValueError(
            f"no settings reached {type(module).__name__}: call "
            "ring_dilated_attention.integrations.transformers.set_attention(model, pattern) with "
            "the model that you call (it must hand keyword arguments down to its attention); where "
            "only a part of a model has a pattern, load the model with attn_implementation="
            f"{{'text_config': {NAME!r}}}, the name of that part's config; got {call!r}"
        )
    causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
    given = {name: x for name, x in kwargs.items() if x is not None and name not in HARMLESS}
    if given.get("output_attentions") is False:
        del given["output_attentions"]
    why = ""
    if given:
        got = ", ".join(f"{name} ({type(x).__name__})" for name, x in sorted(given.items()))
        why = f"dilated attention does not support {got}; leave it out, or pass None"
    elif attention_mask is not None:
        why = (
            "a mask must be a right padding, given to the model as a 2-D attention_mask; got "
            f"{type(attention_mask).__name__} of shape "
            f"{tuple(getattr(attention_mask, 'shape', ()))}"
        )
    elif dropout:
        why = (
            "attention dropout is refused until it is exact and reproducible across ranks; set it "
            f"to 0.0 in the model's config; got {dropout}"
        )
    elif key.shape[2] != query.shape[2] or getattr(module, "is_cross_attention", False):
        why = (
            "only self-attention is dilated, and a KV cache must be a DilatedCache; got query "
            f"{tuple(query.shape)} and key {tuple(key.shape)}"
        )
    elif causal is None:
        why = "attention must have is_causal, or be given it; got None"
    if why:
        raise ValueError(f"{why} (in {type(module).__name__})")
    _check_asked(module, bool(causal))
    if isinstance(call, CachedCall):
        return _attend_untraced(call, module, (query, key, value), causal, scaling), None
    settings, width = call.settings, value.shape[3]
    missing = max(0, query.shape[3] - width)
    out = dilated_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        (F.pad(value, (0, missing)) if missing else value).transpose(1, 2),
        pattern_of_heads(module, settings, query.shape[1], key.shape[1]),
        is_causal=bool(causal),
        scale=scaling,
        documents=call.documents,
        lengths=call.lengths,
        group=settings.group,
        layout=settings.layout,
        exchange=settings.exchange,
        backend=settings.backend,
    )
    return out[..., :width] if missing else out, None


_ASKED = threading.local()
"""``masks``: by the id of a config, which a call asked for: True is causal, False bidirectional."""


def _check_asked(module: nn.Module, is_causal: bool) -> None:
    """Raise a ValueError if the model has asked for the other mask only.

    Compiled code and recomputation in another thread have no note of masks and are not checked.
    """
    if torch.compiler.is_compiling():
        return
    asked = getattr(_ASKED, "masks", {}).get(id(getattr(module, "config", None)))
    if asked and is_causal not in asked:
        mask = "bidirectional" if is_causal else "causal"
        raise ValueError(
            f"{type(module).__name__} has is_causal={is_causal}, but its model asks for a {mask} "
            "mask, so that transformers' own eager and sdpa attention differ: use a config whose "
            "layers and masks agree (is_causal and use_bidirectional_attention decide it)"
        )


def _forget_asked() -> None:
    if not torch.compiler.is_compiling():
        _ASKED.masks = {}


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    **others: Any,
) -> None:
    """What transformers calls to make a mask; without it, it would drop masks in silence.

    Causal masks and none at all are `is_causal` of the layer, and padding and documents the model's
    hook has seen. Any other mask is refused here.

    Raises:
        ValueError: the mask is another, or of other keys than those so far.
    """
    plain = {
        causal_mask_function: allow_is_causal_skip,
        bidirectional_mask_function: allow_is_bidirectional_skip,
    }
    if not plain.get(mask_function, False):
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise ValueError(
            "only transformers' causal and bidirectional masks are supported: the pattern decides "
            "what a head sees, and models that always make the mask of a sliding window, as Gemma3 "
            "does, are not supported. For packing and padding, call set_attention(model, pattern) "
            f"first. Got the mask {name.split('.')[0]}"
        )
    if kv_offset != 0 or kv_length != q_offset + q_length:
        raise ValueError(
            "only self-attention is dilated, and a KV cache must be a DilatedCache; got queries "
            f"{q_offset} to {q_offset + q_length}, keys {kv_offset} to {kv_offset + kv_length}"
        )
    if others.get("config") is not None and not torch.compiler.is_compiling():
        masks = vars(_ASKED).setdefault("masks", {})
        masks.setdefault(id(others["config"]), set()).add(mask_function is causal_mask_function)


# --- hooks


def _untraced(function: Callable[..., Any]) -> Any:
    """torch.compile cannot trace what ranks tell each other, nor what a cache becomes."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


_attend_untraced = _untraced(attend_with_cache)
_prepared_untraced = _untraced(prepared)
_prepared_with_cache_untraced = _untraced(prepared_with_cache)
_restored_untraced = _untraced(restored)
_agree_on_loss_untraced = _untraced(agree_on_loss)


def _before_base(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a decoder or encoder: its arguments, by name."""
    settings, given = getattr(module, SETTINGS), by_name(module, args, kwargs)
    _forget_asked()
    if is_cached(given):
        return (), _prepared_with_cache_untraced(module, settings, given)
    prepare = prepared if settings.group is None else _prepared_untraced
    return (), prepare(module, settings, given)


def _after_base(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Behind it: the cache has what the call added, and hidden states are where the input was."""
    call = kwargs.get(NAME)
    return _restored_untraced(module, call, output) if isinstance(call, CachedCall) else None


def _before_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a head: checks its loss, and says of how many columns it needs hidden states."""
    settings, given = getattr(module, SETTINGS), by_name(module, args, kwargs)
    if settings.group is not None:
        _agree_on_loss_untraced(type(module).__name__, settings, given)
    elif failure := rounded_count(given):
        raise failure
    if is_cached(given):
        kept = given.get("logits_to_keep")
        # A negative number, or a tensor, may name any column: the head chooses among all of them.
        return args, {**kwargs, NAME: kept if isinstance(kept, int) and kept > 0 else 0}
    alone = settings.group is None or resolve_exchange(settings.group).world_size == 1
    if alone or given.get("labels") is None or learns_next(type(module).__name__):
        return None
    # Heads of tokens other than causal ones divide by the labels of a shard: `_after_head` does it.
    labels = Labels(given["labels"], given["num_items_in_batch"])
    return (), {**given, "labels": None, "num_items_in_batch": None, NAME: labels}


def _after_head(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Behind a head: the loss, where `_before_head` has taken the labels out."""
    labels = kwargs.get(NAME)
    if not isinstance(labels, Labels):
        return None
    output.loss = labels.loss(output.logits)
    return output


def _before_images(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model of images: refuses what would be ignored; ranks compare their images."""
    given, settings = by_name(module, args, kwargs), getattr(module, SETTINGS)
    _forget_asked()
    ends = resolve_exchange(settings.group)
    with comparing(type(module).__name__, ends) as compared:
        check_call(module, given, ends.world_size, "images")
        compared.update({k: x for k, x in given.items() if isinstance(x, Tensor | bool)})
        compared["layout"] = layout_in_words(settings.layout)


def _shard_images(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Behind the embeddings: this rank's tokens, (batch, local_sequence, hidden)."""
    settings: Any = getattr(module, SETTINGS)
    ends, tokens, layout = resolve_exchange(settings.group), output.shape[1], settings.layout
    if layout is None and tokens % ends.world_size == 0:
        layout = SequenceLayout.contiguous(tokens, ends.world_size)
    held = (layout.length, layout.world_size) if layout else None
    if layout is None or held != (tokens, ends.world_size):
        raise ValueError(  # on every rank: all have the same images and layout
            f"an image has {tokens} tokens, a class token included, on {ends.world_size} ranks: "
            f"set_layout(model, SequenceLayout.contiguous({tokens}, {ends.world_size})); got "
            f"{settings.layout}"
        )
    shard: Tensor = layout.shard(output, ends.rank, 1)
    return shard.contiguous()


# --- registration


def _restore_when_made() -> None:
    """Let every model of transformers have the pattern of its config as soon as it is made."""
    post_init = PreTrainedModel.post_init

    @wraps(post_init)
    def made(model: PreTrainedModel) -> None:
        post_init(model)
        found, implementation = saved(model.config), model.config._attn_implementation
        if found is None:
            return
        if implementation != NAME:
            raise ValueError(
                f"the config says that this {type(model).__name__} has the dilated pattern "
                f"{found}, but attn_implementation is {implementation!r}, which computes "
                f"another function: pass attn_implementation={NAME!r}, or, where this model is "
                f"part of another, {{'text_config': {NAME!r}}} with the name of its config in that "
                f"of the whole; if you want the other attention, a config without the pattern: del "
                f"config.{NAME}"
            )
        set_attention(model)

    PreTrainedModel.post_init = made


_restore_when_made()
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
