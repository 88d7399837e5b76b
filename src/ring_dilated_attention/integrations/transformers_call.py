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

from ..documents import as_ints, document_borders
from ..exchange import Exchange, Group, resolve_exchange, together
from ..layout import SequenceLayout
from ..nn import document_positions
from ..nn.heads import Heads, slice_of_projections
from ..options import AttentionOptions
from ..parallel import comparing
from ..pattern import DilatedPattern, Length, check_head_slice, in_brief
from ..torch_op import lengths_of_mask
from .transformers_support import (
    CACHE_NAMES,
    HYBRIDS,
    NAME,
    PACKED_HYBRIDS,
    PACKING,
    WITH_TABLES,
    Layers,
    check_arguments,
    kind_of,
)

SETTINGS = "_ring_dilated_attention"  # of a model: its `Settings`


@dataclass(frozen=True)
class Settings:
    """Arguments of `set_attention`, see there."""

    pattern: DilatedPattern
    options: AttentionOptions
    layers: Layers = "full"
    compared: set[str] = field(default_factory=set, compare=False)
    """Holds ``num_items_in_batch`` once ranks have compared one of a GPU."""

    refusals: list[str] = field(default_factory=list, compare=False)  # by the head, in this call

    @property
    def told(self) -> tuple[DilatedPattern, Layers]:
        """What the model's config holds."""
        return self.pattern, self.layers

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return resolve_exchange(self.options.group).world_size

    def raise_refusal(self) -> None:
        """Raise a ValueError where the head has refused the call."""
        if self.refusals:
            raise ValueError(self.refusals.pop())

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
    source: Tensor | None = None  # (1 or batch, m): the columns that it computes; None: all
    columns: int = 0  # with a cache: tokens of each row, padding included
    after: tuple[int, ...] = ()  # with a cache: valid positions of each row after the call


class Mask(NamedTuple):
    """What transformers' own attention would show a layer's queries."""

    is_causal: bool
    length: Length = None  # of its window or chunks, which segments are too; None: all positions

    def __str__(self) -> str:
        name = "causal" if self.is_causal else "bidirectional"
        return name if self.length is None else f"{name} {self.length}"


class Rows(NamedTuple):
    """This rank's part of the input."""

    batch: int
    positions: Tensor  # in the sequence, of each local one: int64, (local_sequence,)
    total: int  # positions of the whole sequence


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``module.forward``, all by name."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs}


def cache_of(given: dict[str, Any]) -> Any:
    """The KV cache among the arguments of a call; None where there is none."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


def is_cached(given: dict[str, Any]) -> bool:
    """Whether a call asks for a KV cache: by its arguments, whatever the model's config says."""
    return bool(given.get("use_cache")) or cache_of(given) is not None


def inputs_of(given: dict[str, Any]) -> Tensor:
    """Ids (batch, columns), or embeddings (batch, columns, hidden); a ValueError without any."""
    inputs = given.get("input_ids")
    inputs = given.get("inputs_embeds") if inputs is None else inputs
    if not isinstance(inputs, Tensor) or inputs.dim() < 2 or not inputs.shape[1]:
        got = tuple(inputs.shape) if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(
            "the model needs input_ids (batch, local_sequence), or inputs_embeds "
            "(batch, local_sequence, hidden), of a position at least: transformers' models take no "
            f"empty shards; got {got}"
        )
    return inputs


_NO_RIGHT_PADDING = (
    "attention_mask must be a right padding, 1 at the first positions of each row and 0 behind "
    "them (padding on the left is for calls with a KV cache, as generate makes; to train on "
    "prompts padded there, as of GRPO, move each row's padding behind its text): {}"
)


