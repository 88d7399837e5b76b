"""Calls of a transformers model with a KV cache, as its ``generate`` makes them.

Every rank gives the whole input. Of a prompt each row is turned until its valid positions come
first, and each rank takes its shard; the hidden states that are asked for come back in the order of
the input. Tokens behind the prompt are computed by every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from ..decode import cached_attention
from ..exchange import Exchange, all_gather, resolve_exchange, settle
from ..functional import autocast_inputs, dilated_attention
from ..layout import SequenceLayout
from ..parallel import comparing
from .transformers_cache import DilatedCache
from .transformers_call import (
    Call,
    Rows,
    Settings,
    cache_name,
    cache_of,
    check_ids,
    check_padding,
    inputs_of,
    layout_in_words,
    pattern_of_heads,
)
from .transformers_support import CACHE_NAMES, NAME, check_arguments, rotates_in_dimensions


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedCall(Call):
    """A call of a model with a cache."""

    columns: int  # tokens of each row, padding included
    kept: int  # columns at the end whose hidden states are returned; 0: all columns
    after: list[int]  # valid positions of each row after the call
    position_ids: Tensor  # of the columns that this rank computes, (1 or batch, columns)
    firsts: Tensor | None = None  # of a prompt, (batch, 1): the first valid column of each row
    source: Tensor | None = None  # (batch, local_sequence): the columns that this rank computes


def attended(
    call: Call,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of the shards of a sequence, or of new tokens to a cache, which then has them too.

    `tensors` are query, key and value as transformers has them, (batch, heads, m, head_dim); the
    result is (batch, m, heads, head_dim of value).
    """
    settings, cache, width = call.settings, call.cache, tensors[2].shape[3]
    layer = None if cache is None else cache.taken(module, *tensors[1:])
    if cache is not None and not is_causal:
        raise ValueError(
            f"a KV cache is for causal attention; {type(module).__name__} has is_causal=False"
        )
    query, key, value = (x.transpose(1, 2) for x in tensors)
    pattern = pattern_of_heads(module, settings, query.shape[2], key.shape[2])
    if cache is None:
        # Narrower values, as of DeepSeek's latent attention, take as long as if they were not.
        value = F.pad(value, (0, query.shape[3] - width)) if query.shape[3] > width else value
    else:
        query, key, value = autocast_inputs(query, key, value)
        kv = cache.of_layer(layer, key, pattern)
        if cache.lengths:
            found: torch.Tensor = cached_attention(
                query, key, value, kv, scale=scale, backend=settings.backend
            )
            return found
    out = dilated_attention(
        *(query, key, value, pattern),
        is_causal=is_causal,
        scale=scale,
        documents=call.documents,
        lengths=call.lengths,
        group=settings.group,
        layout=call.layout,
        exchange=settings.exchange,
        backend=settings.backend,
    )
    if cache is not None:
        kv.prefill(key, value, layout=call.layout, lengths=call.lengths)
    return out if value.shape[3] == width else out[..., :width]


