"""`DilatedCache`: the KV cache of a transformers model that has `set_attention`.

An attention layer of transformers hands its new keys and values to the cache, and what the cache
returns to its attention. `DilatedCache.update` returns the very tensors that it was given, and
attention finds by their identity which layer they belong to: keys that a model changes in between,
repeats, or takes from another layer are refused and never attended to.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..decode import DeepOnly, DilatedKVCache
from ..pattern import DilatedPattern, check_int, check_positive_int
from .transformers_call import SETTINGS, Settings
from .transformers_support import other_layers


class _Layer:
    """One attention layer's part of a `DilatedCache`, with the flags of transformers' layers."""

    is_sliding = is_compileable = supports_early_init = False

    def __init__(self, kv: DilatedKVCache) -> None:
        self.kv = kv

    @property
    def is_croppable(self) -> bool:
        """Whether positions can be taken back."""
        return self.kv.plan.max_rewind > 0


ASSISTED_REWIND = 256
"""Positions that assisted generation may take back at a time, unless a cache is made with more.
transformers proposes 20 by default, an assistant model as many as its own configuration says."""

_GROWTH = 1.5
"""A cache of unknown length makes room for this many times what it needs: few copies, and at most
half too much."""


class DilatedCache(DeepOnly, Cache):  # type: ignore[misc]
    """A KV cache that keeps, of each layer, the rows that later positions can still be shown.

    A model with `set_attention` makes one by itself where it is called with ``use_cache=True``, as
    ``generate`` does. Make one yourself to reuse it, to limit it, or for a loop of your own; pass
    it as ``cache`` (before transformers 5.24: ``past_key_values``). For another batch or document,
    call its `reset`.

    A branch (w, r) keeps at most ceil(w / r) rows a KV head, however long the text becomes; one
    with a segment length of None keeps n / r rows. Prompts of different lengths are padded on the
    left; padding is not kept.

    On the ranks of a group every rank makes the same calls with the same whole input, and a cache
    of its own. The prompt is sharded over the ranks; what comes later every rank computes.

    Args:
        model: with `set_attention`; the one that is called.
        max_length: positions that memory is allocated for at once, those of the prompt included.
            None, the default: half as many again as the prompt. Longer documents make it grow, up
            to what the pattern keeps; ``generate`` reserves what it may need.
        max_rewind: the most positions that `crop` takes back at a time; 0 by default. Assisted
            generation makes it 256 at least.
        sharded: whether the ranks share the rows; else each keeps them all. None, the default:
            from 128 MiB a layer on.

    Attributes:
        settings: those of the model.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `set_attention` was not called with the model, one of its layers mixes positions
            otherwise than by attention, or a number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_length: int | None = None,
        max_rewind: int = 0,
        sharded: bool | None = None,
    ) -> None:
        settings = getattr(model, SETTINGS, None)
        if not isinstance(settings, Settings):
            raise ValueError(
                "a DilatedCache is for a model with set_attention: call set_attention(model, "
                f"pattern) first; it was not called with this {type(model).__name__}"
            )
        if max_length is not None:
            check_positive_int("max_length", max_length)
        if check_int("max_rewind", max_rewind) < 0:
            raise ValueError(f"max_rewind must be >= 0, got {max_rewind}")
        if sharded is not None and not isinstance(sharded, bool):
            raise TypeError(f"sharded must be a bool or None, got {sharded!r}")
        if mixing := other_layers(model, model):
            raise ValueError(
                "a DilatedCache is for models in which nothing but full attention mixes positions; "
                f"{type(model).__name__} has {mixing}"
            )
        super().__init__(layers=[])
        self.settings: Settings = settings
        self._room = max_length or 0
        self._max_rewind = max_rewind
        self._sharded = sharded
        self._columns = 0
        self._lengths: list[int] = []
        self._is_called = False  # by a model with set_attention
        self._pending: tuple[int, Tensor, Tensor] | None = None  # of `update`, till attention comes

    # State.

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all layers on this rank."""
        return sum(layer.kv.nbytes for layer in self.layers)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Valid positions of each row; the next one's number. Empty before the first prompt."""
        return tuple(self._lengths)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first prompt."""
        return len(self._lengths) or -1

    @property
    def described(self) -> str:
        """The state that must be equal on all ranks of a group."""
        return (
            f"{self.settings.pattern}, {self._columns} columns, lengths {self._lengths}, "
            f"max_length={self._room}, max_rewind={self._max_rewind}, sharded={self._sharded}"
        )

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

    # Changes.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the new keys and values of a layer; attention, which comes next, adds them.

        Args:
            key_states: (batch, kv_heads, m, head_dim).
            value_states: like `key_states`.
            layer_idx: of the layer.
            args: not used.
            kwargs: not used.

        Returns:
            The two tensors themselves.

        Raises:
            ValueError: the model has no `set_attention`.
        """
        if not self._is_called:
            raise ValueError(
                "a DilatedCache is for the model with set_attention that it was made for; this one "
                "has other attention: pass it another cache, or call set_attention(model, pattern)"
            )
        self._pending = layer_idx, key_states, value_states
        return key_states, value_states

    def reserve(self, max_length: int) -> None:
        """Make room for documents of `max_length` positions; never makes less room than there is.

        Args:
            max_length: positions, those so far included.
        """
        self._room = max(self._room, check_positive_int("max_length", max_length))
        for layer in self.layers:
            layer.kv.reserve(self._room)

    def reset(self) -> None:
        """Drop everything: the next call brings a new prompt, of any batch."""
        self.layers: list[_Layer] = []
        self._columns, self._lengths = 0, []

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest columns, as assisted generation does with candidates it rejects.

        Args:
            tokens_to_remove: minus their number; a positive number is how many are to stay.

        Raises:
            ValueError: more than `max_rewind` of them, or one that is padding.
        """
        given = check_int("tokens_to_remove", tokens_to_remove)
        count = max(0, self._columns - given) if given > 0 else -given
        most = min([self._max_rewind, *self._lengths])
        if count > most:
            raise ValueError(
                f"at most {most} of {self._columns} columns can be taken back (max_rewind is "
                f"{self._max_rewind}, and padding is not kept); got {count}. For an assistant "
                "model set num_assistant_tokens_schedule = 'constant' in its generation_config"
            )
        for layer in self.layers if count else ():
            layer.kv.rewind(count)
        self._columns, self._lengths = self._columns - count, [n - count for n in self._lengths]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make the batch of these rows of it, as beam search does: 1-D ints."""
        self._select([int(row) for row in beam_idx.tolist()])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Make the batch of these rows of it: 1-D ints, or a mask of bools."""
        if indices.dtype == torch.bool:
            indices = torch.arange(len(self._lengths), device=indices.device)[indices]
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times, the copies next to each other."""
        self._select([row for row in range(len(self._lengths)) for _ in range(repeats)])

    def _select(self, rows: list[int]) -> None:
        if self._columns and rows != list(range(len(self._lengths))):
            for layer in self.layers:
                layer.kv.select(rows)
            self._lengths = [self._lengths[row] for row in rows]

    def activate_past_recording(self) -> None:
        """Make `crop` possible, as assisted generation asks.

        Raises:
            ValueError: there are rows already, and the cache was made without `max_rewind`.
        """
        if self._max_rewind == 0 and self._columns:
            raise ValueError(
                "assisted generation takes tokens back, for which this cache was not made: pass an "
                f"empty one, or one made with DilatedCache(model, max_rewind={ASSISTED_REWIND})"
            )
        if not self._columns:
            self._max_rewind = max(self._max_rewind, ASSISTED_REWIND)

    # A call of the model: `start`, then `update`, `taken` and `of_layer` for each, then `finish`.

    def check_layers(self) -> None:
        """Raise a ValueError unless all layers have rows as the cache says."""
        known = {layer.kv.known_lengths for layer in self.layers}
        if self._columns and known != {self.lengths}:
            raise ValueError(
                "an earlier call of the model with this cache failed, so its layers have "
                f"different lengths, {sorted(known)}: reset() it and begin anew"
            )

    def start(self, after: list[int]) -> None:
        """Begin a call of the model, after which the rows of the batch have these lengths."""
        self._pending, self._is_called = None, True
        if not self._columns:
            self.layers = []
        if max(after) > self._room:
            self.reserve(math.ceil(_GROWTH * max(after)))

    def taken(self, module: nn.Module, key: Tensor, value: Tensor) -> int:
        """The layer whose update has just returned these very tensors; else a ValueError."""
        pending, self._pending = self._pending, None
        if pending is None or pending[1] is not key or pending[2] is not value:
            raise ValueError(
                f"the keys and values in {type(module).__name__} are not what its update of the KV "
                "cache returned: models that change or repeat them after the update, or share them "
                "between layers, have no DilatedCache, nor has gradient checkpointing in training "
                "mode; pass use_cache=False"
            )
        return pending[0]

    def of_layer(self, layer_idx: int, rows: Tensor, pattern: DilatedPattern) -> DilatedKVCache:
        """The cache of a layer, made for its first keys, (batch, m, kv_heads, head_dim)."""
        if layer_idx == len(self.layers):
            batch, _, kv_heads, head_dim = rows.shape
            kv = DilatedKVCache(
                *(pattern, batch, kv_heads, head_dim),
                max_length=self._room,
                max_rewind=self._max_rewind,
                dtype=rows.dtype,
                device=rows.device,
                group=self.settings.group,
                sharded=self._sharded,
            )
            self.layers.append(_Layer(kv))
        found: DilatedKVCache = self.layers[layer_idx].kv
        return found

    def finish(self, after: list[int], columns: int) -> None:
        """Note that a call has added columns; a ValueError if a layer has other rows."""
        self._is_called = False
        known = {layer.kv.known_lengths for layer in self.layers}
        if known != {tuple(after)}:
            raise ValueError(
                f"layers have added different numbers of rows to the KV cache, {sorted(known)}, "
                f"where {tuple(after)} were expected: a DilatedCache is for models whose layers "
                "update their cache once in each call"
            )
        self._columns, self._lengths = self._columns + columns, list(after)

    def __deepcopy__(self, memo: dict[int, Any]) -> DilatedCache:
        """A copy with rows of its own, of the same ranks: to go on from one prompt twice."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.layers = [_Layer(copy.deepcopy(layer.kv, memo)) for layer in self.layers]
        copied._lengths = list(self._lengths)
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.described}; {self.nbytes} bytes)"