def prepared(module: nn.Module, settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments for the decoder (or encoder), made from those of its caller: without a cache.

    `given` get global ``position_ids`` (None where the model makes them itself), a 2-D
    ``attention_mask`` (with one, transformers looks for no documents in a shard),
    ``use_cache=False`` and a `Call`. What is not supported, and ranks that differ, are errors on
    every rank.
    """
    ends, layout = resolve_exchange(settings.options.group), settings.options.layout
    name = type(module).__name__
    mask, ids = given.get("attention_mask"), given.get("position_ids")
    inputs = [x for x in map(given.get, ("input_ids", "inputs_embeds")) if isinstance(x, Tensor)]
    with together(name, ends, inputs[0].device if inputs else torch.device("cpu")) as agreed:
        settings.raise_refusal()
        check_arguments(module, given, settings.told, ends.world_size, is_cached=False)
        rows = _rows(given, ends, layout)
        text_ids, rope = ids, getattr(module.config, "rope_parameters", None) or {}
        if "mrope_section" in rope and isinstance(ids, Tensor) and ids.dim() == 3:
            # The first of four dimensions is that of the text, three have none of it.
            text_ids = {3: None, 4: ids[0]}.get(len(ids), ids)
        check_ids(text_ids, rows)
        check_table(module, rows.total, ids)
        padding = check_padding(mask, rows)
        documents = _given_borders(given, rows)
        if given.get("seq_idx") is not None and ids is None and documents is None:
            raise ValueError(
                "seq_idx names documents for layers other than attention: pass position_ids that "
                "restart too, or cu_seq_lens_q; DataCollatorWithFlattening returns both"
            )
        names = ("attention_mask", "position_ids", "cu_seq_lens_q")
        shared = {x: "None" if given.get(x) is None else "given" for x in names}
        shared["layout"] = f"shards of {len(rows.positions)} positions"
        if layout is not None:
            shared["layout"] = f"{layout!r} ({layout.digest[:8]})"
        agreed.on({"use_cache": False, "batch": rows.batch, **shared})
    lengths = None
    if padding is not None:
        with ends.calls.enter(name, "attention_mask") as scope:
            lengths = lengths_of_mask(padding, ends, layout, scope, _NO_RIGHT_PADDING)
        lengths = None if set(lengths) == {rows.total} else lengths
    if documents is not None and lengths is not None:
        raise ValueError(  # alike on every rank
            "cu_seq_lens_q is for batches without padding; got an attention_mask of "
            f"{lengths[0]} valid positions of {rows.total}"
        )
    if text_ids is not None:
        documents = _restarts(name, text_ids, rows, lengths, documents, ends)
    _check_layers(module, given, documents)
    source = None
    if ends.world_size > 1 or layout not in (None, SequenceLayout.contiguous(rows.total, 1)):
        source = rows.positions[None]
    if ids is None and source is not None:
        # A model that has all tokens in order knows best: it may skip padding, wherever that is.
        ids = source
    if mask is None:
        mask = rows.positions.new_ones(rows.batch, len(rows.positions), dtype=torch.bool)
    return {
        **given,
        "position_ids": ids,
        "attention_mask": mask,
        "use_cache": False,
        NAME: Call(settings, layout, documents, lengths, source=source),
    }


def _rows(given: dict[str, Any], ends: Exchange, layout: SequenceLayout | None) -> Rows:
    inputs = inputs_of(given)
    batch, length = inputs.shape[:2]
    if layout is None:
        positions = torch.arange(length, device=inputs.device) + ends.rank * length
        return Rows(batch, positions, length * ends.world_size)
    held = f"got input of shape {tuple(inputs.shape)} (set_layout sets another layout)"
    layout.check_shard(ends.rank, ends.world_size, length, held)
    return Rows(batch, layout.positions(ends.rank, device=inputs.device), layout.length)


def check_ids(ids: Any, rows: Rows) -> None:
    """Raise a ValueError unless position ids have the rows' shape, or are None."""
    whole = rows.batch, len(rows.positions)
    if ids is None:
        return
    is_tensor = isinstance(ids, Tensor) and ids.dtype in (torch.int32, torch.int64)
    if not is_tensor or tuple(ids.shape) not in ((1, whole[1]), whole):
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else in_brief(ids)
        raise ValueError(
            "position_ids must be int32 or int64 of shape (batch, local_sequence), "
            f"{whole} or {(1, whole[1])}; got {got} (positions in several dimensions are supported "
            "for models with M-RoPE, on one process without a KV cache: use_cache=False)"
        )


def check_table(module: nn.Module, total: int, ids: Tensor | None = None) -> None:
    """Raise a ValueError where positions (`ids`, or `total` ones) are not in the model's table."""
    if kind_of(module) in WITH_TABLES:
        most: Any = getattr(module.config, "max_position_embeddings", 0)
        if (needed := total if ids is None else int(ids.max()) + 1) > most:
            raise ValueError(
                f"{type(module).__name__} has embeddings of {most} positions "
                f"(config.max_position_embeddings); the sequence needs {needed}"
            )


def check_padding(mask: Any, rows: Rows) -> Tensor | None:
    """The mask of the rows, checked, True where a position is padding; None without a mask."""
    if mask is None:
        return None
    shape = rows.batch, len(rows.positions)
    if not isinstance(mask, Tensor) or mask.shape != shape:
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be a tensor (batch, local_sequence), {shape}, 1 where a position "
            f"is valid; other masks have no dilated attention. Got {got}"
        )
    wrong = mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any())
    if mask.is_floating_point():  # an additive one is 0 where a position is valid
        wrong = wrong or not bool((mask[:, :1] == 1).all())
    if wrong:
        raise ValueError(
            "attention_mask must hold 0 and 1 only, 1 where a position is valid (documents are "
            f"told by position_ids that restart at 0); got {mask.dtype} up to {mask.max().item()}"
        )
    return mask.to(rows.positions.device) == 0