def restored(module: nn.Module, call: CachedCall, output: Any) -> Any:
    """Behind a decoder: `output`, its hidden states in the order of the input, on every rank."""
    call.cache.finish(call.after, call.columns)
    if call.source is None or call.firsts is None:
        return None
    hidden, layout = output.last_hidden_state, call.layout
    every = (torch.arange(call.columns, device=hidden.device) - call.firsts) % call.columns
    wanted = every[:, -call.kept :]  # all of them, where that is 0
    if layout is None:
        if getattr(output, "hidden_states", None) is not None:
            output.hidden_states = tuple(_rows_at(x, every) for x in output.hidden_states)
        output.last_hidden_state = _rows_at(hidden, wanted)
        return output
    ends = resolve_exchange(call.settings.group)
    places = torch.full((layout.length,), -1, device=hidden.device)
    own = layout.positions(ends.rank, device=hidden.device)
    places[own] = torch.arange(len(own), device=hidden.device)
    places = places[wanted]  # -1: another rank has the row
    rows = _rows_at(hidden, places.clamp(min=0)).where((places >= 0)[..., None], 0)
    with ends.calls.enter(type(module).__name__, "hidden states") as scope:
        settle(scope, ends, hidden.device)
        output.last_hidden_state = sum(all_gather(ends, rows))
    return output


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Of each row of a batch, (batch, m, ...), the places that an index (batch, k) names."""
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
    return x.gather(1, index)


_DYNAMIC = (None, "dynamic", "dynamic_full")  # "full": older versions take positions back from it
_PLAIN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position")


def prepared_with_cache(
    module: nn.Module, settings: Settings, given: dict[str, Any]
) -> dict[str, Any]:
    """The arguments for a decoder that is called with a cache, made from those of its caller.

    `given` are the same on every rank. They get this rank's shard of a prompt, or the whole of
    later tokens, with their ``position_ids``, the cache, and a `CachedCall`. What is not supported,
    gradients, and ranks that differ are errors on every rank.
    """
    ends, head = resolve_exchange(settings.group), given.pop(NAME, None)
    with comparing(type(module).__name__, ends) as compared:
        if head is not None and head.failure is not None:
            raise head.failure
        call = _call(module, settings, given, ends, 0 if head is None else head.columns)
        compared.update(
            {
                "input": inputs_of(given),  # a seed may have made the tokens different
                "use_cache": True,
                "KV cache": call.cache.described,
                "lengths": call.after,  # which tell the padding
                "logits_to_keep": call.kept,
                "layout": layout_in_words(call.layout),
            }
        )
    call.cache.start(call.after)
    dropped = ("cache_position", *CACHE_NAMES)
    kept = {key: value for key, value in given.items() if key not in dropped}
    for key in ("input_ids", "inputs_embeds"):
        if call.source is not None and kept.get(key) is not None:
            kept[key] = _rows_at(kept[key], call.source)
    return {
        **kept,
        "attention_mask": None,
        "position_ids": call.position_ids,
        cache_name(module): call.cache,
        "use_cache": True,
        NAME: call,
    }


def prepare_cache_for_generation(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Put a `DilatedCache` with room for all that ``generate`` may need into `model_kwargs`.

    A ValueError where another kind of cache is asked for, or a prompt is padded on the right.
    """
    if generation_config.use_cache is False:
        return
    kind = generation_config.cache_implementation
    if kind not in _DYNAMIC:
        raise ValueError(
            "a model with set_attention generates with a DilatedCache: cache_implementation must "
            f"be None; got {kind!r}"
        )
    mask = model_kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask[:, -1].all()):
        raise ValueError(
            "generate goes on behind the last column of every row, so prompts are padded on the "
            "left: set tokenizer.padding_side = 'left'. Got an attention_mask with 0 in its last "
            "column"
        )
    cache = cache_of(model_kwargs)
    if cache is None:
        cache = DilatedCache(model, max_length=max_cache_length)
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if is_assisted or generation_config.is_assistant or kind == "dynamic_full":
            cache.activate_past_recording()
        model_kwargs[cache_name(model)] = cache
    else:
        _check_cache(model, cache)
        cache.reserve(max_cache_length)
        cache._is_user_defined = True  # transformers asks for that


