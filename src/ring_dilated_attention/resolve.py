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

from .caches import INT_BYTES, cache_by_size
from .documents import SHOWN, in_words, packed_rows
from .exchange import Exchange, Shared, group_name
from .layout import SequenceLayout
from .options import AttentionOptions
from .pattern import DilatedPattern, HeadBranches, HeadOffsets
from .plan import AttentionPlan, RankPlan, plan_attention
from .tiles import Selection, select_backend, wants_same_bits


class FlatOptions(NamedTuple):
    """A call of `dilated_attention` without its tensors, in types that an operator takes.

    The first five fields and the last are those of the pattern; others that are not explained are
    those of `AttentionOptions`.

    Attributes:
        segment_lengths: 0 is the whole document.
        dilation_rates: one a branch.
        head_offsets: see `DilatedPattern`.
        head_branches: see `DilatedPattern`.
        zero_keys: see `DilatedPattern`.
        is_causal: whether a query sees only keys at positions <= its own.
        scale: factor on the scores; None: ``head_dim ** -0.5``.
        layout: `SequenceLayout.flat`; empty is contiguous equal shards.
        group: the name by which `exchange_named` finds it.
        exchange: how rows travel.
        backend: kernels that compute the tiles.
        workspace: bound on the temporary memory of kernels.
        needs_gradients: whether autograd records this call.
        documents: cumulative lengths; empty: one document.
        lengths: valid positions of each batch row; empty: all positions of all rows.
        detached: whether backward takes the weights of branches for constants.
        head_slice: empty: the call has all heads.
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    head_offsets: str
    head_branches: str
    zero_keys: bool
    is_causal: bool
    scale: float | None
    layout: Sequence[int]
    group: str
    exchange: str
    backend: str
    workspace: float | None
    needs_gradients: bool
    documents: Sequence[int] = ()
    lengths: Sequence[int] = ()
    detached: bool = False
    head_slice: Sequence[int] = ()

    def pattern(self) -> DilatedPattern:
        """The pattern of the call."""
        lengths, rates, heads = map(tuple, (self[0], self[1], self.head_slice))
        return _pattern_of(lengths, rates, *self[2:5], heads)

    def layout_of(self, local_length: int, world_size: int) -> SequenceLayout:
        """The layout of a call with so many local positions, on so many ranks."""
        if self.layout:
            return _layout_of(tuple(self.layout))
        return SequenceLayout.contiguous(local_length * world_size, world_size)


def flat_options(
    pattern: DilatedPattern,
    options: AttentionOptions,
    num_kv_heads: int,
    *,
    documents: Sequence[int] | None,
    lengths: Sequence[int] | None,
    needs_gradients: bool,
) -> FlatOptions:
    """Write down a call.

    Args:
        pattern: which keys each head sees.
        options: of the call.
        num_kv_heads: heads of its key.
        documents: cumulative lengths; None: one document, or they are in a tensor.
        lengths: valid positions of each batch row; None: all, or they are in a tensor.
        needs_gradients: whether autograd records the call.

    Raises:
        TypeError, ValueError: the group or the head slice is not allowed.
    """
    scale, workspace = options.scale, options.workspace
    return FlatOptions(
        [length or 0 for length in pattern.segment_lengths],
        pattern.dilation_rates,
        pattern.head_offsets,
        pattern.head_branches,
        pattern.zero_keys,
        options.is_causal,
        None if scale is None else float(scale) + 0.0,  # -0.0 is equal to 0.0
        () if options.layout is None else options.layout.flat,
        group_name(options.group),
        options.exchange,
        options.backend,
        None if workspace is None else float(workspace),
        needs_gradients,
        documents or (),
        lengths or (),
        options.branch_gradients == "detached" and pattern.mixes_branches,
        pattern.slice_for(options.head_slice, num_kv_heads) or (),
    )


class PlannedRows(NamedTuple):
    """Rows of a batch that are computed together, because they are equally long.

    Attributes:
        rows: which, evenly spaced: indexing with it gives a view.
        plan: what this rank does.
        gathers: whether all messages are in flight at once.
    """

    rows: slice
    plan: RankPlan
    gathers: bool


class Resolved(NamedTuple):
    """What a call is, for all calls of its kind.

    Attributes:
        shared: what must be equal on all ranks; None where there is one rank.
        backend: what computes the tiles.
        scale: factor on the scores.
        planned: all rows of the batch, in the same order on every rank.
    """

    shared: Shared | None
    backend: Selection
    scale: float
    planned: tuple[PlannedRows, ...]


def resolve(
    options: FlatOptions, query: torch.Tensor, key: torch.Tensor, ends: Exchange
) -> Resolved:
    """Look up what the options stand for.

    Args:
        options: of a call.
        query: (batch, local_sequence, heads, head_dim).
        key: (batch, local_sequence, kv_heads, head_dim).
        ends: this rank's end of the group.

    Raises:
        ValueError: the layout, the documents, the lengths or the back end do not fit the call.
    """
    return _resolve(
        ends.rank,
        ends.world_size,
        query.shape,
        key.shape[2],
        query.dtype,
        query.device,
        wants_same_bits(),
        *[tuple(x) if type(x) is list else x for x in options],
    )


def plan_rows(
    options: FlatOptions, shape: Sequence[int], num_kv_heads: int, world_size: int
) -> Iterator[tuple[slice, AttentionPlan]]:
    """The rows of a batch that are computed together, each with its plan.

    Args:
        options: of a call, with tuples in place of lists.
        shape: of its query.
        num_kv_heads: heads of its key.
        world_size: number of ranks.

    Raises:
        ValueError: the documents or the lengths do not fit the call.
    """
    batch, length, num_heads, _ = shape
    pattern, layout = options.pattern(), options.layout_of(length, world_size)
    for rows, borders in packed_rows(options.documents, options.lengths, batch, layout.length):
        plan = _plan(pattern, layout, options.is_causal, num_heads, num_kv_heads, borders)
        yield rows, plan


def check_integers(options: FlatOptions, shape: Sequence[int], ends: Exchange) -> None:
    """Raise a `ValueError` unless layout, documents and lengths fit a call that is not computed.

    Args:
        options: of a call.
        shape: of its query.
        ends: this rank's end of the group.
    """
    _check_layout(options, shape, ends.rank, ends.world_size, "query")
    total = options.layout_of(shape[1], ends.world_size).length
    packed_rows(tuple(options.documents), tuple(options.lengths), shape[0], total)


def forget_plans() -> None:
    """Drop what is kept of the calls so far: plans, schedules, lists of documents."""
    for kept in (_resolve, _plan, packed_rows):
        kept.forget()


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
        query: see `resolve`; of its shape only heads and head_dim count.
        key: (batch, local_sequence, kv_heads, head_dim).
        ends: this rank's end of the group.
        words: what takes the place of an option, or is added.
        holder: what messages say that the ranks' shards are of.

    Raises:
        ValueError: the layout or the back end do not fit the call.
    """
    shape = (*key.shape[:2], *query.shape[2:])
    _check(options, shape, query.dtype, query.device, ends.rank, ends.world_size, holder)
    in_words = _in_words(shape, key.shape[2], query.dtype, query.device, options)
    return Shared.of({**in_words, **words})


