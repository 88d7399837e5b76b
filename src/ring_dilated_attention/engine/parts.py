"""How a group of tiles is computed: block by block, or in one launch of table-driven kernels.

Into which slices a block is cut follows from the sizes of the tensors, and where its rows lie from
their strides. Calls of a shape differ in neither, and what a back end keeps for a tile (`memo`)
belongs to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch

from ..caches import keep_few
from ..kernels import profile_of
from ..plan import PackedTiles, Tile, TileGroup
from ..tiles import Limits, Selection
from .blocks import Block, Placement, families
from .device_tables import TABLES

MOST_BLOCKS = 256
"""Of a schedule, for its kernel calls to be kept: each takes about 3 KB."""
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
BESIDE_FLOPS = 8e9
"""Operations from which small work goes to the side stream, beside the kernel calls that follow,
which leave multiprocessors idle at their end: 0.03 ms on an H200."""


@dataclass(frozen=True)
class TileCall:
    """What all tiles of a call have in common.

    Attributes:
        selection: the back ends that may compute them.
        scale: factor on the scores.
        batch: batch size.
        heads_per_kv: query heads of a KV head.
        workspace: the most that slices allocate, in multiples of the size of query; None: the
            constants of this module say.
        own_flops: operations of forward on the rows that the rank holds; 0 where the limits of
            short calls are to hold.
    """

    selection: Selection
    scale: float
    batch: int
    heads_per_kv: int
    workspace: float | None = None
    own_flops: float = 0.0

    @property
    def limits(self) -> Limits:
        """Up to which sizes tiles share launches."""
        return self.selection.limits_of(self.own_flops)

    def most_rows(self, query: torch.Tensor, default: float, row_bytes: float) -> float:
        """How many rows a slice may have that allocates `row_bytes` for each."""
        if self.workspace is not None:
            return self.workspace * query.nbytes / row_bytes
        least = profile_of(query.device).rows(SLICE_ROWS)
        return max(default * query.nbytes / row_bytes, WORKSPACE_FLOOR / row_bytes, least)


Additions: TypeAlias = tuple[tuple[bool, tuple[int, ...]], ...]
"""Numbers of gradients, with whether these are written over what is there (True) or added to it."""


class ForwardPart(NamedTuple):
    """A kernel call of forward.

    Attributes:
        inputs: where its query, keys and values are.
        totals: where its out and lse belong.
        is_causal: as its block.
        flops: operations that it takes.
        places: whether the back end writes them there.
        is_beside: whether it may run on the side stream, beside larger blocks of its group.
        memo: see `TileInputs`.
    """

    inputs: tuple[Placement, ...]
    totals: tuple[Placement, ...]
    is_causal: bool
    flops: int
    places: bool
    is_beside: bool
    memo: dict[Any, Any]


class BackwardPart(NamedTuple):
    """A kernel call of backward.

    Attributes:
        inputs: where its query, keys and values are.
        merged: where its dout, out and lse are.
        totals: where its gradients of query, keys and values belong.
        is_causal: as its block.
        flops: operations that it takes.
        added: how many of the gradients are added there, the first ones: 3, 1 or 0. The back end
            writes the others where they belong.
        additions: how these are added.
        is_beside: whether it may run on the side stream, beside larger blocks of its group.
        memo: see `TileInputs`.
    """

    inputs: tuple[Placement, ...]
    merged: tuple[Placement, ...]
    totals: tuple[Placement, ...]
    is_causal: bool
    flops: int
    added: int
    additions: Additions
    is_beside: bool
    memo: dict[Any, Any]


PartT = TypeVar("PartT", bound="ForwardPart | BackwardPart")


def kept_parts(
    cut: Callable[..., Iterator[PartT]],
    work: Schedule,
    call: TileCall,
    tensors: Sequence[torch.Tensor],
    **options: int,
) -> Sequence[PartT]:
    """The blocks of a schedule as kernel calls, kept for the next call of the same layout.

    Args:
        cut: `cut_forward` or `cut_backward`, which makes them.
        work: whose blocks.
        call: what all tiles have in common.
        tensors: what `cut` takes, all (batch, rows, heads, ...) and on one device.
        options: what else it takes.
    """
    if not work.blocks:
        return ()

    def make() -> Sequence[PartT]:
        return tuple(cut(work, call, tensors, **options))

    if len(work.blocks) > MOST_BLOCKS:
        return make()
    selected = call.selection.backend, call.scale, call.workspace, tensors[0].device
    layouts = [(x.stride(), x.dtype) for x in tensors]
    return keep_few(work.parts, (cut, *options.values(), *selected, *layouts), make, _LAYOUTS_KEPT)


def cut_forward(
    work: Schedule, call: TileCall, tensors: Sequence[torch.Tensor], *, held: int, store: bool
) -> Iterator[ForwardPart]:
    """Kernel calls of forward.

    Args:
        work: whose blocks they compute.
        call: what all tiles have in common.
        tensors: query, keys, values, out and lse.
        held: of how many kernel calls results are held at the same time; 1: there is no side
            stream.
        store: whether they are written over what out and lse hold.
    """
    query, keys, values, out, lse = tensors
    backend, head_dim = call.selection.backend, query.shape[3]
    assert backend is not None
    beside = _beside(work, 4 * head_dim, query.device, held)
    held += beside.streams - 1
    row_bytes = (head_dim * query.element_size() + lse.element_size()) * held
    most_rows = call.most_rows(query, FORWARD_WORKSPACE, row_bytes)
    may_place = store and out.dtype == query.dtype and backend.forward_into is not None
    order = backend.rows_first
    for block in work.blocks:
        places = may_place and block.queries.stride == 1
        for part in block.slices(math.inf if places else most_rows):
            yield ForwardPart(
                (
                    part.place_queries(query, rows_first=order),
                    part.place_keys(keys, rows_first=order),
                    part.place_keys(values, rows_first=order),
                ),
                (
                    part.place_queries(out, rows_first=order and places),
                    part.place_queries(lse),
                ),
                part.is_causal,
                4 * head_dim * part.pairs,
                places,
                beside.has(block, part),
                {},
            )


def cut_backward(
    work: Schedule,
    call: TileCall,
    tensors: Sequence[torch.Tensor],
    *,
    held: int,
    store: bool,
    store_keys: bool,
) -> Iterator[BackwardPart]:
    """Kernel calls of backward.

    Args:
        work: whose blocks they compute.
        call: what all tiles have in common.
        tensors: query, keys, values, dout, out, lse, and the gradients of the first three.
        held: as in `cut_forward`.
        store: whether they are written over what the gradient of query holds.
        store_keys: whether they are written over what those of keys and values hold.
    """
    query, keys, values, dout, out, lse, dquery, dkeys, dvalues = tensors
    backend, head_dim = call.selection.backend, query.shape[3]
    assert backend is not None
    order = backend.rows_first
    beside = _beside(work, 10 * head_dim, query.device, held)
    held += beside.streams - 1
    for block in work.blocks:
        own_keys = store_keys and block.member == 0  # members of a KV head share its gradients
        # Where nothing is there to add to, a back end may write what it finds where it belongs.
        added = 3
        if backend.backward_into is not None and own_keys and dkeys.dtype == query.dtype:
            added = 0 if store and dquery.dtype == query.dtype else 1
        row_bytes = lse.element_size() + backend.backward_workspace(head_dim) * beside.streams
        row_bytes += added * head_dim * query.element_size() * held
        additions = _by_flag((store, own_keys, own_keys)[:added])
        for part in block.slices(call.most_rows(query, BACKWARD_WORKSPACE, row_bytes)):
            yield BackwardPart(
                (
                    part.place_queries(query, rows_first=order),
                    part.place_keys(keys, rows_first=order),
                    part.place_keys(values, rows_first=order),
                ),
                (
                    part.place_queries(dout, rows_first=order),
                    part.place_queries(out, rows_first=order),
                    part.place_queries(lse),
                ),
                (
                    part.place_queries(dquery, rows_first=order and added == 0),
                    part.place_keys(dkeys, rows_first=order and added < 3),
                    part.place_keys(dvalues, rows_first=order and added < 3),
                ),
                part.is_causal,
                10 * head_dim * part.pairs,
                added,
                additions,
                beside.has(block, part),
                {},
            )


class _Beside(NamedTuple):
    """What runs on the side stream, beside the larger blocks of a group.

    Kernel calls leave multiprocessors idle at their end, which small ones fill.

    Attributes:
        least: pairs of a kernel call from which it may.
        most: pairs of a block up to which it does.
        streams: on how many streams blocks are computed, 1 or 2.
    """

    least: float
    most: float
    streams: int

    def has(self, block: Block, part: Block) -> bool:
        """Whether a kernel call, which computes part of a block, is among it."""
        return part.pairs >= self.least and block.pairs <= self.most


def _beside(work: Schedule, pair_flops: int, device: torch.device, held: int) -> _Beside:
    least = profile_of(device).flops(BESIDE_FLOPS) / pair_flops
    most = work.blocks[-1].pairs / 2 if held > 1 else 0.0
    return _Beside(least, most, 1 + any(least <= block.pairs <= most for block in work.blocks))


def _by_flag(flags: Sequence[bool]) -> Additions:
    """The indices of each flag that there is."""
    return tuple((flag, tuple(i for i, x in enumerate(flags) if x is flag)) for flag in {*flags})


class Launch(NamedTuple):
    """A launch of the table-driven kernels."""

    cells: Any
    config: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tables on the device."""
        cells = self.cells
        return cells.table, cells.query_programs, cells.key_programs


