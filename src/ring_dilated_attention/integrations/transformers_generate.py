"""Calls of a transformers model with a KV cache, as its ``generate`` makes them.

Every rank gives the whole input. Of a prompt each row is turned until its valid positions come
first, and each rank takes its shard; the hidden states that are asked for come back in the order of
the input. Tokens behind the prompt are computed by every rank.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from ..decode import cached_attention
from ..exchange import Exchange, all_gather, resolve_exchange, settle, together
from ..functional import autocast_inputs, dilated_attention
from ..layout import SequenceLayout
from .transformers_cache import DilatedCache
from .transformers_call import (
    Call,
    Rows,
    Settings,
    cache_name,
    cache_of,
    check_call,
    check_ids,
    check_padding,
    device_of,
    inputs_of,
    layout_in_words,
    pattern_of_heads,
)
from .transformers_support import CACHE_NAMES, NAME, rotates_in_dimensions


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedCall(Call):
    """A call of a model with a cache.

    Attributes:
        cache: of the model.
        columns: tokens of each row, padding included.
        kept: number of columns at the end whose hidden states are returned; 0: all columns.
        after: valid positions of each row after the call.
        position_ids: of each column that this rank computes; (1, columns) or (batch, columns).
        is_prompt: whether the cache is empty: the prompt is sharded, later tokens are not.
        layout: which positions of the prompt, filled up so that every rank holds one, each rank
            holds; None: this process has them all.
        firsts: of a prompt with padding, the first valid column of each row: the model is given it
            as the first one, and `lengths` counts from there. None: column 0.
        valid: (batch, columns) of a prompt with padding, True where a column is valid.
    """

    cache: DilatedCache
    columns: int
    kept: int
    after: list[int]
    position_ids: Tensor
    is_prompt: bool = False
    layout: SequenceLayout | None = None
    firsts: list[int] | None = None
    valid: Tensor | None = None

    def local(self, x: Tensor, rank: int) -> Tensor:
        """What a rank computes of ids (batch, m) or embeddings (batch, m, hidden)."""
        if self.firsts is not None:
            first = torch.tensor(self.firsts, device=x.device)[:, None]
            x = _rows_at(x, (torch.arange(self.columns, device=x.device) + first) % self.columns)
        if self.layout is None:
            return x
        filling = x.new_zeros(x.shape[0], self.layout.length - self.columns, *x.shape[2:])
        return self.layout.shard(torch.cat([x, filling], 1), rank, 1).contiguous()


def attend_with_cache(
    call: CachedCall,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of a prompt, or of new tokens to a cache, which has their rows afterwards.

    `tensors` are query, key and value as transformers has them, (batch, heads, m, head_dim); the
    result is (batch, m, heads, head_dim). A ValueError if the layer is not causal, or its keys are
    not those that the cache was given.
    """
    layer = call.cache.taken(module, *tensors[1:])
    if not is_causal:
        raise ValueError(
            f"a KV cache is for causal attention; {type(module).__name__} has is_causal=False"
        )
    settings = call.settings
    query, key, value = autocast_inputs(*(x.transpose(1, 2) for x in tensors))
    pattern = pattern_of_heads(module, settings, query.shape[2], key.shape[2])
    kv = call.cache.of_layer(layer, key, pattern)
    if not call.is_prompt:
        return cached_attention(query, key, value, kv, scale=scale, backend=settings.backend)  # type: ignore[no-any-return]
    out = dilated_attention(
        query,
        key,
        value,
        pattern,
        is_causal=True,
        scale=scale,
        lengths=call.lengths,
        group=settings.group,
        layout=call.layout,
        exchange=settings.exchange,
        backend=settings.backend,
    )
    kv.prefill(key, value, layout=call.layout, lengths=call.lengths)
    return out