def _nbytes_of_call(arguments: tuple[Any, ...], resolved: Resolved) -> int:
    options = FlatOptions(*arguments[7:])
    numbers = len(options.layout) + len(options.documents) + len(options.lengths)
    plans = sum(_nbytes_of_plan(rows.plan) for rows in resolved.planned)
    return INT_BYTES * numbers + plans


@cache_by_size(64 << 20, _nbytes_of_call)
def _resolve(
    rank: int,
    world_size: int,
    shape: tuple[int, int, int, int],
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    _: bool,  # of `wants_same_bits`, on which the back end depends
    *values: Any,
) -> Resolved:
    options = FlatOptions(*values)
    backend = _check(options, shape, dtype, device, rank, world_size)
    planned, shared = [], None
    for rows, plan in plan_rows(options, shape, num_kv_heads, world_size):
        gathers = options.exchange == "gather"
        if options.exchange == "auto" and world_size > 1:
            gathers = plan.gathers
        planned.append(PlannedRows(rows, plan.rank(rank), gathers))
    if world_size > 1:
        shared = Shared.of(_in_words(shape, num_kv_heads, dtype, device, options))
    return Resolved(
        shared,
        backend,
        shape[3] ** -0.5 if options.scale is None else options.scale,
        tuple(planned),
    )


