"""A rank's own positions: what is computed row by row, over several branches in one launch.

The table-driven kernels of one branch after the other (`schedule`) wait for each other and read and
write the result once a branch. Where all tiles of a branch are small, its rows join one launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..caches import keep_few
from ..kernels import MOST_POSITIONS, Programs
from ..plan import OwnRange, OwnRun, RankPlan, TileGroup
from .accumulate import Accumulator
from .compute import Gradients, Inputs, Merged, Result, TileCall
from .device_tables import TABLES

Direction = Literal["forward", "backward"]
_BLOCK = 64
"""Rows of a block of the kernels at most."""


class OwnLaunch:
    """Ranges of rows that are computed in one launch.

    Args:
        one: what the rank does.
        ranges: of which rows, and in which branches.
        stores: bits of branches; see `build_programs`.
    """

    def __init__(self, one: RankPlan, ranges: tuple[OwnRange, ...], stores: int) -> None:
        self.plan, self.ranges, self.stores = one.plan, ranges, stores


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


_schedules: WeakKeyDictionary[RankPlan, dict[Hashable, OwnSchedule]] = WeakKeyDictionary()
"""As long as their plans live."""
_SCHEDULES_KEPT = 8


def own_schedule(one: RankPlan, call: TileCall, head_dim: int) -> OwnSchedule:
    """How a rank computes what it holds all of; kept for the next call.

    Args:
        one: what the rank does.
        call: what all tiles have in common.
        head_dim: elements of a row of a head.
    """
    key = call.selection.own_flops, call.batch, call.heads_per_kv, head_dim
    kept = _schedules.setdefault(one, {})
    return kept.get(key) or keep_few(kept, key, partial(_make, one, *key), _SCHEDULES_KEPT)


def _make(one: RankPlan, flops: float, batch: int, heads_per_kv: int, head_dim: int) -> OwnSchedule:
    plan = one.plan
    longest = max((stop - start for start, stop in pairwise(plan.documents)), default=0)
    # Where there are other ranks, a group at a time is computed behind what they send.
    if not flops or one.world_size > 1 or longest > MOST_POSITIONS:
        first = one.local_groups[:1] if one.covers else ()
        return OwnSchedule(first, (), one.local_groups[len(first) :], one.zero_keys)
    factor = (2 if plan.is_causal else 4) * head_dim * batch * heads_per_kv
    heads = [len(each) for each in plan.tiling.heads]

    def by_rows(branch: int, run: OwnRun) -> bool:
        rate = plan.pattern.dilation_rates[branch]
        rows = -(-run.size // rate)
        # Heads of different offsets share a kernel call where they have equally many rows.
        calls = 1 if run.size % rate == 0 else 2
        return factor * heads[branch] * run.copies * rows**2 <= flops * calls

    work = one.own_work(by_rows)
    launches: list[OwnLaunch] = []
    if work.ranges:
        from ..kernels import launches_of

        stores = 1 << plan.covering if one.covers and plan.covering is not None else 0
        parts = launches_of(work.ranges, _branches(plan.pattern.branches), _BLOCK)
        launches = [OwnLaunch(one, ranges, stores) for ranges in parts]
    covers = one.covers and bool(work.groups) and work.groups[0].branch == plan.covering
    first = work.groups[: int(covers)]
    return OwnSchedule(first, tuple(launches), work.groups[len(first) :], work.zero_keys)


def _branches(branches: Sequence[tuple[int | None, int]]) -> list[tuple[int, int]]:
    return [(length or MOST_POSITIONS, rate) for length, rate in branches]


class _Tables(NamedTuple):
    """Programs by the kernel that they are for, and how it is launched."""

    programs: dict[str, Programs]
    config: Any

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tables on the device."""
        return tuple(x for each in self.programs.values() for x in each.tensors)


def forward_own(
    launch: OwnLaunch, call: TileCall, inputs: Inputs, result: Result, sums: Accumulator
) -> None:
    """Compute a launch and merge it into a result, or write it where nothing else comes before.

    Args:
        launch: which rows.
        call: what all tiles have in common.
        inputs: this rank's query, key and value.
        result: changed in place.
        sums: through which other results are merged, which come first.
    """
    from ..kernels import own_forward

    sums.join()
    tables = _tables(launch, inputs.query, "forward")
    own_forward(
        *inputs,
        result.out,
        result.lse,
        tables.programs["own_forward"],
        is_causal=launch.plan.is_causal,
        zero_keys=launch.plan.pattern.zero_keys,
        scale=call.scale,
        config=tables.config,
    )


def backward_own(
    launch: OwnLaunch,
    call: TileCall,
    inputs: Inputs,
    merged: Merged,
    gradients: Gradients,
    sums: Accumulator,
    *,
    detached: bool,
) -> None:
    """Compute the gradients of a launch and add them up, or write them where they come first.

    Args:
        launch: which rows.
        call: what all tiles have in common.
        inputs: this rank's query, key and value.
        merged: the merged result of the whole call.
        gradients: changed in place.
        sums: through which other gradients are added, which come first.
        detached: whether to take the weights of branches for constants.
    """
    from ..kernels import own_backward

    sums.join()
    tables = _tables(launch, inputs.query, "backward")
    own_backward(
        merged.dout,
        *inputs,
        merged.out,
        merged.lse,
        *gradients[:3],
        tables.programs["own_dq"],
        tables.programs["own_dkdv"],
        is_causal=launch.plan.is_causal,
        zero_keys=launch.plan.pattern.zero_keys,
        detached=detached,
        scale=call.scale,
        config=tables.config,
    )


def _tables(launch: OwnLaunch, query: torch.Tensor, direction: Direction) -> _Tables:
    key = direction, query.shape[3], query.dtype, query.device
    return TABLES.get(launch, key, query.device, partial(_make_tables, launch, *key))


def _make_tables(
    launch: OwnLaunch,
    direction: Direction,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Tables:
    from ..kernels import BackwardConfig, Kernel, LaunchConfig, build_programs, default_config

    plan = launch.plan
    rows = max(each.high - each.low for each in launch.ranges)
    offsets = [
        [dict(heads).get(head, -1) for head in range(plan.num_kv_heads)]
        for heads in plan.tiling.heads
    ]
    programs: dict[str, Programs] = {}

    def config(kernel: Kernel) -> LaunchConfig:
        chosen = default_config(kernel, head_dim, dtype, queries=rows, keys=rows)
        programs[kernel] = build_programs(
            launch.ranges,
            _branches(plan.pattern.branches),
            offsets,
            block=chosen.block_n if kernel == "own_dkdv" else chosen.block_m,
            is_causal=plan.is_causal,
            stores=launch.stores,
            device=device,
        )
        return chosen

    if direction == "forward":
        return _Tables(programs, config("own_forward"))
    return _Tables(programs, BackwardConfig(config("own_dq"), config("own_dkdv")))
