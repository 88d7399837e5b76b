"""A call of a transformers model on its ranks: positions, documents, padding; shards of a batch.

The ranks agree once for each call of the model, not per layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..documents import as_ints, document_borders, in_words
from ..exchange import Exchange, Group, agree, resolve_exchange, together
from ..layout import SequenceLayout
from ..nn import document_positions
from ..nn.heads import Heads, slice_of_projections
from ..options import Schedule
from ..parallel import comparing
from ..pattern import DilatedPattern, HeadSlice, in_brief
from ..tiles import Backend
from ..torch_op import lengths_of_mask
from .transformers_support import (
    ANY_POSITIONS,
    CACHE_NAMES,
    NAME,
    Positions,
    check_arguments,
    check_loss,
    check_same_pattern,
    rotates_in_dimensions,
)

SETTINGS = "_ring_dilated_attention"
"""The attribute of a model that holds its `Settings`."""


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
    documents: list[int] | None = None
    lengths: list[int] | None = None


class Rows(NamedTuple):
    """This rank's part of the input.

    Attributes:
        batch: rows of the batch.
        positions: the global position of each local one, int64, shape (local_sequence,).
        total: number of positions of the whole sequence.
    """

    batch: int
    positions: Tensor
    total: int


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


def device_of(given: dict[str, Any]) -> torch.device:
    """Where the input is."""
    inputs = (given.get(key) for key in ("input_ids", "inputs_embeds"))
    return next((x.device for x in inputs if isinstance(x, Tensor)), torch.device("cpu"))


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


def check_call(module: Any, given: dict[str, Any], ranks: int, *calls: str) -> None:
    """Raise for what no call supports, see `check_arguments`, and for a shared config."""
    check_arguments(module, given, ranks, *calls)
    check_same_pattern(module.config, getattr(module, SETTINGS).pattern)


def layout_in_words(layout: SequenceLayout | None) -> str | None:
    """A layout, so that ranks can compare theirs."""
    return None if layout is None else f"{layout!r} ({layout.digest[:8]})"


def prepared(module: nn.Module, settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the decoder (or encoder), made from those of its caller: without a cache.

    `given` get global ``position_ids`` (None where the model makes them itself), a 2-D
    ``attention_mask`` (with one, transformers looks for no documents in a shard),
    ``use_cache=False`` and a `Call`, and lose ``cu_seq_lens_q`` and its companions. What is not
    supported, and ranks that differ, are errors on every rank.
    """
    ends, layout = resolve_exchange(settings.group), settings.layout
    name = type(module).__name__
    mask, ids = given.get("attention_mask"), given.get("position_ids")
    with together(name, ends, device_of(given)) as agreed:
        check_call(module, given, ends.world_size)
        rows = _rows(given, ends, layout)
        text_ids = _ids_of_text(module, ids, ends)
        check_ids(text_ids, rows)
        padding = check_padding(mask, rows)
        borders = _given_borders(given, rows)
        _check_positions(name, settings.positions, given, rows, padding)
        shard = f"None (a shard of {len(rows.positions)} positions)"
        agreed.on(
            {
                "use_cache": False,
                "batch": rows.batch,
                "layout": layout_in_words(layout) or shard,
                "attention_mask": "None" if mask is None else "given",
                "position_ids": "None" if ids is None else "given",
                "cu_seq_lens_q": "None" if borders is None else "given",
            }
        )
    lengths = _lengths(name, padding, rows, layout, ends)
    first, documents = settings.positions.first, borders
    if text_ids is not None:
        documents = _documents(name, text_ids, rows, lengths, ends, first)
        if borders is not None and documents not in (None, borders):
            raise ValueError(  # alike on every rank
                "cu_seq_lens_q and the restarts of position_ids must be the same borders; got "
                f"{in_words(borders)} and {in_words(documents or ())}"
            )
        documents = borders or documents
    elif ids is None and not _has_all_in_order(ends, layout):
        # A model that has all tokens in order knows best: it may skip padding, wherever that is.
        ids = rows.positions[None] + first
    if borders is not None and lengths is not None:
        raise ValueError(
            "cu_seq_lens_q is for batches without padding; got an attention_mask of "
            f"{lengths[0]} valid positions of {rows.total}"
        )
    if mask is None:
        shape = rows.batch, len(rows.positions)
        mask = torch.ones(shape, dtype=torch.bool, device=rows.positions.device)
    return {
        **{key: value for key, value in given.items() if key not in _WHOLE},
        "position_ids": ids,
        "attention_mask": mask,
        "use_cache": False,
        NAME: Call(settings, documents, lengths),
    }


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


