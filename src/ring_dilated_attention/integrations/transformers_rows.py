"""A rank's part of a batch, and the rows of a call: positions, padding and documents, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..documents import as_ints, document_borders
from ..exchange import Exchange, Group, agree, resolve_exchange
from ..layout import SequenceLayout
from ..nn import document_positions
from ..parallel import agree_on_batch
from ..pattern import in_brief
from .transformers_models import Positions, rotates_in_dimensions


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


def has_all_in_order(ends: Exchange, layout: SequenceLayout | None) -> bool:
    """Whether this process has the whole sequence in its order: a model can number it by itself."""
    if ends.world_size > 1:
        return False
    return layout is None or layout == SequenceLayout.contiguous(layout.length, 1)


def ids_of_text(module: Any, position_ids: Any, ends: Exchange) -> Any:
    """Position ids that tell documents: those given, or of several dimensions those of the text.

    Args:
        module: the model without its head.
        position_ids: as the model takes them: (batch, local_sequence); on one process, for a model
            of rotations in several dimensions (M-RoPE), also (3, batch, local_sequence), or
            (4, batch, local_sequence), whose first are those of the text.
        ends: this rank's end of the group.

    Returns:
        Position ids (batch, local_sequence) where they are 2-D; None: there are none.
    """
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 3 or ends.world_size > 1:
        return position_ids
    if not rotates_in_dimensions(module) or len(position_ids) not in (3, 4):
        return position_ids
    return position_ids[0] if len(position_ids) == 4 else None


def check_ids(position_ids: Any, rows: Rows) -> None:
    """Raise a TypeError or ValueError unless position ids have the rows' shape, or are None."""
    if position_ids is None:
        return
    if not isinstance(position_ids, Tensor) or position_ids.dtype not in (torch.int32, torch.int64):
        got = position_ids.dtype if isinstance(position_ids, Tensor) else repr(position_ids)
        raise TypeError(f"position_ids must be a tensor of int32 or int64; got {got}")
    length = len(rows.positions)
    in_dimensions = (
        " (positions in several dimensions are supported for models with M-RoPE, on one process "
        "without a KV cache: use_cache=False)"
        if position_ids.dim() == 3
        else ""
    )
    if tuple(position_ids.shape) not in ((1, length), (rows.batch, length)):
        raise ValueError(
            f"position_ids must have shape (batch, local_sequence), {(rows.batch, length)}, or "
            f"{(1, length)}; got {tuple(position_ids.shape)}{in_dimensions}"
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


def check_positions(
    name: str, positions: Positions, given: dict[str, Any], rows: Rows, padding: Tensor | None
) -> None:
    """Raise a ValueError unless the model can number the tokens.

    Args:
        name: of the model's class, for messages.
        positions: which ones the model numbers.
        given: arguments of its forward, by name.
        rows: this rank's part of the input.
        padding: True where a position is padding; None: nowhere.
    """
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
        skipped = skipped if padding is None else skipped & ~padding
        if bool(skipped.any()):
            raise ValueError(
                f"{name} skips token {first - 1} when it numbers positions, which a shard cannot "
                "count: pass an attention_mask that is 0 there, or position_ids"
            )
    if given.get("seq_idx") is not None and ids is None and given.get("cu_seq_lens_q") is None:
        raise ValueError(
            "seq_idx names documents for layers other than attention: pass position_ids that "
            "restart too, or cu_seq_lens_q; DataCollatorWithFlattening returns both"
        )


def given_borders(given: dict[str, Any], rows: Rows) -> list[int] | None:
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


def documents_of(
    name: str,
    position_ids: Tensor,
    rows: Rows,
    lengths: list[int] | None,
    ends: Exchange,
    first: int = 0,
) -> list[int] | None:
    """The documents that restarts of the position ids begin: the same on every rank.

    Args:
        name: of the model's class.
        position_ids: of the local positions, (batch or 1, local_sequence).
        rows: this rank's part of the input.
        lengths: valid positions of each row; None: all.
        ends: this rank's end of the group.
        first: the position id of a document's first token.

    Raises:
        ValueError: ids do not count up, or not alike in all rows.
    """
    stops = torch.tensor(lengths or [rows.total] * rows.batch, device=rows.positions.device)
    valid = rows.positions < stops[:, None]
    ids = position_ids.to(rows.positions.device).expand(rows.batch, -1) - first
    begun = rows.positions[((ids == 0) & valid).any(0)].tolist()
    with ends.calls.enter(name, "position_ids"):
        everyone: Iterable[list[int]] = ends.share(begun)
    starts, stop = sorted(set(chain.from_iterable(everyone))), int(max(lengths or [rows.total]))
    borders = [*starts, stop] if starts[:1] == [0] else [0, *starts, stop]
    expected = document_positions(rows.positions, borders)
    wrong = (valid & (ids != expected)).nonzero().tolist()
    failure = None
    if wrong:
        row, local = wrong[0]
        failure = ValueError(
            f"position_ids must count up from {first} and restart at {first} where a document "
            f"begins, at the same positions in every row of the batch; in row {row}, position "
            f"{rows.positions[local].item()} of the sequence must have "
            f"{expected[local].item() + first}; got {ids[row, local].item() + first}"
        )
    agree(name, ends, None if failure else {}, failure, rows.positions.device)
    return borders if len(borders) > 2 else None


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
    whole, failure = {}, None
    try:
        whole = _checked(batch, layout, ends.world_size, shift_labels)
    except Exception as error:  # whatever it is, the other ranks are to be told
        failure = error
    compared: dict[str, Any] = {}
    if failure is None:
        compared = {**batch, "layout": layout.digest[:8], "shift_labels": shift_labels}
    agree_on_batch("shard_batch", compared, ends, failure)
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
        whole["shift_labels"] = nn.functional.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
    for name, tensor in whole.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {in_brief(tensor)}")
        if tensor.dim() < 2 or tensor.shape[1] != layout.length:
            raise ValueError(
                f"{name} must have the layout's {layout.length} positions in dimension 1; got "
                f"shape {tuple(tensor.shape)}"
            )
    return whole
