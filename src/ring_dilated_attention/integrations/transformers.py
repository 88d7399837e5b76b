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

Layers with a sliding window or chunks of their own keep them, or take the pattern: ``layers``.

Honoured: grouped queries, ``scaling``, ``is_causal`` (so encoders too), attention sinks and soft
caps (``s_aux``, ``softcap``), right padding as a 2-D
``attention_mask``, documents as ``position_ids`` that restart at 0 (with an ``attention_mask`` too)
or as ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (borders in the whole sequence), gradient
checkpointing. Everything else that attention is given is refused.

``save_pretrained`` keeps the pattern in ``config.json``, and ``from_pretrained`` restores it where
this module is imported (it wraps ``PreTrainedModel.post_init``); elsewhere transformers refuses the
model's ``attn_implementation``.

``generate`` works as it is, with a `DilatedCache`. On several ranks each of them calls it with the
whole prompt, which is sharded inside, and gets the same tokens; to sample, seed all ranks alike:

    >>> model.eval().generate(torch.arange(1, 50)[None], max_new_tokens=9).shape
    torch.Size([1, 58])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ..exchange import resolve_exchange, untraced
from ..layout import SequenceLayout
from ..options import AttentionOptions, OptionFields, check_options, read_options
from ..pattern import DilatedPattern, Window, check_choice
from .transformers_call import (
    SETTINGS,
    Call,
    Mask,
    Settings,
    borders_of,
    by_name,
    check_head,
    check_loss,
    is_cached,
    prepared,
    shard_batch,
)
from .transformers_generate import (
    DilatedCache,
    attended,
    prepare_cache_for_generation,
    prepared_with_cache,
    restored,
)
from .transformers_support import (
    HARMLESS,
    LAYERS,
    NAME,
    PACKING,
    Layers,
    base_of,
    check_model,
    check_pattern,
    erase,
    saved,
    without_adapters,
    write,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack  # torch needs it; typing has it from Python 3.11 on

__all__ = [
    "NAME",
    "DilatedCache",
    "attention_forward",
    "attention_mask",
    "batch_layout",
    "remove_attention",
    "set_attention",
    "set_layout",
    "shard_batch",
]

_PREPARE_CACHE = "_prepare_cache_for_generation"  # of a model: by which ``generate`` makes a cache
_HOOKS = "_ring_dilated_attention_hooks"  # of a model: what `remove_attention` takes away


def set_attention(
    model: PreTrainedModel,
    pattern: DilatedPattern | None = None,
    options: AttentionOptions | None = None,
    *,
    layers: Layers | None = None,
    **fields: Unpack[OptionFields],
) -> None:
    """Give a model this package's attention, with these settings; again, to change them.

    From then on its forward takes this rank's shard of ``input_ids`` (or ``inputs_embeds``),
    ``attention_mask``, ``position_ids`` and labels; `shard_batch` makes one. Without position ids
    it gets those of the layout. Logits are those of the shard. On several ranks a loss needs
    ``shift_labels``, and ``num_items_in_batch`` as `labels_per_rank` returns it: then the average
    of the ranks' losses and gradients, which DDP and FSDP take, is that of the whole batch.

    A call with ``use_cache=True`` or a KV cache, as ``generate`` makes them, takes whole sequences
    on every rank, whatever the layout; see `DilatedCache`. On several ranks a prompt's logits are
    those of its last token alone.

    The config gets the pattern, so ``save_pretrained`` keeps it.

    Args:
        model: the model that will be called, with or without a head, or a PeftModel of one; changed
            in place, its ``attn_implementation`` and config too. Of a vision-language model, its
            language model. On several ranks a causal decoder whose layers are all attention
            and MLPs, or experts.
        pattern: which keys each head sees; `DilatedPattern.dense` is what transformers computes.
            None, the default: the pattern that the model's config holds.
        layers: which layers take it: ``"full"`` those of full attention, while layers with a
            sliding window or chunks (Gemma's, gpt-oss's, Llama 4's) keep them; ``"all"`` these too.
            None, the default: as the config holds it, else ``"full"``.
        options: an `AttentionOptions`; or give its fields by name: ``group``, the ranks that share
            each sequence, ``layout``, of which each rank holds a position at least (see
            `set_layout`), ``exchange``, ``backend`` and others. ``is_causal`` and ``scale`` are the
            model's, and refused here. ``head_slice``: the KV heads of each layer that this rank
            computes, under tensor parallelism that is not by DTensors; None: those that the weights
            say, which are DTensors under transformers' ``tp_plan`` and torch's
            ``parallelize_module``, else all.
        fields: see `options`.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: the model is not supported, no pattern is given and the config has none, or no
            layer would take it; the message says why.
    """
    options = read_options("set_attention", options, fields)
    ranks = resolve_exchange(options.group).world_size
    model = without_adapters(model, ranks)
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers.PreTrainedModel, before it is wrapped, got {name}"
        )
    held = saved(model.config) or (None, "full")
    pattern, layers = held[0] if pattern is None else pattern, layers or held[1]
    if pattern is None:
        raise ValueError(f"pattern must be given: the config of this {name} holds none")
    check_options(pattern=pattern)
    check_choice("layers", layers, LAYERS)
    if options.is_causal or options.scale is not None:
        raise ValueError("is_causal and scale are the model's own, set_attention takes neither")
    base = base_of(model)
    check_model(model, base, ranks)
    check_pattern(base, pattern, layers)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
        if model.config._attn_implementation != NAME:
            raise ValueError(f"this transformers cannot set the attention of a {name}; upgrade it")
    _remove_hooks(model)
    _tell(model, Settings(pattern, options, layers))
    if hasattr(model, _PREPARE_CACHE):
        setattr(model, _PREPARE_CACHE, partial(prepare_cache_for_generation, model))
    handles = [base.register_forward_pre_hook(_before_base, with_kwargs=True)]
    handles += [base.register_forward_hook(_after_base, with_kwargs=True)]
    if ranks > 1 and base is not model:
        handles += [model.register_forward_pre_hook(_before_head, with_kwargs=True)]
    setattr(model, _HOOKS, handles)
    write(model.config, pattern, layers)