def _given_borders(given: dict[str, Any], rows: Rows) -> list[int] | None:
    """The documents that the keyword arguments of flash attention name."""
    each = [given.get(name) for name in PACKING[:2]]
    if each == [None, None]:
        return None
    borders, others = (None if x is None else as_ints("cu_seq_lens_q", x) for x in each)
    if borders is None or borders != others or rows.batch != 1:
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k must both be given, and equal, for a batch of 1 row; "
            f"got a batch of {rows.batch}"
        )
    return list(document_borders(borders, None, rows.total))


def _check_layers(module: nn.Module, given: dict[str, Any], documents: list[int] | None) -> None:
    """Raise a ValueError where layers other than attention would run over documents' borders."""
    if documents is None or len(documents) < 3 or (kind := kind_of(module)) not in HYBRIDS:
        return
    needed = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
    if kind not in PACKED_HYBRIDS or any(given.get(name) is None for name in needed):
        raise ValueError(
            f"layers of {type(module).__name__} other than attention would not keep documents "
            "apart: give each document a batch or a row of its own, padded on the right "
            f"({', '.join(sorted(PACKED_HYBRIDS))} take {', '.join(needed)})"
        )


def _restarts(
    name: str,
    ids: Tensor,
    rows: Rows,
    lengths: list[int] | None,
    given: list[int] | None,
    ends: Exchange,
) -> list[int] | None:
    """The documents that begin where position ids are 0, the same on every rank; or those given."""
    stops = torch.tensor(lengths or [rows.total] * rows.batch, device=rows.positions.device)
    valid = rows.positions < stops[:, None]
    ids = ids.to(rows.positions.device).expand(rows.batch, -1)
    begun = rows.positions[((ids == 0) & valid).any(0)].tolist()
    with ends.calls.enter(name, "position_ids"):
        starts = {0, *chain.from_iterable(ends.share(begun))}
    borders = [*sorted(starts), int(max(lengths or [rows.total]))]
    expected = document_positions(rows.positions, borders)
    with together(name, ends, rows.positions.device):
        for row, local in (valid & (ids != expected)).nonzero()[:1].tolist():
            raise ValueError(
                "position_ids must count up from 0 and restart at 0 where a document begins, at "
                "the same positions in every row of the batch (rows packed otherwise: join them to "
                f"one row, or call with each); in row {row}, position "
                f"{rows.positions[local].item()} of the sequence must have "
                f"{expected[local].item()}; got {ids[row, local].item()}"
            )
        if given is not None and len(borders) > 2 and given != borders:
            raise ValueError(
                "cu_seq_lens_q and the restarts of position_ids must be the same borders; got "
                f"{min({*given} ^ {*borders})} in one of them alone"
            )
    return borders if given is None and len(borders) > 2 else given


