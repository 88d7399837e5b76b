"""What one call of a transformers model says: positions, documents, padding, and what is refused.

The ranks agree once for each call of the model, not per layer.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from ..documents import in_words
from ..exchange import Exchange, Group, agree, resolve_exchange
from ..layout import SequenceLayout
from ..nn.heads import Heads, slice_of_projections
from ..options import Schedule
from ..pattern import DilatedPattern, HeadSlice
from ..tiles import Backend
from ..torch_op import lengths_of_mask
from .transformers_models import (
    ANY_POSITIONS,
    Positions,
    check_peft,
    check_same_pattern,
    learns_next,
)
from .transformers_rows import (
    Rows,
    check_ids,
    check_padding,
    check_positions,
    documents_of,
    given_borders,
    has_all_in_order,
    ids_of_text,
)

ARGUMENT = "ring_dilated_attention"
"""The keyword argument by which a `Call` goes from the model to each of its attention modules; and
from a head to its model, of how many columns at the end of a cached call it needs hidden states."""

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers' models call a KV cache: from version 5.24 on, and before."""
SETTINGS = "_ring_dilated_attention"
"""The attribute of a model that holds its `Settings`."""

_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_REFUSED = {
    "head_mask": "heads are not masked",
    "encoder_hidden_states": "there is no cross-attention",
    "encoder_attention_mask": "there is no cross-attention",
}
_ADVICE = (
    "num_items_in_batch must come from labels_per_rank, the labels of all ranks divided by the "
    "number of ranks, or transformers' Trainer with average_tokens_across_devices=True, its default"
)
_ROUNDED = (torch.float16, torch.bfloat16)
_FLAGS = {"output_attentions": "attention weights are never made"}


@dataclass(frozen=True)
class Settings:
    """What `set_attention` was called with, see there; and which positions the model numbers."""

    pattern: DilatedPattern
    group: Group
    layout: SequenceLayout | None
    exchange: Schedule
    backend: Backend
    head_slice: HeadSlice | None = None
    positions: Positions = ANY_POSITIONS
    counted: set[str] = field(default_factory=set, compare=False)
    """Has ``num_items_in_batch`` once a call had one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # a copy of the model belongs to the same ranks


@dataclass(frozen=True)
class Call:
    """What one call of the model hands to each of its attention modules.

    Attributes:
        settings: of the model.
        documents: cumulative lengths; None: one document.
        lengths: valid positions of each row of the batch; None: all.
    """

    settings: Settings
    documents: list[int] | None
    lengths: list[int] | None


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``module.forward``, all by name."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def cache_name(module: nn.Module) -> str:
    """What a model's forward calls its KV cache, one of `CACHE_NAMES`."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[-1])


def cache_of(given: dict[str, Any]) -> Any:
    """The KV cache among the arguments of a call; None where there is none."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


def is_cached(given: dict[str, Any]) -> bool:
    """Whether a call asks for a KV cache: by its arguments, whatever the model's config says."""
    return bool(given.get("use_cache")) or cache_of(given) is not None