def set_layout(model: PreTrainedModel, layout: SequenceLayout | None) -> None:
    """Set which positions each rank holds from now on, for sequences of another length.

    Args:
        model: what `set_attention` was called with.
        layout: which positions each rank holds; None means contiguous equal shards.

    Raises:
        TypeError: `layout` is neither a `SequenceLayout` nor None.
        ValueError: `set_attention` was not called with this model.
    """
    model = without_adapters(model)
    settings = _settings_of(model)
    _tell(model, replace(settings, options=replace(settings.options, layout=layout)))


def batch_layout(model: PreTrainedModel, batch: Mapping[str, Any]) -> SequenceLayout:
    """A layout that balances the work of a batch, for `set_layout` and `shard_batch`.

    It is `SequenceLayout.balanced` where documents are packed, as ``cu_seq_lens_q`` or restarts of
    ``position_ids`` say, and not too short for every rank to have some of them; else zigzag.

    Args:
        model: what `set_attention` was called with, with a pattern and a group.
        batch: whole sequences, as for `shard_batch`.

    Raises:
        ValueError: `set_attention` was not called with this model, or `batch` has neither
            ``input_ids`` nor ``inputs_embeds``.
    """
    settings = _settings_of(without_adapters(model))
    borders, ranks = borders_of(batch), settings.ranks
    if len(borders) > 2 and ranks > 1:
        layout = SequenceLayout.balanced(borders, ranks, settings.pattern, is_causal=True)
        if all(layout.ranges):
            return layout
    return SequenceLayout.zigzag(borders[-1], ranks)