def borders_of(batch: Mapping[str, Any]) -> list[int]:
    """Cumulative lengths of the documents of a whole batch, unchecked."""
    whole = inputs_of(dict(batch)).shape[1]
    ids, mask = batch.get("position_ids"), batch.get("attention_mask")
    starts: set[int] = set()
    if batch.get("cu_seq_lens_q") is not None:
        starts.update(as_ints("cu_seq_lens_q", batch["cu_seq_lens_q"]))
    elif isinstance(ids, Tensor) and ids.dim() == 2:
        begun = ids == 0 if mask is None else (ids == 0) & (mask != 0)
        starts.update(begun.any(0).nonzero().flatten().tolist())
    return [0, *sorted(x for x in starts if 0 < x < whole), whole]


# --- the pattern of a layer

_QUERY = ("q_proj", "q_b_proj", "query_key_value")
_KEY = ("k_proj", "kv_b_proj", "query_key_value")
"""Names in models of the projections whose rows follow the order of the heads."""


def pattern_of_layer(
    module: nn.Module, settings: Settings, own_length: Length, query_heads: int, kv_heads: int
) -> DilatedPattern:
    """The pattern of an attention module, for the heads that it has on this rank.

    `own_length` is that of the window or chunks which transformers gives the layer; None: none.

    transformers' ``tp_plan`` and torch's ``parallelize_module`` leave each rank a few heads of a
    layer, of which the module's config says how many there are, and its weights, which. Where
    neither `head_slice` nor the weights say it, a ValueError.
    """
    pattern = settings.pattern
    if own_length is not None and settings.layers == "full":
        pattern = DilatedPattern([own_length], [1])
    if settings.options.head_slice is not None:
        return pattern.of_heads(check_head_slice(settings.options.head_slice), kv_heads)
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


def retuned(module: Any, query: Tensor, columns: Tensor | None) -> Tensor:
    """Queries (batch, m, heads, head_dim) of Llama 4, scaled for columns (1 or batch, m).

    Its layers without rotations scale queries as if they were the first m columns of the input.
    """
    if columns is None or not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def scales(column: Tensor) -> Tensor:
        blocks = torch.floor((column.float() + 1) / module.floor_scale)
        return 1 + torch.log1p(blocks) * float(module.attn_scale)

    ratio = scales(columns) / scales(torch.arange(query.shape[1], device=query.device))
    return query * ratio[..., None, None].to(query.dtype)


def _weight(module: nn.Module, names: tuple[str, ...]) -> Any:
    found = (getattr(getattr(module, name, None), "weight", None) for name in names)
    return next((weight for weight in found if weight is not None), None)


# --- losses


_ADVICE = (
    "num_items_in_batch must come from labels_per_rank, or from transformers' Trainer with "
    "average_tokens_across_devices=True, its default"
)


def _missing_for_loss(given: dict[str, Any]) -> str:
    for name in ("shift_labels", "num_items_in_batch"):
        if given.get(name) is None:
            return f"labels need {name}: see shard_batch and labels_per_rank; got {name}=None"
    return ""


def check_head(given: dict[str, Any], ranks: int) -> str:
    """Why arguments of a model with a head would be wrong on a shard; "" where they are right.

    The labels too, which some forwards, as Liger's, do not hand to ``model.loss_function``.
    """
    cache, kept = cache_of(given), given.get("logits_to_keep", 0)
    is_prompt = is_cached(given) and (cache is None or not cache.get_seq_length())
    why = ""
    if given.get("fused_lm_head"):
        why = "trl computes the loss itself, of a shard (fused_lm_head): use transformers' Trainer"
    elif given.get("shift_labels") is not None and given.get("labels") is None:
        why = (
            "shift_labels need labels; got labels=None. With label_smoothing_factor or "
            "compute_loss_func, which shift the labels of a shard, the Trainer takes them out: "
            "compute such a loss yourself, and do not pass the model shift_labels"
        )
    elif (is_prompt or not is_cached(given)) and (isinstance(kept, Tensor) or kept != is_prompt):
        why = (
            "logits_to_keep must be 1 for a prompt with a KV cache, which has the logits of its "
            "last token alone, and else 0, as it would count the rows of a shard: generate, which "
            f"passes 1, needs use_cache=True; got {in_brief(kept)}"
        )
    elif given.get("labels") is not None and not is_cached(given):
        why = _missing_for_loss(given)
    return why and f"on {ranks} ranks {why}"


