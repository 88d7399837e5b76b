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
from ..exchange import Exchange, Group, resolve_exchange, together
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
    PACKING,
    TOLD,
    Positions,
    check_arguments,
    layers_across_documents,
    learns_next,
    rotates_in_dimensions,
)

SETTINGS = "_ring_dilated_attention"  # of a model: its `Settings`


@dataclass(frozen=True)
class Settings:
    """Arguments of `set_attention`, see there; and the positions by which the model numbers."""

    pattern: DilatedPattern
    group: Group = None
    layout: SequenceLayout | None = None
    exchange: Schedule = "auto"
    backend: Backend = "auto"
    head_slice: HeadSlice | None = None
    positions: Positions = ANY_POSITIONS
    counted: set[str] = field(default_factory=set, compare=False)
    """Has ``num_items_in_batch`` once ranks have compared one of a GPU."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        return self  # a copy of the model belongs to the same ranks


@dataclass(frozen=True)
class Call:
    """Arguments of one call of the model for each of its attention modules."""

    settings: Settings
    layout: SequenceLayout | None = None
    documents: list[int] | None = None  # cumulative lengths; None: one document
    lengths: list[int] | None = None  # valid positions of each row of the batch; None: all
    cache: Any = None  # a `DilatedCache`


class Rows(NamedTuple):
    """This rank's part of the input."""

    batch: int
    positions: Tensor  # in the sequence, of each local one: int64, (local_sequence,)
    total: int  # positions of the whole sequence


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``module.forward``, all by name."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def cache_name(module: nn.Module) -> str:
    """The name of the KV cache in a model's forward, one of `CACHE_NAMES`."""
    return CACHE_NAMES[CACHE_NAMES[0] not in inspect.signature(module.forward).parameters]


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


def layout_in_words(layout: SequenceLayout | None) -> str | None:
    """A layout, so that ranks can compare theirs."""
    return None if layout is None else f"{layout!r} ({layout.digest[:8]})"


