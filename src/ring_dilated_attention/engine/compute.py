"""Compute groups of tiles: by which back end, in which slices, and into what.

The schedule of a group says which of its tiles are blocks, a kernel call each, whose results are
added into the whole (`accumulate`), and which share a launch, being too small for one of their own.
What a kernel call allocates is bounded: blocks are taken in slices. Into which slices a block is
cut follows from the sizes of the tensors, and where its rows lie from their strides: both are kept
for calls of one shape, with what a back end keeps for a tile (`memo`).

A zero key, of score 0 and value 0, adds exp(0) to the denominator of a softmax and 0 to its
numerator. So m of them are a tile whose out is 0 and whose lse is log m, merged like any other.
Nothing is done for them in backward: they have no gradient, and the merged lse and out, which every
tile of backward uses, already count them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch

from .. import kernels
from ..kernels import keep_few, profile_of
from ..plan import PackedTiles, Tile, TileGroup
from ..tiles import Limits, Selection, TileGradients, TileInputs
from .accumulate import Accumulator, add, merge, row_sums
from .blocks import Block, Placement, families
from .device_tables import TABLES

MOST_BLOCKS = 256
"""Largest schedule, in blocks, of which kernel calls are kept: each takes about 3 KB."""
_LAYOUTS_KEPT = 8

FORWARD_WORKSPACE = 0.26
"""The most that temporaries of a forward call take, as a share of the size of its query."""
BACKWARD_WORKSPACE = 0.52
"""The same for a backward call."""
WORKSPACE_FLOOR = 64 << 20
"""Bytes that temporaries may take in any case, as may those of a slice of SLICE_ROWS rows: slices
must be large enough to fill a GPU."""
SLICE_ROWS = 1 << 17
"""Query rows that keep a GPU busy: an H200 takes 128 to each of its 132 multiprocessors, and these
are eight rounds, so that the last one matters little."""

LONG_FLOPS = 1e11
"""Operations of a kernel call from which results are added on the side stream, behind the next
call: 0.25 ms on an H200. An addition takes the GPU about 0.02 ms, the side stream the CPU 0.1."""


class Inputs(NamedTuple):
    """Query, keys and values that a group of tiles reads.

    query (batch, local_sequence, heads, head_dim); keys and values (batch, local_sequence,
    kv_heads, head_dim), or `by_slot` of a received message.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Result(NamedTuple):
    """Out and lse into which results of forward are merged.

    out, like query; lse (batch, heads, local_sequence). `stores`: what they hold at the rows of a
    group is written over.
    """

    out: torch.Tensor
    lse: torch.Tensor
    stores: bool = False


class Gradients(NamedTuple):
    """Gradients of `Inputs`, of the same shapes, to which those of tiles are added.

    `stores_query`, `stores_keys`: what query, and what keys and values hold at the rows of a group
    is written over.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    stores_query: bool = False
    stores_keys: bool = False


@dataclass
class Merged:
    """The merged result of a call and the gradient of its out: what backward starts from.

    dout, out (batch, sequence, heads, head_dim); lse (batch, heads, sequence).
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @cached_property
    def room(self) -> torch.Tensor:
        """Memory for `delta`, allocated on the stream that asks for it first."""
        return torch.empty_like(self.lse)

    @cached_property
    def delta(self) -> torch.Tensor:
        """``rowsum(dout * out)``, like lse. Most back ends work it out for themselves.

        By the stream that is first to ask for it, for which others wait.
        """
        row_sums(self.dout, self.out, self.room)
        return self.room


@dataclass(frozen=True)
class TileCall:
    """The options that all tiles of a call share."""

    selection: Selection  # the back ends that may compute them
    scale: float  # factor on the scores
    batch: int  # batch size
    heads_per_kv: int  # query heads of a KV head
    # the most that slices allocate, in multiples of the size of query; None: the constants
    # of this module say
    workspace: float | None = None
    # operations of forward on the rows that the rank holds; 0 where the limits of short
    # calls are to hold
    own_flops: float = 0.0
    softcap: float | None = None  # c of scores c * tanh(s / c); None: scores are as they are

    @cached_property
    def limits(self) -> Limits:
        """Largest sizes of tiles that share launches."""
        return [x for x in self.selection.limits if x.least <= self.own_flops][-1]

    def most_rows(self, query: torch.Tensor, default: float, row_bytes: float) -> float:
        """Number of rows that a slice may have if it allocates `row_bytes` for each."""
        if self.workspace is not None:
            return self.workspace * query.nbytes / row_bytes
        least = profile_of(query.device).rows(SLICE_ROWS)
        return max(default * query.nbytes / row_bytes, WORKSPACE_FLOOR / row_bytes, least)