@dataclass(frozen=True, eq=False)
class Schedule:
    """How the tiles of a group are computed: block by block, or all in one launch.

    Attributes:
        blocks: a kernel call each, sorted by their number of pairs, fewest first.
        table: tiles of the launch.
        packed: more of them.
        flops: operations of forward of `table`.
        parts: the kernel calls of the blocks, for each of the last few layouts: see `parts`.
    """

    blocks: tuple[Block, ...]
    table: tuple[Tile, ...]
    packed: tuple[PackedTiles, ...] = ()
    flops: int = 0
    parts: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def shares_launch(self) -> bool:
        """Whether any tile is computed by the table-driven kernel."""
        return bool(self.table or self.packed)

    @property
    def longest(self) -> tuple[int, int]:
        """The most queries and keys of a cell of the launch."""
        many = [max(tiles.lengths) for tiles in self.packed]
        return (
            max([tile.queries.length for tile in self.table] + many),
            max([tile.keys.length for tile in self.table] + many),
        )


SCHEDULES: WeakKeyDictionary[TileGroup, dict[Hashable, Schedule]] = WeakKeyDictionary()
"""Kept as long as the plan of their group lives. A schedule takes about as many bytes as its
tiles."""
_SCHEDULES_KEPT = 8


def schedule_of(
    group: TileGroup, batch: int, heads_per_kv: int, head_dim: int, table_flops: float
) -> Schedule:
    """How a group is computed; kept for the next call.

    Args:
        group: the tiles.
        batch: sequences in the batch.
        heads_per_kv: query heads of a KV head.
        head_dim: elements of a row of a head.
        table_flops: blocks of at most this number of operations share a launch.
    """
    key = batch, heads_per_kv, head_dim, table_flops
    kept = SCHEDULES.setdefault(group, {})
    return kept.get(key) or keep_few(
        kept, key, partial(_make_schedule, group, *key), _SCHEDULES_KEPT
    )