def _check(
    options: FlatOptions,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    rank: int,
    world_size: int,
    holder: str = "query",
) -> Selection:
    """What computes the tiles; raise a `ValueError` unless layout and back end fit the call."""
    _check_layout(options, shape, rank, world_size, holder)
    return select_backend(options.backend, device, dtype, shape[3])


def _check_layout(
    options: FlatOptions, shape: Sequence[int], rank: int, world_size: int, holder: str
) -> None:
    if options.layout:
        held = f"its {holder} has a local sequence length of {shape[1]}"
        options.layout_of(shape[1], world_size).check_shard(rank, world_size, shape[1], held)


def _in_words(
    shape: tuple[int, ...],
    num_kv_heads: int,
    dtype: torch.dtype,
    device: torch.device,
    options: FlatOptions,
) -> dict[str, Any]:
    batch, length, num_heads, head_dim = shape
    layout = options.layout_of(length, 0) if options.layout else None
    return {
        "batch": batch,
        "heads": num_heads,
        "kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype": str(dtype),
        "device": device.type,
        "pattern": str(options.pattern()),
        "layout": f"{layout!r} ({layout.digest[:8]})"
        if layout
        else f"None (a shard of {length} positions)",
        "documents": _digest(options.documents),
        "lengths": _digest(options.lengths),
        "is_causal": options.is_causal,
        "scale": options.scale,
        "exchange": options.exchange,
        "backend": options.backend,
        "needs gradients": options.needs_gradients,
        "branch_gradients": "detached" if options.detached else "exact",
    }


def _digest(numbers: Sequence[int]) -> str:
    if not numbers:
        return "None"
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).hexdigest()
    return in_words(numbers) + f" ({digest})" * (len(numbers) > SHOWN)


def _nbytes_of_plan(plan: AttentionPlan | RankPlan) -> int:
    """Roughly what a plan and its schedules take when they have been used."""
    about = plan.plan if isinstance(plan, RankPlan) else plan
    branches = len(about.pattern.segment_lengths)
    return 4096 * (branches * (8 + about.layout.world_size) + len(about.documents))


@cache_by_size(64 << 20, lambda arguments, plan: _nbytes_of_plan(plan))
def _plan(
    pattern: DilatedPattern,
    layout: SequenceLayout,
    is_causal: bool,
    num_heads: int,
    num_kv_heads: int,
    borders: tuple[int, ...],
) -> AttentionPlan:
    return plan_attention(
        pattern,
        layout,
        is_causal=is_causal,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        documents=borders,
        length=borders[-1],
    )


@lru_cache(maxsize=64)
def _pattern_of(
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    head_offsets: HeadOffsets,
    head_branches: HeadBranches,
    zero_keys: bool,
    head_slice: tuple[int, ...],
) -> DilatedPattern:
    """The same object for calls of other lengths and documents: what is kept by it is found."""
    return DilatedPattern(
        [length or None for length in segment_lengths],
        dilation_rates,
        head_offsets=head_offsets,
        head_branches=head_branches,
        zero_keys=zero_keys,
        head_slice=head_slice or None,
    )


def _nbytes_of_layout(arguments: tuple[Any, ...], layout: SequenceLayout) -> int:
    return 4 * INT_BYTES * len(arguments[0])


@cache_by_size(4 << 20, _nbytes_of_layout)
def _layout_of(flat: tuple[int, ...]) -> SequenceLayout:
    return SequenceLayout.from_flat(flat)
