"""Compute groups of tiles: by which back end, in which slices, and into what.

The schedule of a group (`parts`) says which of its tiles are blocks, a kernel call each, whose
results are added into the whole (`accumulate`), and which share a launch, being too small for one
of their own. What a kernel call allocates is bounded: blocks are taken in slices.

A rank's own positions may be computed row by row, over several branches in one launch
(`own_schedule`). The table-driven kernels of one branch after the other wait for each other and
read and write the result once a branch. Where all tiles of a branch are small, its rows join one
launch.

A zero key, of score 0 and value 0, adds exp(0) to the denominator of a softmax and 0 to its
numerator. So m of them are a tile whose out is 0 and whose lse is log m, merged like any other.
Nothing is done for them in backward: they have no gradient, and the merged lse and out, which every
tile of backward uses, already count them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..caches import keep_few
from ..kernels import BackwardConfig, Kernel, LaunchConfig, default_config, own_programs
from ..plan import OwnRange, OwnRuns, RankPlan, TileGroup
from ..tiles import TileBackend, TileGradients, TileInputs
from .accumulate import Accumulator, add, merge, row_sums
from .blocks import Placement
from .device_tables import TABLES
from .parts import KernelCall, Schedule, TileCall, kernel_calls_of, launch_of, schedule_of


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
    if not groups:
        return
    zero = torch.zeros(out.shape[-1], dtype=lse.dtype, device=out.device)
    for group in groups:
        for block in schedule_of(group, out.shape[0], heads_per_kv, 1, table_flops=0.0).blocks:
            out_rows, lse_rows = (block.place_queries(x).of(x) for x in (out, lse))
            log_count = torch.full(
                (1,), math.log(block.keys.length), dtype=lse.dtype, device=out.device
            )
            merge(
                out_rows,
                lse_rows,
                zero.expand(out_rows.shape),
                log_count.expand(lse_rows.shape),
                store=False,
            )


class Inputs(NamedTuple):
    """What a group of tiles is computed of.

    query (batch, local_sequence, heads, head_dim); keys and values (batch, local_sequence,
    kv_heads, head_dim), or `by_slot` of a received message.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Result(NamedTuple):
    """Where results of forward are merged.

    out, like query; lse (batch, heads, local_sequence). `stores`: what they hold at the rows of a
    group is written over.
    """

    out: torch.Tensor
    lse: torch.Tensor
    stores: bool = False