class KernelCall(NamedTuple):
    """A block, or a slice of one, as views of the tensors of a call.

    Attributes:
        inputs, merged, totals: where its rows are in these of `_Tensors`.
        is_causal, band: as its block.
        is_long: whether it takes long enough for its results to be added behind the next one.
        added: how many of the results are added there, the first ones; all, none, or of gradients
            that of the query. The back end writes the others where they belong.
        stores: of each of these, whether it is written over what is there, or added to it.
        memo: see `TileInputs`.
    """

    inputs: tuple[Placement, ...]
    merged: tuple[Placement, ...]
    totals: tuple[Placement, ...]
    is_causal: bool
    band: tuple[int, int] | None
    is_long: bool
    added: int
    stores: tuple[bool, ...]
    memo: dict[Any, Any]

    def tile(self, call: TileCall, inputs: Inputs) -> TileInputs:
        """Views of the inputs."""
        query, keys, values = _views(self.inputs, inputs)
        options = self.is_causal, call.scale, self.memo, self.band, call.softcap
        return TileInputs(query, keys, values, *options)


_Tensors: TypeAlias = tuple[
    Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor], tuple[bool, bool], int
]
"""Tensors of a call in one direction, all (batch, rows, heads, ...).

- query, keys and values;
- dout, out and lse; nothing in forward;
- totals: out and lse, or gradients of query, keys and values;
- whether results are written over what is there: of queries, and of keys;
- of how many kernel calls results are held at a time; 1: there is no side stream.
"""


