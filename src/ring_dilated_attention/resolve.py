"""What a call's options stand for: looked up once for every kind of call, and kept.

An operator takes no Python objects, so a call is written down as `FlatOptions`; `resolve` turns
them into plans and back ends, and into the words in which ranks compare their calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .choice import ROWS, choose_exchange
from .documents import SHOWN, in_words, packed_rows
from .engine import RingCall
from .exchange import Exchange, ProcessGroupExchange, Shared, exchange_named, group_name
from .layout import SequenceLayout
from .options import AttentionOptions
from .pattern import DilatedPattern, Window
from .plan import (
    AttentionPlan,
    HeadShare,
    HeadSplit,
    costs,
    head_split,
    plan_attention,
)
from .tiles import Selection, select_backend, wants_same_bits

# The same objects for calls of one kind: what is kept by them is found again.
_pattern = lru_cache(maxsize=64)(DilatedPattern)
_layout_of = lru_cache(maxsize=64)(SequenceLayout.from_flat)

KINDS_KEPT, PACKED_KEPT, FEW_DOCUMENTS = 256, 16, 64
"""Kinds of calls whose plans are kept, those with more than `FEW_DOCUMENTS` apart: a plan takes
about 40 KB, and 6 for each packed document."""

_plan = lru_cache(maxsize=PACKED_KEPT)(plan_attention)


class FlatOptions(NamedTuple):
    """A call of `dilated_attention` without its tensors, in types that an operator takes.

    Fields are those of `DilatedPattern` and `AttentionOptions`, but for those with a comment.
    """

    segment_lengths: Sequence[int]  # 0 is the whole document, -1 the next of `windows`
    dilation_rates: Sequence[int]
    head_offsets: str
    head_branches: str
    zero_keys: bool
    is_causal: bool
    scale: float | None
    layout: Sequence[int]  # `SequenceLayout.flat`; empty is contiguous equal shards
    group: str  # the name by which `exchange_named` finds it
    exchange: str  # `choice.ROWS`: ring or gather, where sizes are symbols of torch.compile
    backend: str
    workspace: float | None
    needs_gradients: bool  # whether autograd records this call
    documents: Sequence[int] = ()  # cumulative lengths; empty: one document
    lengths: Sequence[int] = ()  # valid positions of each batch row; empty: all of all rows
    detached: bool = False  # whether backward takes the weights of branches for constants
    head_slice: Sequence[int] = ()  # empty: the call has all heads
    windows: Sequence[int] = ()  # left, right of each window
    softcap: float | None = None
    num_kv_heads: int = 0  # of the call

    def pattern(self) -> DilatedPattern:
        """The pattern of the call."""
        windows = iter(self.windows)
        return _pattern(
            tuple(
                (next(windows), next(windows)) if length < 0 else length or None
                for length in self.segment_lengths
            ),
            tuple(self.dilation_rates),
            head_offsets=self.head_offsets,
            head_branches=self.head_branches,
            zero_keys=self.zero_keys,
            head_slice=tuple(self.head_slice) or None,
        )

    def layout_of(self, local_length: int, world_size: int) -> SequenceLayout:
        """The layout of a call: contiguous equal shards of `local_length` if none was given."""
        if self.layout:
            return _layout_of(tuple(self.layout))
        return SequenceLayout.contiguous(local_length * world_size, world_size)

    def rows_of(self, ranks: Sequence[int], local_length: int) -> int:
        """Rows that ranks hold together; positions may be symbols of torch.compile."""
        if not self.layout:
            return local_length * len(ranks)
        rows, flat = 0, iter(self.layout)
        for rank, count in enumerate(flat):
            for _ in range(count):
                start, stop = next(flat), next(flat)
                rows += (stop - start) * (rank in ranks)
        return rows


def flat_options(
    pattern: DilatedPattern,
    options: AttentionOptions,
    num_kv_heads: int,
    *,
    documents: Sequence[int] | None,
    lengths: Sequence[int] | None,
    needs_gradients: bool,
) -> FlatOptions:
    """Write down a call; `documents` and `lengths` are None where they are in a tensor.

    Raises:
        TypeError, ValueError: the group or the head slice is not allowed.
    """
    scale, workspace = options.scale, options.workspace
    return FlatOptions(
        tuple([-1 if isinstance(x, Window) else x or 0 for x in pattern.segment_lengths]),
        pattern.dilation_rates,
        pattern.head_offsets,
        pattern.head_branches,
        pattern.zero_keys,
        options.is_causal,
        None if scale is None else float(scale),
        () if options.layout is None else options.layout.flat,
        group_name(options.group),
        options.exchange,
        options.backend,
        None if workspace is None else float(workspace),
        needs_gradients,
        tuple(documents or ()),
        tuple(lengths or ()),
        options.branch_gradients == "detached" and pattern.mixes_branches,
        pattern.slice_for(options.head_slice, num_kv_heads) or (),
        tuple([side for x in pattern.segment_lengths if isinstance(x, Window) for side in x]),
        None if options.softcap is None else float(options.softcap),
        num_kv_heads,
    )


class Resolved(NamedTuple):
    """What a call is, for all calls of its kind."""

    shared: Shared | None  # what must be equal on all ranks; None where there is one rank
    # all rows of the batch, in the same order on every rank: those that are equally long together,
    # by an evenly spaced slice, which gives a view, and how they are computed
    planned: tuple[tuple[slice, RingCall], ...]
    heads: HeadShare | None  # of an all-to-all by heads, whose own heads the plans are for


class _Kind(NamedTuple):
    """The tensors of a call, but for their numbers."""

    shape: tuple[int, ...]  # (batch, local_sequence, heads, head_dim)
    num_kv_heads: int
    dtype: torch.dtype
    device: torch.device


def resolve(options: FlatOptions, query: torch.Tensor, ends: Exchange) -> Resolved:
    """Look up what the options of a call stand for on this rank, whose end of the group is `ends`.

    `query` is that of the call, or a tensor like it.

    Raises:
        ValueError: the layout, the documents, the lengths or the back end do not fit the call.
    """
    find = _resolved_packed if len(options.documents) > FEW_DOCUMENTS else _resolved
    return find(
        ends.rank,
        ends.world_size,
        _Kind(query.shape, options.num_kv_heads, query.dtype, query.device),
        options,
        wants_same_bits(),
    )


def _resolve(
    rank: int,
    world_size: int,
    kind: _Kind,
    options: FlatOptions,
    _: bool,  # of `wants_same_bits`, on which the back end depends
) -> Resolved:
    _check_layout(options, kind.shape[1], rank, world_size)
    backend, head_dim = _selected(options, kind), kind.shape[3]
    scale = head_dim**-0.5 if options.scale is None else options.scale
    split = split_of(options, kind.shape, kind.dtype, world_size)
    planned = []
    for rows, plan in plan_rows(options, kind.shape, world_size):
        one = plan.rank(rank) if split is None else split.plan_of(plan, rank)
        gathers = options.exchange == "gather"
        if options.exchange not in ("ring", "gather") and one.world_size > 1:
            gathers = one.plan.gathers
        batch = len(range(kind.shape[0])[rows])
        call = RingCall(
            one, batch, head_dim, backend, scale, gathers,
            options.workspace, options.detached, options.softcap,
        )  # fmt: skip
        planned.append((rows, call))
    return Resolved(
        Shared.of(_in_words(kind, options, split)) if world_size > 1 else None,
        tuple(planned),
        None if split is None else split.share_of(rank),
    )


_resolved = lru_cache(maxsize=KINDS_KEPT)(_resolve)
_resolved_packed = lru_cache(maxsize=PACKED_KEPT)(_resolve)
KEPT = _resolved, _resolved_packed, _plan  # of the calls so far


def _selected(options: FlatOptions, kind: _Kind) -> Selection:
    given = options.backend, kind.device, kind.dtype, kind.shape[3]
    capped = options.softcap is not None
    return select_backend(*given, bands=bool(options.windows), softcap=capped)


def split_of(
    options: FlatOptions, shape: Sequence[int], dtype: torch.dtype, world_size: int
) -> HeadSplit | None:
    """How a call exchanges rows for heads; None: it does not.

    Args:
        options: of a call.
        shape: of its query.
        dtype: of its query.
        world_size: number of ranks.

    Raises:
        ValueError: there are too few heads, or another number of ranks.
    """
    exchange = options.exchange
    if exchange == "auto" and world_size > 1:
        plans = (plan for _, plan in plan_rows(options, shape, world_size))
        longest = max(plans, key=lambda plan: plan.documents[-1])
        size = costs.TensorSize(batch=shape[0], head_dim=shape[3], element_size=dtype.itemsize)
        ends = exchange_named(options.group)
        hosts = ends.hosts if isinstance(ends, ProcessGroupExchange) else 1
        exchange = choose_exchange(longest, size, hosts)
    if not exchange.startswith("heads"):
        return None  # without a layout, whose numbers may be symbols
    layout = options.layout_of(shape[1], world_size)
    return head_split(exchange, options.pattern(), layout, shape[2], options.num_kv_heads)


def plan_rows(
    options: FlatOptions, shape: Sequence[int], world_size: int
) -> Iterator[tuple[slice, AttentionPlan]]:
    """The rows of a batch that are computed together, each with its plan.

    `shape` is that of query.

    Raises:
        ValueError: the documents or the lengths do not fit the call.
    """
    batch, length, num_heads, _ = shape
    pattern, layout = options.pattern(), options.layout_of(length, world_size)
    packed = tuple(options.documents), tuple(options.lengths)
    for rows, borders in packed_rows(*packed, batch, layout.length):
        yield (
            rows,
            _plan(
                pattern,
                layout,
                is_causal=options.is_causal,
                num_heads=num_heads,
                num_kv_heads=options.num_kv_heads,
                documents=borders,
                length=borders[-1],
            ),
        )


def check_integers(options: FlatOptions, shape: Sequence[int], ends: Exchange) -> None:
    """Raise a `ValueError` unless layout, documents and lengths fit a call that is not computed."""
    _check_layout(options, shape[1], ends.rank, ends.world_size)
    total = options.layout_of(shape[1], ends.world_size).length
    packed_rows(options.documents, options.lengths, shape[0], total)


def _check_layout(
    options: FlatOptions, length: int, rank: int, world_size: int, holder: str = "query"
) -> None:
    if options.layout:
        held = f"its {holder} has a local sequence length of {length}"
        options.layout_of(length, world_size).check_shard(rank, world_size, length, held)


def shared_words(
    options: FlatOptions,
    query: torch.Tensor,
    key: torch.Tensor,
    ends: Exchange,
    *,
    words: Mapping[str, str],
    holder: str = "query",
) -> Shared:
    """What must be equal on all ranks, in a call that is not resolved by `resolve`.

    Args:
        options: of a call.
        query: of its shape only heads and head_dim count.
        key: (batch, local_sequence, kv_heads, head_dim).
        ends: this rank's end of the group.
        words: take the place of options, or are added.
        holder: what messages say that the ranks' shards are of.

    Raises:
        ValueError: the layout or the back end do not fit the call.
    """
    kind = _Kind((*key.shape[:2], *query.shape[2:]), key.shape[2], query.dtype, query.device)
    _check_layout(options, key.shape[1], ends.rank, ends.world_size, holder)
    _selected(options, kind)  # or raise
    return Shared.of({**_in_words(kind, options), **words})


def _in_words(kind: _Kind, options: FlatOptions, split: HeadSplit | None = None) -> dict[str, Any]:
    batch, length, num_heads, head_dim = kind.shape
    layout = f"None (a shard of {length} positions)"
    if options.layout:
        given = options.layout_of(length, 0)
        layout = f"{given!r} ({given.digest[:8]})"
    exchange = "auto" if options.exchange == ROWS else options.exchange
    if exchange == "auto" and split is not None:
        exchange = f"auto (heads:{split.ranks})"
    return {
        "batch": batch,
        "heads": num_heads,
        "kv_heads": kind.num_kv_heads,
        "head_dim": head_dim,
        "dtype": str(kind.dtype),
        "device": kind.device.type,
        "pattern": str(options.pattern()),
        "layout": layout,
        "documents": _digest(options.documents),
        "lengths": _digest(options.lengths),
        "is_causal": options.is_causal,
        "scale": options.scale,
        "softcap": options.softcap,
        "exchange": exchange,
        "backend": options.backend,
        "needs gradients": options.needs_gradients,
        "branch_gradients": "detached" if options.detached else "exact",
    }


def _digest(numbers: Sequence[int]) -> str:
    if not numbers:
        return "None"
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).hexdigest()
    return in_words(numbers) + f" ({digest})" * (len(numbers) > SHOWN)