def _has_all_in_order(ends: Exchange, layout: SequenceLayout | None) -> bool:
    """Whether this process has the whole sequence in its order: a model can number it by itself."""
    whole = layout is None or layout == SequenceLayout.contiguous(layout.length, 1)
    return ends.world_size == 1 and whole


def _ids_of_text(module: Any, ids: Any, ends: Exchange) -> Any:
    """Position ids that tell documents: those given, or of several dimensions those of the text.

    On one process a model of rotations in several dimensions (M-RoPE) also takes (3, batch,
    sequence), of which none are the text's, or (4, batch, sequence), of which the first are.
    """
    if not isinstance(ids, Tensor) or ids.dim() != 3 or ends.world_size > 1:
        return ids
    if not rotates_in_dimensions(module) or len(ids) not in (3, 4):
        return ids
    return ids[0] if len(ids) == 4 else None


def check_ids(ids: Any, rows: Rows) -> None:
    """Raise a TypeError or ValueError unless position ids have the rows' shape, or are None."""
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        got = ids.dtype if isinstance(ids, Tensor) else repr(ids)
        raise TypeError(f"position_ids must be a tensor of int32 or int64; got {got}")
    length = len(rows.positions)
    if tuple(ids.shape) not in ((1, length), (rows.batch, length)):
        more = (
            " (positions in several dimensions are supported for models with M-RoPE, on one "
            "process without a KV cache: use_cache=False)"
        )
        raise ValueError(
            f"position_ids must have shape (batch, local_sequence), {(rows.batch, length)}, or "
            f"{(1, length)}; got {tuple(ids.shape)}{more if ids.dim() == 3 else ''}"
        )


