"""A rank's part of a batch for transformers' models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..exchange import Group, resolve_exchange
from ..layout import SequenceLayout
from ..parallel import agree_on_batch
from ..pattern import in_brief

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