def prepared(module: nn.Module, settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the decoder (or encoder), made from those of its caller: without a cache.

    Args:
        module: the model without its head.
        settings: of `set_attention`.
        given: arguments of its forward, by name.

    Returns:
        `given` with global ``position_ids`` (None where the model makes them itself), a 2-D
        ``attention_mask`` (with one, transformers looks for no documents in a shard),
        ``use_cache=False`` and a `Call`, without ``cu_seq_lens_q`` and its companions.

    Raises:
        TypeError, ValueError: an argument is not supported, or the ranks differ; on every rank.
    """
    ends = resolve_exchange(settings.group)
    name, failure, rows, borders = type(module).__name__, None, None, None
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    try:
        refuse(module, given, ends.world_size)
        check_peft(module, ends.world_size)
        rows = _rows(given, ends, settings.layout)
        text_ids = ids_of_text(module, position_ids, ends)
        check_ids(text_ids, rows)
        padding = check_padding(mask, rows)
        borders = given_borders(given, rows)
        check_positions(name, settings.positions, given, rows, padding)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    layout, device = settings.layout, device_of(given)
    shared = rows and {
        "use_cache": False,
        "batch": rows.batch,
        "layout": f"{layout!r} ({layout.digest[:8]})"
        if layout
        else f"None (a shard of {len(rows.positions)} positions)",
        "attention_mask": _kind(mask),
        "position_ids": _kind(position_ids),
        "cu_seq_lens_q": _kind(borders),
    }
    agree(name, ends, None if failure else shared, failure, device)
    assert rows is not None
    lengths = _lengths(name, padding, rows, layout, ends)
    first = settings.positions.first
    if text_ids is None:
        documents = borders
        # A model that has all tokens in order knows best: it may skip padding, wherever that is.
        if position_ids is None and not has_all_in_order(ends, layout):
            position_ids = rows.positions[None] + first
    else:
        documents = documents_of(name, text_ids, rows, lengths, ends, first)
        if borders is not None and documents not in (None, borders):
            raise ValueError(  # alike on every rank
                "cu_seq_lens_q and the restarts of position_ids must be the same borders; got "
                f"{in_words(borders)} and {in_words(documents or ())}"
            )
        documents = borders or documents
    if borders is not None and lengths is not None:
        raise ValueError(
            "cu_seq_lens_q is for batches without padding; got an attention_mask of "
            f"{lengths[0]} valid positions of {rows.total}"
        )
    if mask is None:
        mask = torch.ones(rows.batch, len(rows.positions), dtype=torch.bool, device=device)
    return {
        **{key: value for key, value in given.items() if key not in _PACKING},
        "position_ids": position_ids,
        "attention_mask": mask,
        "use_cache": False,
        ARGUMENT: Call(settings, documents, lengths),
    }


_NO_RIGHT_PADDING = (
    "attention_mask must be a right padding, 1 at the first positions of each row and 0 behind "
    "them (padding on the left is for calls with a KV cache, as generate makes): {}"
)


def _lengths(
    name: str,
    padding: Tensor | None,
    rows: Rows,
    layout: SequenceLayout | None,
    ends: Exchange,
) -> list[int] | None:
    """Valid positions of each row, the same on every rank; None: all."""
    if padding is None:
        return None
    with ends.calls.enter(name, "attention_mask") as scope:
        found = lengths_of_mask(padding, ends, layout, scope, _NO_RIGHT_PADDING)
    return None if set(found) == {rows.total} else found


def check_loss_arguments(name: str, settings: Settings, given: dict[str, Any]) -> None:
    """Raise on every rank if a loss, or a choice of logits, would be that of a shard alone.

    Args:
        name: of the model's class, for messages.
        settings: of `set_attention`.
        given: arguments of the forward of a model with a head, by name.

    Raises:
        ValueError: there are several ranks, and labels without ``shift_labels`` or
            ``num_items_in_batch``, or with one that differs between ranks, or the reverse, or
            ``logits_to_keep``. With a KV cache every rank has all of them.
    """
    ends = resolve_exchange(settings.group)
    if ends.world_size == 1:
        return
    failure, cached, shifted = None, is_cached(given), learns_next(name)
    count = given.get("num_items_in_batch")
    if given.get("labels") is not None and not cached:
        for key, why in (
            ("shift_labels", "a shard's last label is on another rank; shard_batch gives it"),
            (
                "num_items_in_batch",
                "what labels_per_rank returns, the labels of all ranks over the number of ranks",
            ),
        ):
            if given.get(key) is None and (shifted or key != "shift_labels"):
                failure = ValueError(
                    f"on {ends.world_size} ranks labels need {key}: {why}. Got {key}=None"
                )
        if not shifted and given.get("shift_labels") is not None:
            failure = ValueError(
                f"the labels of {name} are those of the tokens themselves: make the batch with "
                "shard_batch(..., shift_labels=False); got shift_labels"
            )
        if not shifted and given.get("return_dict") is False:
            failure = ValueError(
                f"on {ends.world_size} ranks the loss of {name} needs return_dict=True; got False"
            )
    if given.get("labels") is None and given.get("shift_labels") is not None and not cached:
        failure = ValueError(
            f"on {ends.world_size} ranks shift_labels need labels; got labels=None. The Trainer "
            "takes them out for label_smoothing_factor and compute_loss_func, which shift the "
            "labels of a shard: compute such a loss from the logits and shift_labels, which are "
            "shifted, without passing them to the model"
        )
    kept = given.get("logits_to_keep")
    if not cached and (isinstance(kept, Tensor) or kept):
        failure = ValueError(
            f"on {ends.world_size} ranks logits_to_keep must be 0, since it counts the rows of a "
            f"shard unless there is a KV cache: generate, which passes it, needs use_cache=True on "
            f"several ranks; got {kept!r}"
        )
    failure = failure or rounded_count(given)
    if isinstance(count, Tensor):
        # To read one on a GPU is to wait for it: the first one, which shows how it is counted.
        reads = count.numel() == 1 and (count.device.type == "cpu" or not settings.counted)
        settings.counted.add("num_items_in_batch")
        count = count.item() if reads else "a tensor"
    shared = {"use_cache": cached, "num_items_in_batch": count}
    agree(name, ends, None if failure else shared, failure, device_of(given), _ADVICE)


def rounded_count(given: dict[str, Any]) -> ValueError | None:
    """An error if ``num_items_in_batch`` has come in half precision; else None."""
    count = given.get("num_items_in_batch")
    if not isinstance(count, Tensor) or count.dtype not in _ROUNDED:
        return None
    return ValueError(
        f"num_items_in_batch must be an int, a float, or a tensor of ints, float32 or float64; "
        f"got {count.dtype}, which rounds it. Under fully_shard with a MixedPrecisionPolicy, which "
        "casts floating arguments, pass num_items_in_batch.item(), or set cast_forward_inputs=False"
    )


def device_of(given: dict[str, Any]) -> torch.device:
    """Where the input is."""
    inputs = (given.get(key) for key in ("input_ids", "inputs_embeds"))
    return next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))


def _kind(value: Any) -> str:
    return "None" if value is None else "given"


def refuse(module: nn.Module, given: dict[str, Any], world_size: int) -> None:
    """Raise a ValueError for arguments that mean nothing here, with a cache or without."""
    config: Any = module.config
    implementation = config._attn_implementation
    if implementation != ARGUMENT:
        raise ValueError(
            f"set_attention was called, but the model's attn_implementation now is "
            f"{implementation!r}: call remove_attention(model) first, or set it back to "
            f"{ARGUMENT!r}"
        )
    check_same_pattern(config, getattr(module, SETTINGS).pattern)
    for key, why in _REFUSED.items():
        if given.get(key) is not None:
            raise ValueError(f"{key} must be None: {why}; got {type(given[key]).__name__}")
    for key, why in _FLAGS.items():
        if given.get(key):
            raise ValueError(f"{key} must be False: {why}; got {given[key]!r}")
    if given.get("output_attentions") is None and getattr(config, "output_attentions", False):
        raise ValueError(f"config.output_attentions must be False: {_FLAGS['output_attentions']}")
    if world_size > 1 and module.training:
        embeddings = module.get_input_embeddings()  # type: ignore[operator]
        alpha = getattr(embeddings, "neftune_noise_alpha", None)
        if alpha:
            raise ValueError(
                f"on {world_size} ranks neftune_noise_alpha must be None: the size of the noise "
                f"goes by the length of a shard; got {alpha!r}"
            )
    flag = given.get("output_router_logits")
    flag = getattr(config, "output_router_logits", False) if flag is None else flag
    if world_size > 1 and flag:
        raise ValueError(
            f"on {world_size} ranks output_router_logits must be False: the balance of the experts "
            f"would be that of a shard; got {flag!r}"
        )


def inputs_of(given: dict[str, Any]) -> Tensor:
    """Ids (batch, columns), or embeddings (batch, columns, hidden); a ValueError without any."""
    inputs = given.get("input_ids")
    inputs = given.get("inputs_embeds") if inputs is None else inputs
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        raise ValueError(
            "the model needs input_ids (batch, local_sequence), or inputs_embeds "
            f"(batch, local_sequence, hidden); got {type(inputs).__name__}"
        )
    return inputs


def _rows(given: dict[str, Any], ends: Exchange, layout: SequenceLayout | None) -> Rows:
    inputs = inputs_of(given)
    batch, length = inputs.shape[:2]
    if not length:
        raise ValueError(
            "transformers' models take no empty shards: every rank must hold a position; "
            f"got input of shape {tuple(inputs.shape)}"
        )
    if layout is None:
        first = ends.rank * length
        positions = torch.arange(first, first + length, device=inputs.device)
        return Rows(batch, positions, length * ends.world_size)
    held = f"got input of shape {tuple(inputs.shape)} (set_layout sets another layout)"
    layout.check_shard(ends.rank, ends.world_size, length, held)
    return Rows(batch, layout.positions(ends.rank, device=inputs.device), layout.length)


_QUERY = ("q_proj", "q_b_proj", "query", "q_lin", "query_key_value")
_KEY = ("k_proj", "kv_b_proj", "key", "k_lin", "query_key_value")
"""What models call the projections whose rows follow the order of the heads."""


def pattern_of_heads(
    module: nn.Module, settings: Settings, query_heads: int, kv_heads: int
) -> DilatedPattern:
    """The model's pattern for the heads that an attention module has on this rank.

    transformers' ``tp_plan`` and torch's ``parallelize_module`` leave each rank a few heads of a
    layer, of which the module's config says how many there are, and its weights, which.

    Args:
        module: the attention module; its config and the weights of its projections count.
        settings: of `set_attention`.
        query_heads: of this call.
        kv_heads: of this call.

    Raises:
        ValueError: there are other heads than the config says, and neither `head_slice` nor the
            weights say which they are; or query heads are split and KV heads are not.
    """
    pattern = settings.pattern
    if settings.head_slice is not None:
        return pattern.of_heads(settings.head_slice, kv_heads)
    own = Heads(query_heads, kv_heads)
    layer = _heads_of_layer(module) or own
    if own == layer or (pattern.heads_are_alike and own.is_fraction_of(layer)):
        return pattern
    weights = _weight(module, _QUERY), _weight(module, _KEY)
    # Some models have their number of KV heads elsewhere in the config.
    if own.query == layer.query and not any(hasattr(x, "placements") for x in weights):
        return pattern
    found = slice_of_projections(layer, own, weights, type(module).__name__)
    return pattern.of_heads(found, kv_heads)


def _heads_of_layer(module: nn.Module) -> Heads | None:
    """What the config says; None where it says nothing."""
    config: Any = getattr(module, "config", None)
    query: Any = getattr(config, "num_attention_heads", None)
    return Heads(query, getattr(config, "num_key_value_heads", None) or query) if query else None


def _weight(module: nn.Module, names: tuple[str, ...]) -> Any:
    weights = (getattr(getattr(module, name, None), "weight", None) for name in names)
    return next((weight for weight in weights if weight is not None), None)


class _Asked(threading.local):
    """By the id of a config, which masks were asked for: True is causal, False bidirectional."""

    def __init__(self) -> None:
        self.masks: dict[int, set[bool]] = {}


_ASKED = _Asked()


def forget_asked() -> None:
    """Begin a call of a model: masks of earlier calls do not count."""
    if not torch.compiler.is_compiling():
        _ASKED.masks.clear()


def check_asked(module: nn.Module, is_causal: bool) -> None:
    """Raise a ValueError if the model has asked for the other mask only.

    Compiled code and recomputation in another thread have no note of masks and are not checked.

    Args:
        module: the attention module.
        is_causal: what it computes.
    """
    if torch.compiler.is_compiling():
        return
    asked = _ASKED.masks.get(id(getattr(module, "config", None)))
    if asked and is_causal not in asked:
        mask = "bidirectional" if is_causal else "causal"
        raise ValueError(
            f"{type(module).__name__} has is_causal={is_causal}, but its model asks for a {mask} "
            "mask, so that transformers' own eager and sdpa attention differ: use a config whose "
            "layers and masks agree (is_causal and use_bidirectional_attention decide it)"
        )


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
    is_causal = mask_function is causal_mask_function
    if is_causal:
        plain = allow_is_causal_skip
    else:
        plain = mask_function is bidirectional_mask_function and allow_is_bidirectional_skip
    if not plain:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise ValueError(
            "only transformers' causal and bidirectional masks are supported: the pattern decides "
            "what a head sees. A sliding window must be off: config.sliding_window=None where the "
            "model allows that, as Mistral does; models that always make its mask, as Gemma3 does, "
            "are not supported. For packing and padding, call set_attention(model, pattern) first. "
            f"Got the mask {name.split('.')[0]}"
        )
    if kv_offset != 0 or kv_length != q_offset + q_length:
        raise ValueError(
            "only self-attention is dilated, and a KV cache must be a DilatedCache; got queries "
            f"{q_offset} to {q_offset + q_length}, keys {kv_offset} to {kv_offset + kv_length}"
        )
    if others.get("config") is not None and not torch.compiler.is_compiling():
        _ASKED.masks.setdefault(id(others["config"]), set()).add(is_causal)