def remove_attention(
    model: PreTrainedModel, attn_implementation: str = "sdpa", *, dense: bool = False
) -> None:
    """Restore transformers' own attention: dense, or each layer's window or chunks.

    Args:
        model: what `set_attention` was called with.
        attn_implementation: one of transformers'.
        dense: must be True where the pattern is not dense, or that of all layers: the model then
            computes another function than before, and its config and what is saved no longer have
            the pattern.

    Raises:
        ValueError: `set_attention` was not called with this model, `dense` is missing, or
            transformers refuses.
    """
    model = without_adapters(model)
    settings, own = _settings_of(model), DilatedPattern.dense().branches
    if not dense and (settings.pattern.branches != own or settings.layers != "full"):
        raise ValueError(
            f"this {type(model).__name__} has the pattern {settings.pattern} in {settings.layers} "
            "layers; for transformers' dense attention, which is another function than it was "
            "trained with, call remove_attention(model, dense=True)"
        )
    model.set_attn_implementation(attn_implementation)
    _remove_hooks(model)
    erase(model.config)


def _settings_of(model: nn.Module) -> Settings:
    if not hasattr(model, _HOOKS):
        raise ValueError(f"call set_attention first, with this very {type(model).__name__}")
    settings: Settings = getattr(model, SETTINGS)
    return settings


def _tell(model: Any, settings: Settings) -> None:
    for module in (model, base_of(model)):
        setattr(module, SETTINGS, settings)


