"""Generation with transformers: `DilatedCache`, and calls of a model with it.

An attention layer of transformers hands its new keys and values to the cache, and what the cache
returns to its attention. `DilatedCache.update` returns the very tensors that it was given, and
attention finds by their identity that they are a layer's own or an earlier one's: keys that a model
changes in between or repeats are refused and never attended to.

Every rank gives the whole input. Of a prompt each row is turned until its valid positions come
first, and each rank takes its shard. Tokens behind the prompt are computed by every rank.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMode

from ..decode import DeepOnly, DilatedKVCache, cached_attention
from ..exchange import resolve_exchange, untraced
from ..functional import autocast_inputs, dilated_attention
from ..layout import SequenceLayout
from ..parallel import comparing
from ..pattern import DilatedPattern, check_positive_int
from ..torch_op import sum_over_ranks
from .transformers_call import (
    SETTINGS,
    Call,
    Mask,
    Rows,
    Settings,
    cache_of,
    check_ids,
    check_padding,
    check_table,
    inputs_of,
    pattern_of_layer,
    retuned,
)
from .transformers_support import (
    CACHE_NAMES,
    DECODERS,
    NAME,
    check_arguments,
    kind_of,
    without_adapters,
)

# --- the cache


class _Layer:
    """One attention layer's part of a `DilatedCache`, with the flags of transformers' layers."""

    is_sliding = is_compileable = is_croppable = supports_early_init = False

    def __init__(self, kv: DilatedKVCache) -> None:
        self.kv = kv


class DilatedCache(DeepOnly, Cache):  # type: ignore[misc]
    """A KV cache that keeps, for each layer, only what later positions can still attend to.

    A model with `set_attention` makes one by itself where it is called with ``use_cache=True``, as
    ``generate`` does. Make one yourself to reuse it, to limit it, or for a loop of your own; pass
    it as ``cache`` (before transformers 5.24: ``past_key_values``). For another batch or document,
    call its `reset`; to go on from one prompt twice, `copy.deepcopy` it.

    A branch (w, r) keeps at most ceil(w / r) rows a KV head, however long the text becomes; one
    with a segment length of None keeps n / r rows, a sliding window the rows of the window. Prompts
    of different lengths are padded on the left; padding is not kept. Positions cannot be taken
    back, nor rows of the batch reordered.

    On the ranks of a group every rank makes the same calls with the same whole input, and a cache
    of its own. The prompt is sharded over the ranks; what comes later every rank computes.

    Args:
        model: with `set_attention`; the one that is called.
        max_length: positions that memory is allocated for at once, those of the prompt included.
            None, the default: half as many again as the prompt. Longer documents make it grow, up
            to what the pattern keeps; ``generate`` reserves what it may need.
        sharded: whether the ranks share the rows; else each keeps them all. None, the default:
            from 128 MiB a layer on.

    Attributes:
        settings: those of the model.
        lengths: valid positions of each row; the next one's number. Empty before the first prompt.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `set_attention` was not called with the model, one of its layers mixes positions
            otherwise than by attention, or a number is out of range.
    """

    def __init__(
        self, model: nn.Module, *, max_length: int | None = None, sharded: bool | None = None
    ) -> None:
        settings = getattr(model, SETTINGS, None)
        if not isinstance(settings, Settings):
            raise ValueError(
                "a DilatedCache is for a model with set_attention: call set_attention(model, "
                f"pattern) first; it was not called with this {type(model).__name__}"
            )
        if (kind := kind_of(without_adapters(model))) not in DECODERS:
            raise ValueError(
                "a DilatedCache is for causal decoders in which attention alone mixes positions; "
                f"{type(model).__name__} is {kind!r}: pass use_cache=False"
            )
        super().__init__(layers=[])
        self.settings: Settings = settings
        self._room = 0 if max_length is None else check_positive_int("max_length", max_length)
        self._sharded = sharded
        self._columns = 0
        self.lengths: tuple[int, ...] = ()
        self._is_called = False  # by a model with set_attention
        self._noted: dict[int, tuple[Tensor, Tensor]] = {}  # of `update`, by layer, in this call
        self._taken = 0  # by attention, in this call

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all layers on this rank."""
        return sum(layer.kv.nbytes for layer in self.layers)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first prompt."""
        return len(self.lengths) or -1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far: padding counts, since masks and inputs of ``generate`` have it."""
        return self._columns

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """(keys, first key) that a mask would have to cover."""
        count = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self._columns + count, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in older versions of transformers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Note and return new keys and values of a layer; attention, which comes next, adds them.

        Args:
            key_states: (batch, kv_heads, m, head_dim).
            value_states: like `key_states`.
            layer_idx: of the layer.

        Raises:
            ValueError: the model has no `set_attention`.
        """
        if not self._is_called:
            raise ValueError(
                "a DilatedCache is for the model with set_attention that it was made for; this one "
                "has other attention: pass it another cache, or call set_attention(model, pattern)"
            )
        if layer_idx in self._noted:
            raise ValueError(
                f"layer {layer_idx} updates the KV cache twice in a call: pass use_cache=False"
            )
        self._noted[layer_idx] = key_states, value_states
        return key_states, value_states

    def reserve(self, max_length: int) -> None:
        """Make room for documents of `max_length` positions, those so far included; never less."""
        self._room = max(self._room, check_positive_int("max_length", max_length))
        for layer in self.layers:
            layer.kv.reserve(self._room)

    def reset(self) -> None:
        """Drop everything: the next call brings a new prompt, of any batch."""
        self.layers: list[_Layer] = []
        self._columns, self.lengths = 0, ()

    # A call of the model: `start`, then `update` and `of_layer` for each layer, then `finish`.

    def start(self, after: tuple[int, ...]) -> None:
        """Begin a call of the model, after which the rows of the batch have these lengths."""
        self._noted, self._taken, self._is_called = {}, 0, True
        if not self._columns:
            self.layers = []
        if max(after) > self._room:
            self.reserve(math.ceil(1.5 * max(after)))  # few copies, and at most half too much

    def taken(self, module: nn.Module, key: Tensor, value: Tensor) -> int:
        """The number of the layer, if an update has returned these very tensors; or a ValueError.

        A layer that takes keys and values of an earlier one (Gemma 3n and 4) has a cache of its
        own, since its pattern may be another.
        """
        if not any(k is key and v is value for k, v in self._noted.values()):
            raise ValueError(
                f"the keys and values in {type(module).__name__} are not what its update of the KV "
                "cache returned: models that change or share them have no DilatedCache, nor has "
                "gradient checkpointing in training mode; pass use_cache=False"
            )
        self._taken += 1
        return self._taken - 1

    def of_layer(self, layer_idx: int, rows: Tensor, pattern: DilatedPattern) -> DilatedKVCache:
        """The cache of a layer, made for its first keys, (batch, m, kv_heads, head_dim)."""
        if layer_idx == len(self.layers):
            batch, _, kv_heads, head_dim = rows.shape
            kv = DilatedKVCache(
                *(pattern, batch, kv_heads, head_dim),
                max_length=self._room,
                dtype=rows.dtype,
                device=rows.device,
                group=self.settings.options.group,
                sharded=self._sharded,
            )
            self.layers.append(_Layer(kv))
        found: DilatedKVCache = self.layers[layer_idx].kv
        if found.known_lengths != (self.lengths or (0,) * len(rows)):
            raise ValueError(
                f"layer {layer_idx} has {found.known_lengths} rows in the KV cache where "
                f"{self.lengths} were expected: an earlier call failed (reset() the cache)"
            )
        return found

    def finish(self, after: tuple[int, ...], columns: int) -> None:
        """Note that a call has added columns."""
        self._is_called, self._noted = False, {}
        self._columns, self.lengths = self._columns + columns, after

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.settings.pattern}, {self._columns} columns, lengths "
            f"{list(self.lengths)}, max_length={self._room}, sharded={self._sharded})"
        )


# --- attention


def attended(
    call: Call,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Mask,
    scores: dict[str, Any],
) -> Tensor:
    """Attention of the shards of a sequence, or of new tokens to a cache, which then has them too.

    `tensors` are query, key and value as transformers has them, (batch, heads, m, head_dim);
    `scores` scale, sink and softcap. The result is (batch, m, heads, head_dim of value).
    """
    settings, cache, width = call.settings, call.cache, tensors[2].shape[3]
    options = settings.options
    layer = None if cache is None else cache.taken(module, *tensors[1:])
    if cache is not None and not mask.is_causal:
        raise ValueError(
            f"a KV cache is for causal attention; {type(module).__name__} has is_causal=False"
        )
    query, key, value = (x.transpose(1, 2) for x in tensors)
    query = retuned(module, query, call.source)
    pattern = pattern_of_layer(module, settings, mask.length, query.shape[2], key.shape[2])
    if cache is None:
        # Narrower values, as of DeepSeek's latent attention, take as long as if they were not.
        value = F.pad(value, (0, query.shape[3] - width)) if query.shape[3] > width else value
    else:
        query, key, value = autocast_inputs(query, key, value)
        kv = cache.of_layer(layer, key, pattern)
        if cache.lengths:
            found: Tensor = cached_attention(
                query, key, value, kv, **scores, backend=options.backend
            )
            return found
    out: Tensor = dilated_attention(
        *(query, key, value, pattern),
        is_causal=mask.is_causal,
        **scores,
        documents=call.documents,
        lengths=call.lengths,
        group=options.group,
        layout=call.layout,
        exchange=options.exchange,
        backend=options.backend,
        workspace=options.workspace,
        branch_gradients=options.branch_gradients,
    )
    if cache is not None:
        kv.prefill(key, value, layout=call.layout, lengths=call.lengths)
    return out if value.shape[3] == width else out[..., :width]


# --- a call of the model


@untraced
def restored(module: nn.Module, call: Call, output: Any) -> Any:
    """Behind a decoder: `output`, its hidden states in the order of the input.

    On several ranks those of a prompt are the last token's alone, (batch, 1, hidden), on each rank.
    """
    call.cache.finish(call.after, call.columns)
    if call.source is None:
        return None
    hidden, layout = output.last_hidden_state, call.layout
    if layout is None:
        output.last_hidden_state = _rows_at(hidden, call.source.argsort(1))
        return output
    ends = resolve_exchange(call.settings.options.group)
    stops = torch.tensor(call.after, device=hidden.device)[:, None]
    is_last = layout.positions(ends.rank, device=hidden.device) == stops - 1
    own = hidden.where(is_last[..., None], 0).sum(1, keepdim=True)
    output.last_hidden_state = sum_over_ranks(own, type(module).__name__, ends)
    return output


def _rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Of each row of a batch, (batch, m, ...), the places that an index (batch, k) names."""
    index = index.reshape(*index.shape, *[1] * (x.dim() - 2)).expand(*index.shape, *x.shape[2:])
    return x.gather(1, index)