def _views(places: Sequence[Placement], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [place.of(tensor) for place, tensor in zip(places, tensors, strict=True)]


def _kernel_calls(work: Schedule, call: TileCall, given: _Tensors) -> Sequence[KernelCall]:
    """The blocks of a schedule as kernel calls, kept for the next call of the same layout."""
    if not work.blocks:
        return ()

    def make() -> Sequence[KernelCall]:
        return tuple(x for block in work.blocks for x in _cut(block, call, given))

    if len(work.blocks) > MOST_BLOCKS:
        return make()
    inputs, merged, totals, *options = given
    layouts = [(x.stride(), x.dtype) for x in (*inputs, *merged, *totals)]
    scores = call.selection.backend, call.scale, call.softcap
    key = *options, *scores, call.workspace, inputs[0].device, *layouts
    kept: Sequence[KernelCall] | None = work.calls.get(key)
    return kept or keep_few(work.calls, key, make, _LAYOUTS_KEPT)


def _cut(block: Block, call: TileCall, given: _Tensors) -> Iterator[KernelCall]:
    """Slices of a block. Where nothing is there to add to, a back end may write into its place."""
    inputs, merged, totals, (store, store_keys), held = given
    backend, query = call.selection.backend, inputs[0]
    assert backend is not None
    head_dim = query.shape[3]
    long_flops = profile_of(query.device).flops(LONG_FLOPS)
    result_bytes = head_dim * query.element_size() * held
    is_placed = [x.dtype == query.dtype for x in totals]
    if not merged:
        fits = store and is_placed[0] and block.queries.stride == 1
        added = 0 if fits and backend.forward_into is not None else 2
        row_bytes = result_bytes + totals[1].element_size() * held
        most_rows = call.most_rows(query, FORWARD_WORKSPACE, row_bytes) if added else math.inf
    else:
        store_keys = store_keys and block.member == 0  # members of a KV head share its gradients
        added = 3
        if backend.backward_into is not None and store_keys and is_placed[1]:
            added = 0 if store and is_placed[0] else 1
        row_bytes = merged[2].element_size() + backend.backward_workspace(head_dim)
        row_bytes += added * result_bytes
        most_rows = call.most_rows(query, BACKWARD_WORKSPACE, row_bytes)
    for part in block.slices(most_rows):

        def place(
            tensor: torch.Tensor, of_keys: bool, is_read: bool = True, part: Block = part
        ) -> Placement:
            rows_first = backend.rows_first and is_read and tensor.dim() == 4
            return (part.place_keys if of_keys else part.place_queries)(
                tensor, rows_first=rows_first
            )

        yield KernelCall(
            tuple(place(x, i > 0) for i, x in enumerate(inputs)),
            tuple(place(x, False) for x in merged),
            tuple(place(x, bool(merged) and i > 0, i >= added) for i, x in enumerate(totals)),
            part.is_causal,
            part.band,
            (10 if merged else 4) * head_dim * part.pairs >= long_flops,
            added,
            (store, store_keys, store_keys)[:added],
            {},
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """How the tiles of a group are computed: block by block, or all in one launch."""

    blocks: tuple[Block, ...]  # a kernel call each
    table: tuple[Tile, ...]  # tiles of the launch
    packed: tuple[PackedTiles, ...]  # more of them
    # the kernel calls of the blocks, for each of the last few layouts
    calls: dict[Hashable, Any] = field(default_factory=dict)


SCHEDULES: WeakKeyDictionary[TileGroup, dict[Hashable, Schedule]] = WeakKeyDictionary()
"""Kept as long as the plan of their group lives. A schedule takes about as many bytes as its
tiles."""
_SCHEDULES_KEPT = 8


def schedule_of(
    group: TileGroup,
    batch: int,
    heads_per_kv: int,
    head_dim: int,
    table_flops: float,
    *,
    grouped: bool = False,
) -> Schedule:
    """How a group is computed; kept for the next call.

    Blocks of at most `table_flops` operations of one member of the query heads of a KV head share a
    launch. `grouped`: whether blocks may have all members.
    """

    def make() -> Schedule:
        blocks: list[Block] = []
        table: list[Tile] = []
        packed: list[PackedTiles] = []
        single = list(group.single)
        for many in group.packed:
            # A block would be a tile of all rows of the batch, of (4, or causal 2) * pairs
            # operations.
            flops = (2 if many.is_causal else 4) * head_dim * batch * len(many.heads)
            short, long = many.split(math.sqrt(table_flops / flops))
            packed.extend([short] if short.starts else [])
            single.extend(long.tiles())
        for family in families(single):
            cut = list(family.blocks(batch, heads_per_kv, grouped=grouped))
            if cut[0].band is not None:  # the table's kernels have no windows
                blocks.extend(cut)
            elif 4 * head_dim * sum(x.pairs // x.group for x in cut) <= table_flops * len(cut):
                table.extend(family.tiles)
            else:
                blocks.extend(cut)
        return Schedule(tuple(blocks), tuple(table), tuple(packed))

    key = batch, heads_per_kv, head_dim, table_flops, grouped
    kept = SCHEDULES.setdefault(group, {})
    return kept.get(key) or keep_few(kept, key, make, _SCHEDULES_KEPT)


def _schedule(group: TileGroup, call: TileCall, head_dim: int, table_flops: float) -> Schedule:
    backend = call.selection.backend
    grouped = backend is not None and backend.takes_groups
    shape = call.batch, call.heads_per_kv, head_dim
    return schedule_of(group, *shape, table_flops, grouped=grouped)


class Launch(NamedTuple):
    """A launch of the table-driven kernels: `kernels.Cells`, and how it is configured."""

    cells: Any
    config: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tables on the device."""
        return self.cells.table, self.cells.query_programs, self.cells.key_programs


def _launch(work: Schedule, backward: bool, call: TileCall, query: torch.Tensor) -> Launch:
    """The tables of a launch on the device, and its configuration; kept for the next call."""
    device, head_dim, dtype = query.device, query.shape[3], query.dtype

    def make() -> Launch:
        longest = [max(tiles.lengths) for tiles in work.packed]
        queries = max([tile.queries.length for tile in work.table] + longest)
        keys = max([tile.keys.length for tile in work.table] + longest)
        names: tuple[kernels.Kernel, ...] = ("dq", "dkdv") if backward else ("forward",)
        configs = [
            kernels.default_config(x, head_dim, dtype, queries=queries, keys=keys, device=device)
            for x in names
        ]
        cells = kernels.build_cells(
            work.table,
            work.packed,
            batch=call.batch,
            heads_per_kv=call.heads_per_kv,
            block_m=configs[0].block_m,
            block_n=configs[-1].block_n,
            device=device,
        )
        return Launch(cells, kernels.BackwardConfig(*configs) if backward else configs[0])

    key = backward, call.batch, call.heads_per_kv, head_dim, dtype, device
    return TABLES.get(work, key, device, make)


def forward(
    group: TileGroup, call: TileCall, inputs: Inputs, result: Result, sums: Accumulator
) -> None:
    """Compute a group and merge it into a result, in place, at the group's rows.

    That is done through `sums`, which is to be joined when all groups are computed.
    """
    query, (out, lse, store), backend = inputs.query, result, call.selection.backend
    work = _schedule(group, call, query.shape[3], call.limits.forward)
    if work.table or work.packed:  # first: it does not have to wait for additions of its group
        add_all = partial(_forward_launch, work, call, inputs, result)
        sums.run(add_all, *inputs, into=(out, lse, *inputs[1:]), holds=False)
    totals = out, lse.transpose(1, 2)
    given = inputs, (), totals, (store, False), sums.most_held
    for one in _kernel_calls(work, call, given):
        assert backend is not None
        tile, (out_rows, lse_rows) = one.tile(call, inputs), _views(one.totals, totals)
        if not one.added:
            assert backend.forward_into is not None
            backend.forward_into(tile, out_rows, lse_rows)
            continue
        found = backend.forward(tile)
        add_all = partial(merge, out_rows, lse_rows, *found, store=store)
        sums.run(add_all, *found, into=(out_rows, lse_rows), is_long=one.is_long)
        del found, add_all  # before the next call makes its own


def _forward_launch(work: Schedule, call: TileCall, inputs: Inputs, result: Result) -> None:
    """Compute all tiles that share a launch, and merge their results."""
    cells, config = _launch(work, False, call, inputs.query)
    kernels.tiles_forward(
        *inputs,
        result.out,
        result.lse,
        cells,
        is_causal=cells.is_causal,
        scale=call.scale,
        store=result.stores,
        config=config,
    )


def backward(
    group: TileGroup,
    call: TileCall,
    inputs: Inputs,
    merged: Merged,
    gradients: Gradients,
    sums: Accumulator,
) -> None:
    """Compute the gradients of a group and add them up, in place, at the group's rows.

    `merged` is the result of the whole call; `sums` as in `forward`.
    """
    (*totals, store, store_keys), backend = gradients, call.selection.backend
    query = inputs.query
    work = _schedule(group, call, query.shape[3], call.limits.backward)
    if work.table or work.packed:  # first, as in forward
        add_all = partial(_backward_launch, work, call, inputs, merged, gradients)
        reads = *inputs, merged.dout, merged.out, merged.lse, merged.room
        sums.run(add_all, *reads, into=(*totals, *inputs[1:]), holds=False)
    of_merged = merged.dout, merged.out, merged.lse.transpose(1, 2)
    given = inputs, of_merged, totals, (store, store_keys), sums.most_held
    for one in _kernel_calls(work, call, given):
        assert backend is not None
        tile, places = one.tile(call, inputs), _views(one.totals, totals)
        tile_gradients = TileGradients(*_views(one.merged, of_merged))
        found: Sequence[torch.Tensor]
        if one.added == 3:
            found = backend.backward(tile, tile_gradients)
        else:  # the others are written where they belong
            assert backend.backward_into is not None
            found = [tile.q.new_empty(tile.q.shape)] if one.added else []
            backend.backward_into(tile, tile_gradients, *found, *places[one.added :])
            found = backend.ordered(*found)
        if found:
            added = places[: one.added]
            add_all = partial(_add_all, one.stores, added, found)
            sums.run(add_all, *found, into=added, is_long=one.is_long)
            del add_all
        del found  # before the next call makes its own


def _backward_launch(
    work: Schedule, call: TileCall, inputs: Inputs, merged: Merged, gradients: Gradients
) -> None:
    """The gradients of all tiles that share a launch, added where they belong."""
    cells, config = _launch(work, True, call, inputs.query)
    kernels.tiles_backward(
        merged.dout,
        *inputs,
        merged.lse,
        merged.delta,
        *gradients[:3],
        cells,
        is_causal=cells.is_causal,
        scale=call.scale,
        store=gradients.stores_query,
        store_keys=gradients.stores_keys,
        config=config,
    )


def _add_all(
    stores: Sequence[bool], totals: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> None:
    for store in {*stores}:
        chosen = [i for i, each in enumerate(stores) if each is store]
        add([totals[i] for i in chosen], [found[i] for i in chosen], store=store)


def merge_zero_keys(
    groups: Sequence[TileGroup], out: torch.Tensor, lse: torch.Tensor, heads_per_kv: int
) -> None:
    """Merge the zero keys of `RankPlan.zero_keys` into `out` and `lse`, in place.

    One pass over the rows that see any; temporaries are at most of the size of `lse`.

    Args:
        groups: which queries see how many.
        out: (batch, local_sequence, heads, head_dim), any floating dtype.
        lse: (batch, local_sequence, heads), float32 or float64; may be a transposed view.
        heads_per_kv: query heads of a KV head.
    """
    zero = lse.new_zeros(out.shape[-1]) if groups else lse
    for group in groups:
        for block in schedule_of(group, out.shape[0], heads_per_kv, 1, table_flops=0.0).blocks:
            rows = [block.place_queries(x).of(x) for x in (out, lse)]
            log_count = lse.new_full((1,), math.log(block.keys.length))
            tile = [x.expand(y.shape) for x, y in zip((zero, log_count), rows, strict=True)]
            merge(*rows, *tile, store=False)


def merge_sink(sink: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge one more key of each head, of score `sink` and value 0, into `out` and `lse`, in place.

    After all tiles, as one whose out is 0 and whose lse is `sink`.

    Args:
        sink: (heads,), any floating dtype.
        out: (batch, local_sequence, heads, head_dim), any floating dtype.
        lse: (batch, heads, local_sequence), float32 or float64; may be a transposed view.
    """
    if lse.numel():
        by_head, zero = out.transpose(1, 2), lse.new_zeros(out.shape[-1])
        of_sink = sink.to(lse.dtype)[:, None].expand(lse.shape)
        merge(by_head, lse, zero.expand(by_head.shape), of_sink, store=False)