def _make_schedule(
    group: TileGroup, batch: int, heads_per_kv: int, head_dim: int, table_flops: float
) -> Schedule:
    blocks: list[Block] = []
    table: list[Tile] = []
    packed: list[PackedTiles] = []
    single, launch_flops = list(group.single), 0
    for many in group.packed:
        # A block would be a tile of all rows of the batch: (4, or causal 2) * its pairs operations.
        flops = (2 if many.is_causal else 4) * head_dim * batch * len(many.heads)
        short, long = many.split(math.sqrt(table_flops / flops))
        packed.extend([short] if short.starts else [])
        single.extend(long.tiles())
    for family in families(single):
        cut = list(family.blocks(batch, heads_per_kv))
        flops_of_cut = 4 * head_dim * sum(block.pairs for block in cut)
        if flops_of_cut <= table_flops * len(cut):
            table.extend(family.tiles)
            launch_flops += flops_of_cut
        else:
            blocks.extend(cut)
    blocks.sort(key=attrgetter("pairs"))  # the small ones first, to run beside the others
    return Schedule(tuple(blocks), tuple(table), tuple(packed), launch_flops)


def launch_of(work: Schedule, *key: Any) -> Launch:
    """The tables of a launch, on the device, and its configuration; kept for the next call.

    Args:
        work: of which the launch is.
        key: ``"forward"`` or ``"backward"``, batch, query heads of a KV head, head_dim, dtype and
            device.
    """
    device = key[-1]
    return TABLES.get(work, key, device, partial(_make_launch, work, *key))


def _make_launch(
    work: Schedule,
    direction: str,
    batch: int,
    heads_per_kv: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Launch:
    """The tables of a launch, on the device, and its configuration."""
    from ..kernels import BackwardConfig, Kernel, LaunchConfig, build_cells, default_config

    queries, keys = work.longest

    def config(kernel: Kernel) -> LaunchConfig:
        return default_config(kernel, head_dim, dtype, queries=queries, keys=keys, device=device)

    chosen: LaunchConfig | BackwardConfig
    if direction == "forward":
        chosen = config("forward")
        block_m, block_n = chosen.block_m, chosen.block_n
    else:
        chosen = BackwardConfig(config("dq"), config("dkdv"))
        block_m, block_n = chosen.dq.block_m, chosen.dkdv.block_n
    cells = build_cells(
        work.table,
        work.packed,
        batch=batch,
        heads_per_kv=heads_per_kv,
        block_m=block_m,
        block_n=block_n,
        device=device,
    )
    return Launch(cells, chosen)