_PLAIN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position")


@untraced
def prepared_with_cache(
    module: nn.Module, settings: Settings, given: dict[str, Any]
) -> dict[str, Any]:
    """The arguments for a decoder that is called with a cache, made from those of its caller.

    `given` are the same on every rank. They get this rank's shard of a prompt, or the whole of
    later tokens, with their ``position_ids``, the cache, and a `Call`. What is not supported,
    gradients, and ranks that differ are errors on every rank.
    """
    with comparing(type(module).__name__, resolve_exchange(settings.options.group)) as compared:
        call, position_ids = _call(module, settings, given)
        compared.update(
            {
                "input": inputs_of(given),  # a seed may have made the tokens different
                "use_cache": True,
                "KV cache": repr(call.cache),
                "lengths": call.after,  # which tell the padding
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
        "position_ids": position_ids,
        cache_name(module): call.cache,
        "use_cache": True,
        NAME: call,
    }


def _call(module: Any, settings: Settings, given: dict[str, Any]) -> tuple[Call, Tensor]:
    """A call with a cache, and the position ids of the columns that this rank computes of it."""
    settings.raise_refusal()
    cache = cache_of(given)
    cache = DilatedCache(module) if cache is None else _checked(cache)
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a KV cache has no gradient: call the model under torch.no_grad(), as generate does, "
            "or leave use_cache and the cache out"
        )
    ends, inputs = resolve_exchange(settings.options.group), inputs_of(given)
    check_arguments(module, given, settings.told, ends.world_size, is_cached=True)
    batch, count, device = *inputs.shape[:2], inputs.device
    before, was = cache.get_seq_length(), cache.settings
    others = [key for key, x in given.items() if isinstance(x, Tensor) and key not in _PLAIN]
    why = ""
    if others:
        why = f"a model takes {', '.join(_PLAIN[:4])}; got {', '.join(sorted(others))}"
    elif (was.told, was.options.group) != (settings.told, settings.options.group):
        why = (
            f"of {was.pattern} the model must have this pattern and group, as when the cache was "
            f"made; got {settings.pattern}"
        )
    elif before and len(cache.lengths) != batch:
        rows = len(cache.lengths)
        why = f"of {rows} rows the input must have {rows} too, or reset() the cache; got {batch}"
    if why:
        raise ValueError(f"with a KV cache {why}")
    columns = torch.arange(before + count, device=device)
    firsts, places = _places(given, cache, Rows(batch, columns, 0))
    after = tuple(before + count - first for first in firsts)
    check_table(module, max(after))
    call = partial(Call, settings, cache=cache, columns=count, after=after)
    if before:
        return call(), places[:1] if len(set(firsts)) == 1 else places
    layout, width, positions = None, count, columns
    if ends.world_size > 1:
        width = max(count, 2 * ends.world_size)  # transformers' models take no empty shards
        layout = SequenceLayout.zigzag(width, ends.world_size)  # which balances causal work
        positions = layout.positions(ends.rank, device=device)
    # Each row begins with its first valid column; padding goes behind the text.
    source = (positions - places[:, :1]) % count if layout or any(firsts) else None
    lengths = None if set(after) == {width} else list(after)
    # A model that looks at the largest position, or has few, is not to see those of padding.
    ids = positions[None].clamp(max=max(0, max(after) - 1))
    return call(layout=layout, lengths=lengths, source=source), ids