def restored(module: nn.Module, call: CachedCall, output: Any) -> Any:
    """Behind a decoder: `output`, its hidden states in the order of the input, on every rank."""
    call.cache.finish(call.after, call.columns, call.valid)
    if call.layout is None and call.firsts is None:
        return None
    hidden = output.last_hidden_state
    first = torch.tensor(call.firsts or [0] * len(hidden), device=hidden.device)[:, None]
    every = (torch.arange(call.columns, device=hidden.device) - first) % call.columns
    wanted = every[:, -call.kept :]  # all of them, where that is 0
    if call.layout is not None:
        ends = resolve_exchange(call.settings.group)
        with ends.calls.enter(type(module).__name__, "hidden states") as scope:
            settle(scope, ends, hidden.device)
            output.last_hidden_state = _gathered(hidden, wanted, call.layout, ends)
        return output
    if getattr(output, "hidden_states", None) is not None:
        output.hidden_states = tuple(_rows_at(x, every) for x in output.hidden_states)
    output.last_hidden_state = _rows_at(hidden, wanted)
    return output


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Of each row of a batch, (batch, m, ...), the places that an index (batch, k) names."""
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
    return x.gather(1, index)


def _gathered(hidden: Tensor, wanted: Tensor, layout: SequenceLayout, ends: Exchange) -> Tensor:
    """Rows that ranks hold, on all of them: each rank sends a row for each that is wanted."""
    local, owner = (torch.zeros(layout.length, dtype=torch.int64) for _ in range(2))
    for rank in range(layout.world_size):
        positions = layout.positions(rank)
        owner[positions], local[positions] = rank, torch.arange(len(positions))
    owners, places = owner.to(wanted.device)[wanted], local.to(wanted.device)[wanted]
    own = _rows_at(hidden, torch.where(owners == ends.rank, places, 0))
    result = torch.zeros_like(own)
    for rank, rows in enumerate(all_gather(ends, own)):
        result = torch.where((owners == rank)[..., None], rows, result)
    return result


_DYNAMIC = (None, "dynamic", "dynamic_full")  # "full": older versions take positions back from it
_MOST_PROPOSED = 256
"""Tokens that may be taken back where an assistant model proposes them: its own configuration says
how many, which is not known here, 20 by default. Each branch keeps as many more positions."""
_PLAIN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position")
_PAD_TOKEN = (
    "without a mask generate takes pad_token_id for padding: pass attention_mask where that token "
    "is in the text"
)


def prepared_with_cache(
    module: nn.Module, settings: Settings, given: dict[str, Any]
) -> dict[str, Any]:
    """The arguments for a decoder that is called with a cache, made from those of its caller.

    `given` are the same on every rank, under `NAME` of how many columns at the end the head wants
    hidden states. They get this rank's shard of a prompt, or the whole of later tokens, with their
    ``position_ids``, the cache, and a `CachedCall`. What is not supported, gradients, and ranks
    that differ are errors on every rank.
    """
    ends, name = resolve_exchange(settings.group), type(module).__name__
    with together(name, ends, device_of(given)) as agreed:
        call = _call(module, settings, given, ends)
        if ends.world_size > 1:
            agreed.on(_words(given, call))
    call.cache.start(call.after)
    dropped = ("cache_position", *CACHE_NAMES)
    kept = {key: value for key, value in given.items() if key not in dropped}
    for key in ("input_ids", "inputs_embeds"):
        if kept.get(key) is not None:
            kept[key] = call.local(kept[key], ends.rank)
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
    """What ``generate`` calls to make its cache: a `DilatedCache` with room for all it may need.

    It is put into `model_kwargs`. A ValueError where another kind of cache is asked for, or a
    prompt is padded on the right.
    """
    if generation_config.use_cache is False:
        return
    kind = generation_config.cache_implementation
    cache = cache_of(model_kwargs)
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
    if cache is None:
        rewind = 0
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            # How many tokens an assistant proposes is written in its own configuration, and grows.
            most = generation_config.max_new_tokens or max_cache_length
            expected = generation_config.num_assistant_tokens or 0  # where the model assists itself
            by_another = max(expected, min(most, _MOST_PROPOSED))
            rewind = generation_config.prompt_lookup_num_tokens or by_another
        elif generation_config.is_assistant:
            rewind = getattr(model.generation_config, "num_assistant_tokens", None) or 0
        cache = DilatedCache(model, max_length=max_cache_length, max_rewind=rewind)
        if generation_config.is_assistant or kind == "dynamic_full":
            cache.activate_past_recording()
        model_kwargs[cache_name(model)] = cache
    else:
        _check_cache(model, cache)
        has = cache.get_seq_length()
        # transformers makes one of these of the whole text where the caller does not.
        for text in (model_kwargs.get(key) for key in ("attention_mask", "position_ids")):
            if isinstance(text, Tensor) and text.shape[-1] <= has:
                raise ValueError(
                    f"the KV cache has {has} columns: generate takes the whole text, of more "
                    f"columns than these; got {text.shape[-1]}. crop() the cache to fewer, or "
                    "reset() it"
                )
        cache.reserve(max_cache_length)
        cache._is_user_defined = True  # transformers asks for that


def _call(module: Any, settings: Settings, given: dict[str, Any], ends: Exchange) -> CachedCall:
    """Check a call with a cache, and lay its columns out."""
    cache = cache_of(given)
    if cache is not None:
        _check_cache(module, cache)
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a KV cache has no gradient: call the model under torch.no_grad(), as generate does, "
            "or leave use_cache and the cache out"
        )
    check_call(module, given, ends.world_size, "cached")
    inputs = inputs_of(given)
    batch, count = inputs.shape[:2]
    cache = DilatedCache(module) if cache is None else cache
    before, was = cache.get_seq_length(), cache.settings
    others = [key for key, x in given.items() if isinstance(x, Tensor) and key not in _PLAIN]
    why = ""
    if first := settings.positions.first:
        why = f"{type(module).__name__} numbers positions from {first}: pass use_cache=False"
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
    cache.check_start()
    call = (_later if before else _prompt)(settings, given, cache, inputs)
    most = settings.positions.most
    if most is not None and max(call.after) > most:
        raise ValueError(f"the model has embeddings of {most} positions; got {max(call.after)}")
    return call


def _later(
    settings: Settings, given: dict[str, Any], cache: DilatedCache, inputs: Tensor
) -> CachedCall:
    """New tokens behind what the cache has."""
    batch, count = inputs.shape[:2]
    before, device = cache.get_seq_length(), inputs.device
    mask = given.get("attention_mask")
    if mask is not None:
        padding = check_padding(mask, Rows(batch, torch.arange(before + count, device=device), 0))
        assert padding is not None
        expected = torch.zeros_like(padding)
        if cache.valid is not None:
            expected[:, : cache.valid.shape[1]] = ~cache.valid
        if not torch.equal(padding, expected):
            row, column = (padding != expected).nonzero()[0].tolist()
            raise ValueError(
                "attention_mask must be that of the prompt, and 1 for the tokens behind it: a KV "
                f"cache has no padding between tokens; in row {row}, column {column} must be "
                f"{int(not expected[row, column])} ({_PAD_TOKEN}; prefill_chunk_size must exceed "
                "the padding on the left)"
            )
    lengths = cache.lengths[:1] if len(set(cache.lengths)) == 1 else cache.lengths
    ids = torch.tensor(lengths, device=device)[:, None] + torch.arange(count, device=device)
    _check_position_ids(given, ids, None, batch)
    return CachedCall(
        settings,
        cache=cache,
        columns=count,
        kept=given.get(NAME, 0),
        after=[n + count for n in cache.lengths],
        position_ids=ids,
    )


def _prompt(
    settings: Settings, given: dict[str, Any], cache: DilatedCache, inputs: Tensor
) -> CachedCall:
    """The first tokens of a cache."""
    batch, count = inputs.shape[:2]
    device, ends = inputs.device, resolve_exchange(settings.group)
    rows = Rows(batch, torch.arange(count, device=device), count)
    padding = check_padding(given.get("attention_mask"), rows)
    lengths, firsts, valid = [count] * batch, [0] * batch, None
    if padding is not None and bool(padding.any()):
        valid = ~padding
        lengths, firsts = valid.sum(1).tolist(), valid.int().argmax(1).tolist()
    starts, stops = (torch.tensor(x, device=device)[:, None] for x in (firsts, lengths))
    places = rows.positions - starts
    if valid is not None and not torch.equal(valid, (places >= 0) & (places < stops)):
        raise ValueError(
            "attention_mask must be 1 at columns side by side, with padding on the left or on the "
            f"right; in some row it is 0 between them ({_PAD_TOKEN})"
        )
    _check_position_ids(given, places, valid, batch)
    layout, width, positions = None, count, rows.positions
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
    return CachedCall(
        settings,
        lengths=None if set(lengths) == {width} else lengths,
        cache=cache,
        columns=count,
        kept=min(given.get(NAME, 0), count),
        after=lengths,
        # A model that looks at the largest position, or has few, is not to see those of padding.
        position_ids=positions[None].clamp(max=max(0, max(lengths) - 1)),
        is_prompt=True,
        layout=layout,
        firsts=firsts if any(firsts) else None,
        valid=valid,
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


def _check_position_ids(
    given: dict[str, Any], expected: Tensor, valid: Tensor | None, batch: int
) -> None:
    """Raise unless position ids, where they are given, count valid positions from 0."""
    ids = given.get("position_ids")
    count = expected.shape[1]
    check_ids(ids, Rows(batch, torch.arange(count), count))
    if ids is None:
        return
    wrong = ids.to(expected.device) != expected
    if valid is not None:
        wrong = wrong & valid
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            "with a KV cache position_ids must count the valid positions of a row from 0, or be "
            f"left out: one document in each row; in row {row}, token {column} of this call must "
            f"have {expected.expand(len(wrong), -1)[row, column].item()}; got "
            f"{ids.expand(len(wrong), -1)[row, column].item()}"
        )


def _words(given: dict[str, Any], call: CachedCall) -> dict[str, Any]:
    """What must be equal on all ranks: the tokens too, which a seed may have made different."""
    tokens = inputs_of(given)
    held = tokens.detach().cpu().contiguous()
    seen = blake2b(ctypes.string_at(held.data_ptr(), held.nbytes), digest_size=6)
    return {
        "use_cache": True,
        "input": f"{tuple(tokens.shape)} ({seen.hexdigest()})",
        "KV cache": call.cache.described,
        "lengths": str(call.after),
        "first columns": str(call.firsts),
        "logits_to_keep": call.kept,
        "layout": layout_in_words(call.layout),
    }