def prepared(module: nn.Module, settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the decoder (or encoder), made from those of its caller: without a cache.

    `given` get global ``position_ids`` (None where the model makes them itself), a 2-D
    ``attention_mask`` (with one, transformers looks for no documents in a shard),
    ``use_cache=False`` and a `Call`. What is not supported, and ranks that differ, are errors on
    every rank.
    """
    ends, layout = resolve_exchange(settings.group), settings.layout
    name, first = type(module).__name__, settings.positions.first
    mask, ids, head = (given.get(key) for key in ("attention_mask", "position_ids", NAME))
    text_ids, counted = ids, {} if head is None else head.counted(settings.counted)
    if rotates_in_dimensions(module) and isinstance(ids, Tensor) and ends.world_size == 1:
        # M-RoPE: the first of four dimensions is that of the text, three have none of it.
        text_ids = {3: None, 4: ids[0]}.get(len(ids), ids) if ids.dim() == 3 else ids
    with together(name, ends, device_of(given), advice=_ADVICE if counted else "") as agreed:
        if head is not None and head.failure is not None:
            raise head.failure
        check_arguments(module, given, settings.pattern, ends.world_size)
        rows = _rows(given, ends, layout)
        check_ids(text_ids, rows)
        padding = check_padding(mask, rows)
        borders = _given_borders(given, rows)
        _check_positions(name, settings.positions, given, rows, padding)
        agreed.on(
            {
                "use_cache": False,
                "batch": rows.batch,
                "layout": layout_in_words(layout) or f"shards of {len(rows.positions)} positions",
                "attention_mask": "None" if mask is None else "given",
                "position_ids": "None" if ids is None else "given",
                "cu_seq_lens_q": "None" if borders is None else "given",
                **counted,
            }
        )
    lengths, documents = _lengths(name, padding, rows, layout, ends), borders
    if text_ids is not None:
        restarts = _documents(name, text_ids, rows, lengths, ends, first)
        if borders is not None and restarts not in (None, borders):
            raise ValueError(  # alike on every rank
                "cu_seq_lens_q and the restarts of position_ids must be the same borders; got "
                f"{in_words(borders)} and {in_words(restarts or ())}"
            )
        documents = borders or restarts
    elif ends.world_size > 1 or layout not in (None, SequenceLayout.contiguous(rows.total, 1)):
        # A model that has all tokens in order knows best: it may skip padding, wherever that is.
        ids = rows.positions[None] + first if ids is None else ids
    if borders is not None and lengths is not None:
        raise ValueError(
            "cu_seq_lens_q is for batches without padding; got an attention_mask of "
            f"{lengths[0]} valid positions of {rows.total}"
        )
    if mask is None:
        mask = rows.positions.new_ones(rows.batch, len(rows.positions), dtype=torch.bool)
    return {
        **given,
        **_documents_of_layers(module, given, documents, rows),
        "position_ids": ids,
        "attention_mask": mask,
        "use_cache": False,
        NAME: Call(settings, layout, documents, lengths),
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
        positions = torch.arange(length, device=inputs.device) + ends.rank * length
        return Rows(batch, positions, length * ends.world_size)
    held = f"got input of shape {tuple(inputs.shape)} (set_layout sets another layout)"
    layout.check_shard(ends.rank, ends.world_size, length, held)
    return Rows(batch, layout.positions(ends.rank, device=inputs.device), layout.length)


def check_ids(ids: Any, rows: Rows) -> None:
    """Raise a TypeError or ValueError unless position ids have the rows' shape, or are None."""
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
        got = ids.dtype if isinstance(ids, Tensor) else repr(ids)
        raise TypeError(f"position_ids must be a tensor of int32 or int64; got {got}")
    length = len(rows.positions)
    if tuple(ids.shape) not in ((1, length), (rows.batch, length)):
        raise ValueError(
            f"position_ids must have shape (batch, local_sequence), {(rows.batch, length)}, or "
            f"{(1, length)}; got {tuple(ids.shape)} (positions in several dimensions are supported "
            "for models with M-RoPE, on one process without a KV cache: use_cache=False)"
        )


def check_padding(mask: Any, rows: Rows) -> Tensor | None:
    """The mask of the rows, checked, True where a position is padding; None without a mask."""
    if mask is None:
        return None
    shape = rows.batch, len(rows.positions)
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor {shape}; got {type(mask).__name__}")
    if mask.shape != shape:
        raise ValueError(
            f"attention_mask must have shape (batch, local_sequence), {shape}, 1 where a position "
            f"is valid; other masks have no dilated attention. Got shape {tuple(mask.shape)}"
        )
    other = mask[(mask != 0) & (mask != 1)] if mask.dtype != torch.bool else mask[:0]
    # An additive mask is 0 where a position is valid; peft's prompt tuning makes floats of a mask.
    additive = mask.is_floating_point() and not bool((mask[:, :1] == 1).all())
    if other.numel() or additive:
        got = other.flatten()[0].item() if other.numel() else f"{mask.dtype} that begin with 0"
        raise ValueError(
            "attention_mask must hold 0 and 1 only, 1 where a position is valid (documents are "
            f"told by position_ids that restart at 0); got {got}"
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
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be equal")
    if rows.batch != 1:
        raise ValueError(f"cu_seq_lens_q needs a batch of 1 row; got {rows.batch}")
    try:
        return list(document_borders(borders, None, rows.total))
    except ValueError as error:
        raise ValueError(
            f"cu_seq_lens_q must be borders in the whole sequence, the same on every rank: {error}"
        ) from None


def _documents_of_layers(
    module: nn.Module, given: dict[str, Any], documents: list[int] | None, rows: Rows
) -> dict[str, Any]:
    """Arguments that tell linear attention and convolutions the documents: on one process.

    A ValueError where such layers would let documents run into each other.
    """
    layers = layers_across_documents(module)
    if not layers or documents is None or len(documents) < 3:
        return {}
    device, stop = rows.positions.device, documents[-1]
    if rows.batch == 1 and all(layer.endswith(TOLD) for layer in layers):
        # Padding behind the documents is one more.
        borders = torch.tensor([*documents, *[rows.total] * (stop < rows.total)], device=device)
        index = torch.bucketize(rows.positions[None], borders[1:], right=True, out_int32=True)
        known = {"cu_seq_lens_q": borders.int(), "cu_seq_lens_k": borders.int(), "seq_idx": index}
        return {name: x for name, x in known.items() if given.get(name) is None}
    if given.get("seq_idx") is None or "linear_attention" in layers:
        raise ValueError(
            f"{', '.join(layers)} of {type(module).__name__} would not keep these documents apart: "
            "give each document a batch or a row of its own, padded on the right (a layer of "
            "transformers that takes seq_idx can be given that)"
        )
    return {}


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
        starts = {0, *chain.from_iterable(ends.share(begun))}
    borders = [*sorted(starts), int(max(lengths or [rows.total]))]
    expected = document_positions(rows.positions, borders)
    with together(name, ends, rows.positions.device):
        for row, local in (valid & (ids != expected)).nonzero()[:1].tolist():
            raise ValueError(
                f"position_ids must count up from {first} and restart at {first} where a document "
                f"begins, at the same positions in every row of the batch (rows packed otherwise: "
                f"join them to one row, or call with each); in row {row}, position "
                f"{rows.positions[local].item()} of the sequence must have "
                f"{expected[local].item() + first}; got {ids[row, local].item() + first}"
            )
    return borders if len(borders) > 2 else None


_NO_RIGHT_PADDING = (
    "attention_mask must be a right padding, 1 at the first positions of each row and 0 behind "
    "them (padding on the left is for calls with a KV cache, as generate makes; to train on "
    "prompts padded there, as of GRPO, move each row's padding behind its text): {}"
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


# --- heads of attention

_QUERY = ("q_proj", "q_b_proj", "query", "q_lin", "query_key_value")
_KEY = ("k_proj", "kv_b_proj", "key", "k_lin", "query_key_value")
"""Names in models of the projections whose rows follow the order of the heads."""


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
    projections = ([getattr(module, name, None) for name in names] for names in (_QUERY, _KEY))
    query_weight, key_weight = (
        next((w for x in found if (w := getattr(x, "weight", None)) is not None), None)
        for found in projections
    )
    # Some models have their number of KV heads elsewhere in the config.
    are_whole = not any(hasattr(x, "placements") for x in (query_weight, key_weight))
    if own.query == layer.query and are_whole:
        return pattern
    found = slice_of_projections(layer, own, (query_weight, key_weight), type(module).__name__)
    return pattern.of_heads(found, kv_heads)


# --- losses


_IGNORED = -100  # transformers' label of what is not learnt
_ADVICE = (
    "num_items_in_batch must come from labels_per_rank, the labels of all ranks divided by the "
    "number of ranks, or transformers' Trainer with average_tokens_across_devices=True, its default"
)


@dataclass(frozen=True, eq=False)  # no tuple: FSDP would round the divisor in it
class Head:
    """A head's part of a call, for the model under it, which agrees on it with other ranks."""

    columns: int = 0  # at the end, whose hidden states the head needs; 0: all of them
    failure: ValueError | None = None  # why the loss of this call is refused
    divisor: Tensor | float | None = None  # of the sum of the losses: ``num_items_in_batch``
    labels: Tensor | None = None  # of the shard, where the loss is computed behind the head

    @classmethod
    def of(cls, model: nn.Module, given: dict[str, Any], ranks: int) -> Head:
        """The head of a call with these arguments."""
        kept, divisor, labels = (
            given.get(x) for x in ("logits_to_keep", "num_items_in_batch", "labels")
        )
        why = _loss_of_shard(model, given, ranks)
        return cls(
            # A negative number, or a tensor, may name any column.
            columns=kept if is_cached(given) and isinstance(kept, int) and kept > 0 else 0,
            failure=ValueError(why) if why else None,
            divisor=divisor,
            labels=None if ranks == 1 or is_cached(given) or learns_next(model) else labels,
        )

    def counted(self, before: set[str]) -> dict[str, Any]:
        """The divisor, to compare it with other ranks; empty where there is none.

        On a GPU its number is compared in the first call alone: to read it waits for the device.
        """
        count, name = self.divisor, "num_items_in_batch"
        if count is None:
            return {}
        if not isinstance(count, Tensor):
            return {name: count}
        if count.numel() > 1 or (count.is_cuda and name in before):
            return {name: "a tensor"}
        before.add(name)
        return {name: count.item()}

    def loss(self, logits: Tensor) -> Tensor:
        """Of logits (batch, local_sequence, classes): a shard's part of that of all tokens."""
        assert self.labels is not None
        assert self.divisor is not None
        logits = logits.flatten(0, 1)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        labels = self.labels.reshape(-1).to(logits.device)
        total = nn.functional.cross_entropy(logits, labels, ignore_index=_IGNORED, reduction="sum")
        by = self.divisor
        return total / (by.to(total.device) if isinstance(by, Tensor) else by)


def _loss_of_shard(model: nn.Module, given: dict[str, Any], ranks: int) -> str:
    """Why the loss of a call, or its choice of logits, would be wrong; "" where it is right."""
    count, kept = given.get("num_items_in_batch"), given.get("logits_to_keep")
    if isinstance(count, Tensor) and count.dtype in (torch.float16, torch.bfloat16):
        return (
            "num_items_in_batch must be an int, a float, or a tensor of ints, float32 or float64; "
            f"got {count.dtype}, which rounds it. Under fully_shard with a MixedPrecisionPolicy, "
            "which casts floating arguments, pass num_items_in_batch.item(), or set "
            "cast_forward_inputs=False"
        )
    if ranks == 1 or is_cached(given):  # with a KV cache every rank has all logits
        return ""
    labels, shifted = (given.get(x) is not None for x in ("labels", "shift_labels"))
    name, shifts = type(model).__name__, learns_next(model)
    why = ""
    if given.get("fused_lm_head"):
        why = "trl computes the loss itself, of a shard (fused_lm_head): use transformers' Trainer"
    elif labels and shifts and not shifted:
        why = (
            "labels need shift_labels: a shard's last label is on another rank; shard_batch gives "
            "it. Got shift_labels=None"
        )
    elif labels and count is None:
        why = (
            "labels need num_items_in_batch: what labels_per_rank returns, the labels of all ranks "
            "over the number of ranks. Got num_items_in_batch=None"
        )
    elif labels and shifted and not shifts:
        why = (
            f"the labels of {name} are those of the tokens themselves: make the batch with "
            "shard_batch(..., shift_labels=False); got shift_labels"
        )
    elif labels and not shifts and given.get("return_dict") is False:
        why = f"the loss of {name} needs return_dict=True; got False"
    elif shifted and not labels:
        why = (
            "shift_labels need labels; got labels=None. The Trainer takes them out for "
            "label_smoothing_factor and compute_loss_func, which shift the labels of a shard: "
            "compute such a loss from the logits and shift_labels, without giving them the model"
        )
    elif isinstance(kept, Tensor) or kept:
        why = (
            "logits_to_keep must be 0, since it counts the rows of a shard unless there is a KV "
            f"cache: generate, which passes it, needs use_cache=True on ranks; got {kept!r}"
        )
    return f"on {ranks} ranks {why}" if why else ""


def part_on_ranks(model: nn.Module) -> int:
    """Number of ranks of a part of a model that has settings, where the model itself has none."""
    if SETTINGS in vars(model):
        return 1  # its `Head` checks the loss
    found = next((x for module in model.modules() if (x := vars(module).get(SETTINGS))), None)
    return 1 if found is None else resolve_exchange(found.group).world_size


# --- batches


_SHARDED = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels"),
    *("token_type_ids", "seq_idx"),
)


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
            return. Labels are as transformers has them: where the tokens are, -100 where nothing
            is learnt.
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
    ends, whole = resolve_exchange(group), {}
    with comparing("shard_batch", ends) as compared:
        for name, given, wanted in (
            ("shift_labels", shift_labels, bool),
            ("layout", layout, SequenceLayout),
            ("batch", batch, Mapping),
        ):
            if not isinstance(given, wanted):
                raise TypeError(f"{name} must be a {wanted.__name__}; got {in_brief(given)}")
        layout.check_ranks(ends.world_size)
        if unknown := sorted(map(str, set(batch) - {*_SHARDED, *PACKING})):
            raise ValueError(
                f"a batch may hold {', '.join((*_SHARDED, *PACKING))}; got {', '.join(unknown)}"
            )
        for name in _SHARDED:
            tensor = batch.get(name)
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
            if tensor.dim() < 2 or tensor.shape[1] != layout.length:
                raise ValueError(
                    f"{name} must have the layout's {layout.length} positions in dimension 1; got "
                    f"shape {tuple(tensor.shape)}"
                )
            whole[name] = tensor
        compared.update(batch, layout=layout.digest[:8], shift_labels=shift_labels)
    if shift_labels and "labels" in whole:
        whole["shift_labels"] = nn.functional.pad(whole["labels"], (0, 1), value=_IGNORED)[:, 1:]
    shards = {name: batch[name] for name in PACKING if name in batch}
    for name, tensor in whole.items():
        shards[name] = layout.shard(tensor, ends.rank, dim=1).contiguous()  # losses view them flat
    return shards