def check_loss(model: Any, settings: Settings, logits: Tensor, given: dict[str, Any]) -> None:
    """Raise a ValueError on every rank where the mean over ranks would not be that of one process.

    `given` are the keyword arguments of the loss function.
    """
    count, ends = given.get("num_items_in_batch"), resolve_exchange(settings.options.group)
    ranks, why = ends.world_size, ""
    if isinstance(count, Tensor) and count.dtype in (torch.float16, torch.bfloat16):
        why = (
            "num_items_in_batch must be an int, a float, or a tensor of ints, float32 or float64; "
            f"got {count.dtype}, which rounds it: under fully_shard with a MixedPrecisionPolicy, "
            "which casts arguments, pass num_items_in_batch.item()"
        )
    elif ranks > 1 and (missing := _missing_for_loss(given)):
        why = f"on {ranks} ranks {missing}"
    elif ranks > 1 and (found := _unlike_tokens(model)):
        why = f"on {ranks} ranks every token must be treated alone; got {found}"
    if not why and (ranks == 1 or (settings.compared and logits.is_cuda)):
        return
    # A rank that fails tells the others always, which find it in their next call of the group.
    with together("the loss", ends, logits.device, advice=_ADVICE) as agreed:
        if why:
            raise ValueError(why)
        # To read a number of a GPU waits for the device: in the first call alone.
        number = count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
        agreed.on({"num_items_in_batch": number})
    settings.compared.add("num_items_in_batch")


def _unlike_tokens(model: Any) -> str:
    """Noise and adapters that a shard would change; they may come behind `set_attention`."""
    alpha = getattr(model.get_input_embeddings(), "neftune_noise_alpha", None)
    if model.training and alpha:
        return f"neftune_noise_alpha {alpha!r}, noise whose size goes by the length of a shard"
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "alora_invocation_tokens", None):
            return f"adapter {name!r} with alora_invocation_tokens, which are on one rank"
    return ""


# --- batches


_SHARDED = (
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels"),
    *("token_type_ids", "seq_idx"),
)


def shard_batch(
    batch: Mapping[str, Any], layout: SequenceLayout, group: Group = None
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

    Returns:
        Arguments for the model: the shards; and with labels also ``shift_labels``, the label of the
        next position wherever that is held. On several ranks, and with gradient accumulation, a
        loss also needs ``num_items_in_batch``: see `labels_per_rank`.

    Raises:
        ValueError: an entry is unknown, no tensor, or has another length than the layout; or ranks
            were given different batches. On every rank.
        RuntimeError: there are several ranks, and this is a worker process of a DataLoader.
    """
    ends = resolve_exchange(group)
    whole = {name: batch[name] for name in _SHARDED if batch.get(name) is not None}
    with comparing("shard_batch", ends) as compared:
        layout.check_ranks(ends.world_size)
        if unknown := sorted(map(str, set(batch) - {*_SHARDED, *PACKING})):
            raise ValueError(
                f"a batch may hold {', '.join((*_SHARDED, *PACKING))}; got {', '.join(unknown)}"
            )
        for name, x in whole.items():
            if not isinstance(x, Tensor) or x.shape[1:2] != (layout.length,):
                got = tuple(x.shape) if isinstance(x, Tensor) else in_brief(x)
                raise ValueError(
                    f"{name} must be a tensor with the layout's {layout.length} positions in "
                    f"dimension 1; got {got}"
                )
        compared.update(batch, layout=layout.digest[:8])
    if "labels" in whole:
        whole["shift_labels"] = nn.functional.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
    shards = {name: batch[name] for name in PACKING if name in batch}
    for name, tensor in whole.items():
        shards[name] = layout.shard(tensor, ends.rank, dim=1).contiguous()  # losses view them flat
    return shards