def _remove_hooks(model: Any) -> None:
    for module in (model, base_of(model)):
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
    attention_mask: Tensor | Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, as transformers calls it.

    Args:
        module: the attention module; its ``is_causal`` counts where the argument is None.
        query: this rank's shard, (batch, heads, local_sequence, head_dim); tokens behind what a KV
            cache has are whole on every rank.
        key: (batch, kv_heads, local_sequence, head_dim).
        value: like `key`; without a KV cache rows may be narrower (DeepSeek's latent attention).
        attention_mask: of `attention_mask`, with the layer's window or chunks; the model's hook has
            turned padding into lengths.
        dropout: must be 0.
        scaling: factor on the scores; None: head_dim ** -0.5.
        is_causal: whether a query sees only keys at positions <= its own.
        sliding_window: None, unless the mask has a window; which counts.
        s_aux: attention sinks, (heads,).
        softcap: bound of the scores.
        kwargs: the `Call`; what means nothing to attention; or None.

    Returns:
        (out, None): out is (batch, local_sequence, heads, head_dim of value).

    Raises:
        ValueError: `set_attention` was not called, or an argument is not supported.
    """
    call = kwargs.pop(NAME, None)
    if not isinstance(call, Call):
        raise ValueError(
            f"no settings reached {type(module).__name__}, a name alone has no pattern: call "
            "set_attention(model, pattern); where a part alone has a pattern, load the model with "
            f"attn_implementation={{'text_config': {NAME!r}}}, the name of the part's config"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    harmless = HARMLESS if call.documents is None else HARMLESS.union(PACKING)  # it has them
    given = {name: x for name, x in kwargs.items() if x is not None and name not in harmless}
    if given.get("output_attentions") is False:
        del given["output_attentions"]
    mask, why = Mask(bool(causal)) if attention_mask is None else attention_mask, ""
    if given:
        got = ", ".join(f"{name} ({type(x).__name__})" for name, x in given.items())
        why = f"dilated attention does not support {got}; leave it out, or pass None"
    elif not isinstance(mask, Mask) or mask.is_causal != causal:
        why = (
            "a mask must be a right padding, given to the model as a 2-D attention_mask, and of "
            f"is_causal={causal}; got "
            f"{mask if isinstance(mask, Mask) else f'a {type(mask).__name__}'}"
        )
    elif sliding_window is not None and not isinstance(mask.length, Window):
        why = f"the layer has sliding_window={sliding_window} and a mask without a window, {mask}"
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
    if why or not isinstance(mask, Mask):
        raise ValueError(f"{why} (in {type(module).__name__})")
    attend = attended if call.cache is None else _attended_untraced
    scores = {"scale": scaling, "sink": s_aux, "softcap": softcap}
    return attend(call, module, (query, key, value), mask, scores), None


def attention_mask(
    *,
    config: Any = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    **others: Any,
) -> Mask:
    """The kind of a mask, where transformers makes one; without it, it would drop masks in silence.

    Causal masks and none at all are `is_causal` of the layer, and padding and documents the model's
    hook has seen. `local_size` is that of a sliding window, which counts the query where it is
    causal, or of chunks. Any other mask is refused here.

    Raises:
        ValueError: the mask is another.
    """
    # transformers withdraws its leave to skip a mask that it changes; it gives one of them alone.
    if local_size is not None and allow_is_bidirectional_skip:
        return Mask(False, Window(local_size, local_size))
    if local_size is not None and allow_is_bidirectional_skip is None and allow_is_causal_skip:
        is_window = getattr(config, "sliding_window", None) == local_size
        return Mask(True, Window(local_size - 1) if is_window else local_size)
    plain = {
        causal_mask_function: allow_is_causal_skip,
        bidirectional_mask_function: allow_is_bidirectional_skip is not False,
    }
    if not plain.get(mask_function, False):
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise ValueError(
            "only transformers' causal and bidirectional masks, sliding windows and chunks are "
            "supported, and the pattern decides what a head sees. For packing and padding, call "
            f"set_attention(model, pattern) first. Got the mask {name.split('.')[0]}"
        )
    return Mask(mask_function is causal_mask_function)


# --- hooks


# torch.compile cannot trace what ranks tell each other, nor what a cache becomes.
_attended_untraced = untraced(attended)
_prepared_untraced = untraced(prepared)
_check_loss_untraced = untraced(check_loss)


def _before_base(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before a decoder or encoder: its arguments, by name."""
    settings, given = getattr(module, SETTINGS), by_name(module, args, kwargs)
    if is_cached(given):
        prepare = prepared_with_cache
    else:
        prepare = prepared if settings.options.group is None else _prepared_untraced
    given = prepare(module, settings, given)
    if "logits_to_keep" in inspect.signature(module.forward).parameters:
        given["logits_to_keep"] = None  # the head takes them; Gemma 4 would drop queries before
    return (), given


def _after_base(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Behind it: the cache has what the call added, and hidden states are where the input was."""
    call = kwargs[NAME]
    return None if call.cache is None else restored(module, call, output)


def _before_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model with a head, on several ranks: they agree on a refusal in the model below."""
    settings = getattr(module, SETTINGS)
    why = check_head(by_name(module, args, kwargs), settings.ranks)
    if why or settings.refusals:
        settings.refusals[:] = [why] if why else []


# --- registration


_post_init, _own_loss = PreTrainedModel.post_init, PreTrainedModel.loss_function


@wraps(_post_init)
def _made(model: PreTrainedModel) -> None:
    """Give a model of transformers the pattern of its config as soon as it is made."""
    _post_init(model)
    found, implementation = saved(model.config), model.config._attn_implementation
    if found is None:
        return
    if implementation != NAME:
        raise ValueError(
            f"this {type(model).__name__} has the dilated pattern {found[0]} by its config, but "
            f"attn_implementation is {implementation!r}, another function: pass "
            f"attn_implementation={NAME!r}, or, for a part of another model, {{'text_config': "
            f"{NAME!r}}}; if you want the other attention, first: del config.{NAME}"
        )
    set_attention(model)


def _loss_function(model: PreTrainedModel) -> Any:
    """The loss function of a model, whose arguments are checked where ranks share its tokens.

    Also of a model around such a part, as of vision and language: the part gets no labels.
    """
    function, settings = _own_loss.fget(model), getattr(model, SETTINGS, None)
    if settings is None and not torch.compiler.is_compiling():
        parts = (vars(module).get(SETTINGS) for module in model.modules())
        settings = next((x for x in parts if x is not None), None)
    return function if settings is None else partial(_checked_loss, function, model, settings)


def _checked_loss(
    function: Any, model: PreTrainedModel, settings: Settings, *args: Any, **kwargs: Any
) -> Any:
    check = check_loss if settings.options.group is None else _check_loss_untraced
    check(model, settings, kwargs["logits"] if "logits" in kwargs else args[0], kwargs)
    return function(*args, **kwargs)


PreTrainedModel.post_init = _made
PreTrainedModel.loss_function = property(_loss_function, _own_loss.fset)
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, attention_mask)