class Gradients(NamedTuple):
    """Where gradients are added: to those of `Inputs`, of the same shapes.

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
        """For `delta`: memory of the stream that asks for it."""
        return torch.empty_like(self.lse)

    @cached_property
    def delta(self) -> torch.Tensor:
        """``rowsum(dout * out)``, like lse. Most back ends work it out for themselves.

        By the stream that is first to ask for it, for which others wait.
        """
        row_sums(self.dout, self.out, self.room)
        return self.room


def forward(
    group: TileGroup, call: TileCall, inputs: Inputs, result: Result, sums: Accumulator
) -> None:
    """Compute a group and merge it into a result, in place, at the group's rows.

    That is done through `sums`, which is to be joined when all groups are computed.
    """
    query, (out, lse, store) = inputs.query, result
    head_dim, backend = query.shape[3], call.selection.backend
    work = schedule_of(group, call.batch, call.heads_per_kv, head_dim, call.limits.forward)
    if work.shares_launch:  # first: it does not have to wait for additions of its group
        add_all = partial(_forward_launch, work, call, inputs, result)
        sums.run(add_all, *inputs, into=(out, lse, *inputs[1:]), holds=False)
    totals = out, lse.transpose(1, 2)
    for one in kernel_calls_of(work, call, inputs, (), totals, (store, False), sums.most_held):
        assert backend is not None
        tile, (out_rows, lse_rows) = _tile(one, call, inputs), _views(one.totals, totals)
        if not one.added:
            assert backend.forward_into is not None
            backend.forward_into(tile, out_rows, lse_rows)
            continue
        found = backend.forward(tile)
        add_all = partial(merge, out_rows, lse_rows, *found, store=store)
        sums.run(add_all, *found, into=(out_rows, lse_rows), is_long=one.is_long)
        del found, add_all  # before the next call makes its own


def _forward_launch(work: Schedule, call: TileCall, inputs: Inputs, result: Result) -> None:
    """All tiles that share a launch, merged where they belong."""
    from ..kernels import tiles_forward

    query, (out, lse, store) = inputs.query, result
    launch = launch_of(
        work, "forward", call.batch, call.heads_per_kv, query.shape[3], query.dtype, query.device
    )
    tiles_forward(
        *inputs,
        out,
        lse,
        launch.cells,
        is_causal=launch.cells.is_causal,
        scale=call.scale,
        store=store,
        config=launch.config,
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
    query, backend = inputs.query, call.selection.backend
    work = schedule_of(group, call.batch, call.heads_per_kv, query.shape[3], call.limits.backward)
    if work.shares_launch:  # first, as in forward
        add_all = partial(_backward_launch, work, call, inputs, merged, gradients)
        reads = *inputs, merged.dout, merged.out, merged.lse, merged.room
        sums.run(add_all, *reads, into=(*gradients[:3], *inputs[1:]), holds=False)
    of_merged = merged.dout, merged.out, merged.lse.transpose(1, 2)
    totals = gradients[:3]
    stores = gradients.stores_query, gradients.stores_keys
    for one in kernel_calls_of(work, call, inputs, of_merged, totals, stores, sums.most_held):
        assert backend is not None
        tile_gradients = TileGradients(*_views(one.merged, of_merged))
        places = _views(one.totals, totals)
        found = _gradients(backend, _tile(one, call, inputs), tile_gradients, places, one.added)
        if found:
            added = places[: one.added]
            add_all = partial(_add_all, one.additions, added, found)
            sums.run(add_all, *found, into=added, is_long=one.is_long)
            del add_all
        del found  # before the next call makes its own


def _gradients(
    backend: TileBackend,
    tile: TileInputs,
    gradients: TileGradients,
    totals: Sequence[torch.Tensor],
    added: int,
) -> Sequence[torch.Tensor]:
    """Compute a kernel call: the first `added` gradients; the others are written into `totals`."""
    if added == 3:
        return backend.backward(tile, gradients)
    assert backend.backward_into is not None
    found = [backend.empty_like(tile.q)] if added else []
    backend.backward_into(tile, gradients, *found, *totals[added:])
    return backend.ordered(*found)


def _backward_launch(
    work: Schedule, call: TileCall, inputs: Inputs, merged: Merged, gradients: Gradients
) -> None:
    """The gradients of all tiles that share a launch, added where they belong."""
    from ..kernels import tiles_backward

    query = inputs.query
    launch = launch_of(
        work, "backward", call.batch, call.heads_per_kv, query.shape[3], query.dtype, query.device
    )
    tiles_backward(
        merged.dout,
        *inputs,
        merged.lse,
        merged.delta,
        *gradients[:3],
        launch.cells,
        is_causal=launch.cells.is_causal,
        scale=call.scale,
        store=gradients.stores_query,
        store_keys=gradients.stores_keys,
        config=launch.config,
    )


def _add_all(
    additions: Sequence[tuple[bool, Sequence[int]]],
    totals: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
) -> None:
    for store, chosen in additions:
        add([totals[i] for i in chosen], [found[i] for i in chosen], store=store)


def _views(places: Sequence[Placement], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [place.of(tensor) for place, tensor in zip(places, tensors, strict=True)]


def _tile(one: KernelCall, call: TileCall, inputs: Inputs) -> TileInputs:
    query, keys, values = _views(one.inputs, inputs)
    return TileInputs(query, keys, values, one.is_causal, call.scale, one.memo)


BLOCK_ROWS = 64
"""Rows of a block of the kernels at most."""
FEWEST_ROWS = 4
"""Of a cell, for its branch to be computed row by row: with fewer, most of a block is empty."""
MOST_SHARE = 0.25
"""Of the blocks of all rows: as many may be nearly empty. A few cells of fewer rows do not get a
launch of their own."""


class OwnLaunch:
    """Ranges of rows that are computed in one launch; keeps no reference to its plan.

    `stores` are bits of branches: see `own_programs.build_programs`.
    """

    def __init__(self, one: RankPlan, ranges: tuple[OwnRange, ...], stores: int) -> None:
        plan = one.plan
        self.ranges, self._stores = ranges, stores
        self.is_causal, self.zero_keys = plan.is_causal, plan.pattern.zero_keys
        self._branches = _branches(plan.pattern.branches)
        self._offsets = plan.tiling.offsets
        self._rows = max([each.high - each.low for each in ranges])
        self._configs: dict[Hashable, LaunchConfig] = {}

    def config(self, kernel: Kernel, query: torch.Tensor) -> LaunchConfig:
        """How a kernel is launched."""
        given, device, rows = (kernel, query.shape[3], query.dtype), query.device, self._rows
        key = (*given, device)
        if key not in self._configs:
            self._configs[key] = default_config(*given, queries=rows, keys=rows, device=device)
        return self._configs[key]

    def programs(self, block: int, device: torch.device) -> own_programs.Programs:
        """The tables on the device, for blocks of `block` rows."""
        build = partial(
            own_programs.build_programs,
            self.ranges,
            self._branches,
            self._offsets,
            block=block,
            is_causal=self.is_causal,
            stores=self._stores,
            device=device,
        )
        return TABLES.get(self, (block, device), device, build)


@dataclass(frozen=True, eq=False)
class OwnSchedule:
    """How a rank computes tiles whose queries and keys it holds, in this order.

    Attributes:
        covering: no group, or the one that has every row as query and key once, and so needs no
            result to add to; but for rows that a launch has.
        launches: what is computed row by row.
        others: further groups.
        zero_keys: those that are left to be merged.
    """

    covering: tuple[TileGroup, ...]
    launches: tuple[OwnLaunch, ...]
    others: tuple[TileGroup, ...]
    zero_keys: tuple[TileGroup, ...]


_own_schedules: WeakKeyDictionary[RankPlan, dict[Hashable, OwnSchedule]] = WeakKeyDictionary()
"""As long as their plans live."""
_SCHEDULES_KEPT = 8


def own_schedule(one: RankPlan, call: TileCall, head_dim: int) -> OwnSchedule:
    """Schedule the tiles whose queries and KV are local to a rank; cached for the next call."""
    key = call.batch, call.heads_per_kv, head_dim, call.limits.own
    kept = _own_schedules.setdefault(one, {})
    return kept.get(key) or keep_few(kept, key, partial(_make_own, one, *key), _SCHEDULES_KEPT)


def _make_own(
    one: RankPlan, batch: int, heads_per_kv: int, head_dim: int, flops: float
) -> OwnSchedule:
    plan = one.plan
    longest = max((stop - start for start, stop in pairwise(plan.documents)), default=0)
    fits = (
        longest <= own_programs.MOST_POSITIONS
        and len(plan.pattern.dilation_rates) <= own_programs.MOST_BRANCHES
    )
    if not flops or not fits:
        groups = one.local_groups
        first = groups[:1] if one.covers else ()
        return OwnSchedule(first, (), groups[len(first) :], one.zero_keys)
    chosen = ByRows(one, (2 if plan.is_causal else 4) * head_dim * batch * heads_per_kv, flops)
    work = one.own_work(chosen)
    launches: list[OwnLaunch] = []
    if work.ranges:
        stores = 1 << plan.covering if one.covers and plan.covering is not None else 0
        parts = own_programs.launches_of(work.ranges, _branches(plan.pattern.branches), BLOCK_ROWS)
        launches = [OwnLaunch(one, ranges, stores) for ranges in parts]
    covers = one.covers and bool(work.groups) and work.groups[0].branch == plan.covering
    first = work.groups[: int(covers)]
    others = (*work.groups[len(first) :], *work.crossing)
    return OwnSchedule(first, tuple(launches), others, work.zero_keys)


class ByRows:
    """Which runs of a branch are computed row by row: those of at most `flops` operations.

    `factor`: operations of forward for each pair of a KV head.
    """

    def __init__(self, one: RankPlan, factor: int, flops: float) -> None:
        plan = one.plan
        self._rates, self._heads = plan.pattern.dilation_rates, plan.tiling.heads
        self._factor, self._flops = factor, flops

    def __call__(self, branch: int, runs: OwnRuns) -> list[bool]:
        """Of each run of a branch, whether it is computed row by row."""
        rate = self._rates[branch]
        factor = self._factor * len(self._heads[branch])
        if rate > own_programs.MOST_STEP:
            return [False] * len(runs)
        fewest, (shortest, longest) = FEWEST_ROWS * rate if rate > 1 else 0, runs.sizes
        if (
            shortest < fewest
            and runs.shorter_than(fewest) * rate <= MOST_SHARE * runs.rows / BLOCK_ROWS
        ):
            fewest = 0
        if (
            shortest >= fewest  # as a rule, and so is the next
            and factor * runs.most_copies * (-(-longest // rate)) ** 2 <= self._flops
        ):
            return [True] * len(runs)
        # Heads of different offsets share a kernel call where they have equally many rows.
        return [
            size >= fewest
            and factor * copies * (-(-size // rate)) ** 2 / (1 if size % rate == 0 else 2)
            <= self._flops
            for size, _, _, copies in runs
        ]


def _branches(branches: Sequence[tuple[int | None, int]]) -> list[tuple[int, int]]:
    return [(length or own_programs.MOST_POSITIONS, rate) for length, rate in branches]


def forward_own(launch: OwnLaunch, call: TileCall, inputs: Inputs, result: Result) -> None:
    """Compute a launch and merge it into a result, or write it where nothing else comes before."""
    from ..kernels import ranges_forward

    config = launch.config("own_forward", inputs.query)
    ranges_forward(
        *inputs,
        result.out,
        result.lse,
        launch.programs(config.block_m, inputs.query.device),
        is_causal=launch.is_causal,
        zero_keys=launch.zero_keys,
        scale=call.scale,
        config=config,
    )


def backward_own(
    launch: OwnLaunch,
    call: TileCall,
    inputs: Inputs,
    merged: Merged,
    gradients: Gradients,
    *,
    detached: bool,
) -> None:
    """Compute the gradients of a launch and add them up, or write them where they come first.

    `detached` takes the weights of branches for constants.
    """
    from ..kernels import ranges_backward

    device = inputs.query.device
    dq, dkdv = launch.config("own_dq", inputs.query), launch.config("own_dkdv", inputs.query)
    ranges_backward(
        merged.dout,
        *inputs,
        merged.out,
        merged.lse,
        *gradients[:3],
        launch.programs(dq.block_m, device),
        launch.programs(dkdv.block_n, device),
        is_causal=launch.is_causal,
        zero_keys=launch.zero_keys,
        detached=detached,
        scale=call.scale,
        config=BackwardConfig(dq, dkdv),
    )