def check_padding(mask: Any, rows: Rows) -> Tensor | None:
    """The mask of the rows, checked, True where a position is padding; None without a mask."""
    if mask is None:
        return None
    wanted = "(batch, local_sequence), 1 where a position is valid"
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor {wanted}; got {type(mask).__name__}")
    # peft's prompt tuning makes floats of a mask, and its virtual tokens come first.
    additive = mask.is_floating_point() and not bool((mask[..., :1] == 1).all())
    if mask.dim() != 2 or additive:
        raise ValueError(
            f"attention_mask must be bool or ints, {wanted}; other masks have no dilated "
            f"attention. Got {mask.dtype}, shape {tuple(mask.shape)}"
        )
    if mask.shape != (rows.batch, len(rows.positions)):
        raise ValueError(
            f"attention_mask must have shape (batch, local_sequence), "
            f"{(rows.batch, len(rows.positions))}; got {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and ((mask != 0) & (mask != 1)).any():
        raise ValueError(
            "attention_mask must hold 0 and 1 only (documents are told by position_ids that "
            f"restart at 0); got {mask[(mask != 0) & (mask != 1)][0].item()}"
        )
    return mask.to(rows.positions.device) == 0


def _check_positions(
    name: str, positions: Positions, given: dict[str, Any], rows: Rows, padding: Tensor | None
) -> None:
    """Raise a ValueError unless the model can number the tokens."""
    first, most = positions
    ids, tokens = given.get("position_ids"), given.get("input_ids")
    if most is not None:
        needed = first + rows.total if ids is None else int(ids.max()) + 1
        if needed > most:
            raise ValueError(
                f"{name} has embeddings of {most} positions, and numbers them from {first}; the "
                f"input needs {needed}"
            )
    if first and ids is None and isinstance(tokens, Tensor) and len(rows.positions) < rows.total:
        skipped = tokens == first - 1
        if bool((skipped if padding is None else skipped & ~padding).any()):
            raise ValueError(
                f"{name} skips token {first - 1} when it numbers positions, which a shard cannot "
                "count: pass an attention_mask that is 0 there, or position_ids"
            )
    if given.get("seq_idx") is not None and ids is None and given.get("cu_seq_lens_q") is None:
        raise ValueError(
            "seq_idx names documents for layers other than attention: pass position_ids that "
            "restart too, or cu_seq_lens_q; DataCollatorWithFlattening returns both"
        )


def _given_borders(given: dict[str, Any], rows: Rows) -> list[int] | None:
    """The documents that the keyword arguments of flash attention name."""
    query, key = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if query is None and key is None:
        return None
    if query is None or key is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must both be given, or neither")
    borders = as_ints("cu_seq_lens_q", query)
    if borders != as_ints("cu_seq_lens_k", key):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must be equal: queries are those of all keys"
        )
    if rows.batch != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of 1 row; got {rows.batch}")
    try:
        return list(document_borders(borders, None, rows.total))
    except ValueError as error:
        raise ValueError(
            f"cu_seq_lens_q must be borders in the whole sequence, the same on every rank: {error}"
        ) from None


def _documents(
    name: str, ids: Tensor, rows: Rows, lengths: list[int] | None, ends: Exchange, first: int
) -> list[int] | None:
    """The documents that restarts of the position ids at `first` begin, the same on every rank.

    Where ids do not count up, or not alike in all rows, a ValueError on every rank.
    """
    stops = torch.tensor(lengths or [rows.total] * rows.batch, device=rows.positions.device)
    valid = rows.positions < stops[:, None]
    ids = ids.to(rows.positions.device).expand(rows.batch, -1) - first
    begun = rows.positions[((ids == 0) & valid).any(0)].tolist()
    with ends.calls.enter(name, "position_ids"):
        everyone = ends.share(begun)
    starts, stop = sorted(set(chain.from_iterable(everyone))), int(max(lengths or [rows.total]))
    borders = [*starts, stop] if starts[:1] == [0] else [0, *starts, stop]
    expected = document_positions(rows.positions, borders)
    failure = None
    for row, local in (valid & (ids != expected)).nonzero()[:1].tolist():
        failure = ValueError(
            f"position_ids must count up from {first} and restart at {first} where a document "
            f"begins, at the same positions in every row of the batch; in row {row}, position "
            f"{rows.positions[local].item()} of the sequence must have "
            f"{expected[local].item() + first}; got {ids[row, local].item() + first}"
        )
    agree(name, ends, None if failure else {}, failure, rows.positions.device)
    return borders if len(borders) > 2 else None


_NO_RIGHT_PADDING = (
    "attention_mask must be a right padding, 1 at the first positions of each row and 0 behind "
    "them (padding on the left is for calls with a KV cache, as generate makes): {}"
)


def _lengths(
    name: str, padding: Tensor | None, rows: Rows, layout: SequenceLayout | None, ends: Exchange
) -> list[int] | None:
    """Valid positions of each row, the same on every rank; None: all."""
    if padding is None:
        return None
    with ends.calls.enter(name, "attention_mask") as scope:
        found = lengths_of_mask(padding, ends, layout, scope, _NO_RIGHT_PADDING)
    return None if set(found) == {rows.total} else found


# --- heads