def _places(given: dict[str, Any], cache: DilatedCache, rows: Rows) -> tuple[list[int], Tensor]:
    """The first valid column of each row, and the new columns' places in its text, (batch, m).

    A place below 0 is padding. Masks and position ids that say otherwise are a ValueError.
    """
    columns, before = rows.positions, cache.get_seq_length()
    padding = check_padding(given.get("attention_mask"), rows)
    firsts = [before - n for n in cache.lengths] or [0] * rows.batch
    if not before and padding is not None:
        firsts = padding.int().cumprod(1).sum(1).tolist()
    places = columns - torch.tensor(firsts, device=columns.device)[:, None]
    if padding is not None and not torch.equal(padding, places < 0):
        row, column = (padding != (places < 0)).nonzero()[0].tolist()
        raise ValueError(
            "with a KV cache attention_mask must be 0 for padding on the left of the prompt "
            "(tokenizer.padding_side = 'left'), and 1 for all behind it; in row "
            f"{row}, column {column} must be {int(places[row, column] >= 0)} (without a mask "
            "generate takes pad_token_id for padding: pass attention_mask where that token is in "
            "the text)"
        )
    places = places[:, before:]
    check_ids(ids := given.get("position_ids"), Rows(rows.batch, places[0], 0))
    if ids is not None:
        ids = ids.to(columns.device).expand(rows.batch, -1)
        for row, column in ((ids != places) & (places >= 0)).nonzero()[:1].tolist():
            raise ValueError(
                "with a KV cache position_ids must count the valid positions of a row from 0, or "
                f"be left out: one document in each row; in row {row}, token {column} of this call "
                f"must have {places[row, column].item()}; got {ids[row, column].item()}"
            )
    return firsts, places