def _call(
    module: Any, settings: Settings, given: dict[str, Any], ends: Exchange, kept: int
) -> CachedCall:
    """Check a call with a cache, and lay its columns out: a prompt, or new ones behind it."""
    cache = cache_of(given)
    if cache is not None:
        _check_cache(module, cache)
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a KV cache has no gradient: call the model under torch.no_grad(), as generate does, "
            "or leave use_cache and the cache out"
        )
    check_arguments(module, given, settings.pattern, ends.world_size, "cached")
    inputs = inputs_of(given)
    batch, count, device = *inputs.shape[:2], inputs.device
    cache = DilatedCache(module) if cache is None else cache
    before, was = cache.get_seq_length(), cache.settings
    others = [key for key, x in given.items() if isinstance(x, Tensor) and key not in _PLAIN]
    why = ""
    if settings.positions.first:
        why = f"{type(module).__name__} must number positions from 0: pass use_cache=False"
    elif others:
        why = (
            "a model takes input_ids or inputs_embeds, attention_mask and position_ids; got "
            f"{', '.join(sorted(others))}"
        )
    elif not count:
        why = f"there must be a token at least; got input of shape {tuple(inputs.shape)}"
    elif (was.pattern, was.group) != (settings.pattern, settings.group):
        why = (
            "it must be of the model's own pattern and group; set_attention was called since it "
            f"was made, or with another model. It has {was.pattern}, the model {settings.pattern}"
        )
    elif before and len(cache.lengths) != batch:
        why = (
            f"the input must be of its batch: it has {len(cache.lengths)} rows of a batch, the "
            f"input {batch}: reset() the cache for another batch"
        )
    if why:
        raise ValueError(f"with a KV cache {why}")
    cache.check_layers()
    columns = torch.arange(before + count, device=device)
    padding = check_padding(given.get("attention_mask"), Rows(batch, columns, 0))
    firsts = [before - n for n in cache.lengths] or [0] * batch
    if not before and padding is not None:
        firsts = padding.int().cumprod(1).sum(1).tolist()
    starts = torch.tensor(firsts, device=device)[:, None]
    places = columns - starts  # in the text of each row
    if padding is not None and not torch.equal(padding, places < 0):
        row, column = (padding != (places < 0)).nonzero()[0].tolist()
        raise ValueError(
            "with a KV cache attention_mask must be 0 for padding on the left of the prompt, and 1 "
            f"for all behind it; in row {row}, column {column} must be "
            f"{int(places[row, column] >= 0)} (without a mask generate takes pad_token_id for "
            "padding: pass attention_mask where that token is in the text; prefill_chunk_size must "
            "exceed the padding)"
        )
    places = places[:, before:]
    _check_position_ids(given, places)
    after = [before + count - first for first in firsts]
    if (most := settings.positions.most) is not None and max(after) > most:
        raise ValueError(f"the model has embeddings of {most} positions; got {max(after)}")
    call = partial(
        CachedCall, settings, cache=cache, columns=count, kept=min(kept, count), after=after
    )
    if before:
        return call(position_ids=places[:1] if len(set(firsts)) == 1 else places)
    layout, width, positions = None, count, columns
    if ends.world_size > 1:
        width = max(count, 2 * ends.world_size)  # transformers' models take no empty shards
        layout = settings.layout
        if (
            layout is None
            or (layout.length, layout.world_size) != (width, ends.world_size)
            or not all(layout.local_length(rank) for rank in range(ends.world_size))
        ):
            layout = SequenceLayout.zigzag(width, ends.world_size)  # which balances causal work
        positions = layout.positions(ends.rank, device=device)
    return call(
        lengths=None if set(after) == {width} else after,
        # A model that looks at the largest position, or has few, is not to see those of padding.
        position_ids=positions[None].clamp(max=max(0, max(after) - 1)),
        layout=layout,
        firsts=starts,
        # Each row begins with its first valid column; padding goes behind the text.
        source=(positions + starts) % count if layout is not None or any(firsts) else None,
    )


def _check_cache(module: Any, cache: Any) -> None:
    if not isinstance(cache, DilatedCache):
        several = rotates_in_dimensions(module)
        needs = "use_cache=False" if several else f"{cache_name(module)}=DilatedCache(that part)"
        raise ValueError(
            "the KV cache must be a DilatedCache, which generate makes by itself for a model "
            "with set_attention, or None; make one by "
            "ring_dilated_attention.integrations.transformers.DilatedCache(model). Where only a "
            "part of the model has set_attention, such as model.model.language_model, give "
            f"generate {needs}. Got {type(cache).__name__}"
        )


def _check_position_ids(given: dict[str, Any], places: Tensor) -> None:
    """Raise unless position ids, if given, are these (batch, columns), or anything where < 0."""
    ids = given.get("position_ids")
    check_ids(ids, Rows(len(places), places[0], 0))
    if ids is None:
        return
    ids = ids.to(places.device).expand(len(places), -1)
    for row, column in ((ids != places) & (places >= 0)).nonzero()[:1].tolist():
        raise ValueError(
            "with a KV cache position_ids must count the valid positions of a row from 0, or be "
            f"left out: one document in each row; in row {row}, token {column} of this call must "
            f"have {places[row, column].item()}; got {ids[row, column].item()}"
        )