_QUERY = ("q_proj", "q_b_proj", "query", "q_lin", "query_key_value")
_KEY = ("k_proj", "kv_b_proj", "key", "k_lin", "query_key_value")
"""What models call the projections whose rows follow the order of the heads."""


def pattern_of_heads(
    module: nn.Module, settings: Settings, query_heads: int, kv_heads: int
) -> DilatedPattern:
    """The model's pattern for the heads that an attention module has on this rank.

    transformers' ``tp_plan`` and torch's ``parallelize_module`` leave each rank a few heads of a
    layer, of which the module's config says how many there are, and its weights, which. Where
    neither `head_slice` nor the weights say it, a ValueError.
    """
    pattern = settings.pattern
    if settings.head_slice is not None:
        return pattern.of_heads(settings.head_slice, kv_heads)
    own = layer = Heads(query_heads, kv_heads)
    config: Any = getattr(module, "config", None)
    if query := getattr(config, "num_attention_heads", None):
        layer = Heads(query, getattr(config, "num_key_value_heads", None) or query)
    if own == layer or (pattern.heads_are_alike and own.is_fraction_of(layer)):
        return pattern
    weights = _weight(module, _QUERY), _weight(module, _KEY)
    # Some models have their number of KV heads elsewhere in the config.
    if own.query == layer.query and not any(hasattr(x, "placements") for x in weights):
        return pattern
    found = slice_of_projections(layer, own, weights, type(module).__name__)
    return pattern.of_heads(found, kv_heads)


def _weight(module: nn.Module, names: tuple[str, ...]) -> Any:
    weights = (getattr(getattr(module, name, None), "weight", None) for name in names)
    return next((weight for weight in weights if weight is not None), None)


# --- losses


_IGNORED = -100  # transformers' label of what is not learnt
_ADVICE = (
    "num_items_in_batch must come from labels_per_rank, the labels of all ranks divided by the "
    "number of ranks, or transformers' Trainer with average_tokens_across_devices=True, its default"
)


def rounded_count(given: dict[str, Any]) -> ValueError | None:
    """An error if ``num_items_in_batch`` has come in half precision; else None."""
    count = given.get("num_items_in_batch")
    if not isinstance(count, Tensor) or count.dtype not in (torch.float16, torch.bfloat16):
        return None
    return ValueError(
        f"num_items_in_batch must be an int, a float, or a tensor of ints, float32 or float64; "
        f"got {count.dtype}, which rounds it. Under fully_shard with a MixedPrecisionPolicy, which "
        "casts floating arguments, pass num_items_in_batch.item(), or set cast_forward_inputs=False"
    )


def agree_on_loss(name: str, settings: Settings, given: dict[str, Any]) -> None:
    """Raise on every rank of several if a loss would be that of a shard, see `check_loss`."""
    ends, failure, cached = resolve_exchange(settings.group), None, is_cached(given)
    if ends.world_size == 1:
        return
    try:
        if not cached:  # with a KV cache every rank has all logits
            check_loss(name, given, ends.world_size)
    except ValueError as error:
        failure = error
    failure = failure or rounded_count(given)
    count = given.get("num_items_in_batch")
    if isinstance(count, Tensor):
        # To read one on a GPU is to wait for it: the first one, which shows how it is counted.
        reads = count.numel() == 1 and (count.device.type == "cpu" or not settings.counted)
        settings.counted.add("num_items_in_batch")
        count = count.item() if reads else "a tensor"
    shared = {"use_cache": cached, "num_items_in_batch": count}
    agree(name, ends, None if failure else shared, failure, device_of(given), _ADVICE)