# --- generate

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def cache_name(module: nn.Module) -> str:
    """The name of the KV cache in a model's forward, one of `CACHE_NAMES`."""
    return CACHE_NAMES[CACHE_NAMES[0] not in inspect.signature(module.forward).parameters]


def _checked(cache: Any) -> DilatedCache:
    if not isinstance(cache, DilatedCache):
        raise ValueError(
            "the KV cache must be a DilatedCache, which generate makes for a model with "
            "set_attention; where only a part has it, as model.model.language_model, pass "
            f"DilatedCache(that part), or use_cache=False (M-RoPE). Got {type(cache).__name__}"
        )
    return cache


def prepare_cache_for_generation(
    model: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    batch_size: int,
    max_cache_length: int,
) -> None:
    """Put a `DilatedCache` with room for all that ``generate`` may need into `model_kwargs`."""
    if generation_config.use_cache is False:
        return
    kind = generation_config.cache_implementation
    if generation_mode not in _MODES or kind not in (None, "dynamic"):
        mode = getattr(generation_mode, "value", generation_mode)
        raise ValueError(
            "a model with set_attention generates with cache_implementation=None, by greedy search "
            "or sampling, and beams on one process alone, with use_cache=False. Got "
            f"cache_implementation={kind!r} and {mode}"
        )
    cache = cache_of(model_kwargs)
    if cache is None:
        model_kwargs[cache_name(model)] = DilatedCache(model, max_length=max_cache_length)
    else:
        _checked(cache).reserve(max_cache_length)
        cache._is_user_defined = True  # transformers asks for that