@dataclass(frozen=True, eq=False)  # no tuple: FSDP would round the divisor in it
class Labels:
    """What the loss of a call needs, which goes with the call to the hook behind the head.

    Attributes:
        labels: of this rank's shard, (batch, local_sequence), -100 where nothing is learnt.
        divisor: ``num_items_in_batch``: what the sum is divided by.
    """

    labels: Tensor
    divisor: Tensor | float

    def loss(self, logits: Tensor) -> Tensor:
        """Of logits (batch, local_sequence, classes): a shard's part of that of all tokens."""
        logits = logits.flatten(0, 1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        labels = self.labels.reshape(-1).to(logits.device)
        total = nn.functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
        by = self.divisor
        return total / (by.to(total.device) if isinstance(by, Tensor) else by)


# --- batches


_SHARDED = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels"),
    *("token_type_ids", "seq_idx"),
)
_WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def shard_batch(
    batch: Mapping[str, Any],
    layout: SequenceLayout,
    group: Group = None,
    *,
    shift_labels: bool = True,
) -> dict[str, Any]:
    """This rank's part of a whole batch, with labels shifted before sharding.

    All ranks of the group make the call with the same batch: they compare a digest of it (see
    `check_same_batch`), in one small collective. Data must therefore be split over data-parallel
    groups only, which the samplers of transformers' Trainer, accelerate and Lightning do not do by
    themselves.

    Args:
        batch: any of ``input_ids``, ``attention_mask``, ``position_ids``, ``token_type_ids``,
            ``seq_idx`` and ``labels``, (batch, n), ``inputs_embeds`` (batch, n, hidden);
            ``cu_seq_lens_q`` and its companions, which stay whole: what transformers' collators
            return. Labels
            are as transformers has them: where the tokens are, -100 where nothing is learnt.
        layout: which positions each rank holds.
        group: the ranks that share each sequence: a ProcessGroup, a 1-D DeviceMesh, or None for
            one process.
        shift_labels: whether a token's label is the next token's, as causal language models learn
            it. False for masked language models and token classification. Default True.

    Returns:
        Arguments for the model: the shards; and where labels are shifted also ``shift_labels``, the
        label of the next position wherever that is held. On several ranks, and with gradient
        accumulation, a loss also needs ``num_items_in_batch``: see `labels_per_rank`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is unknown, or has another length than the layout; or ranks were
            given different batches. On every rank.
        RuntimeError: there are several ranks, and this is a worker process of a DataLoader.
    """
    ends = resolve_exchange(group)
    with comparing("shard_batch", ends) as compared:
        whole = _checked(batch, layout, ends.world_size, shift_labels)
        compared.update(batch, layout=layout.digest[:8], shift_labels=shift_labels)
    shards = {name: batch[name] for name in _WHOLE if name in batch}
    for name, tensor in whole.items():
        shards[name] = layout.shard(tensor, ends.rank, dim=1).contiguous()  # losses view them flat
    return shards


def _checked(
    batch: Mapping[str, Any], layout: SequenceLayout, ranks: int, shift_labels: bool
) -> dict[str, Tensor]:
    """What is sharded, with shifted labels where they are wanted."""
    if not isinstance(shift_labels, bool):
        raise TypeError(f"shift_labels must be a bool, got {in_brief(shift_labels)}")
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout; got {in_brief(layout)}")
    layout.check_ranks(ranks)
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a dict of a model's arguments; got {in_brief(batch)}")
    unknown = sorted(map(str, set(batch) - {*_SHARDED, *_WHOLE}))
    if unknown:
        raise ValueError(
            f"a batch may hold {', '.join((*_SHARDED, *_WHOLE))}; got {', '.join(unknown)}"
        )
    whole = {name: batch[name] for name in _SHARDED if batch.get(name) is not None}
    if isinstance(whole.get("labels"), Tensor) and shift_labels:
        whole["shift_labels"] = nn.functional.pad(whole["labels"], (0, 1), value=_IGNORED)[:, 1:]
    for name, tensor in whole.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
        if tensor.dim() < 2 or tensor.shape[1] != layout.length:
            raise ValueError(
                f"{name} must have the layout's {layout.length} positions in dimension 1; got "
                f"shape {tuple(tensor.shape)}"
            )
    return whole
