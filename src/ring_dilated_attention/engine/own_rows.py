"""A rank's own rows, computed row by row over several branches in one launch.

The table-driven kernels of one branch after the other wait for each other and read and write the
result once a branch. Where all tiles of a branch are small, its rows join one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

import torch

from .. import kernels
from ..kernels import BackwardConfig, Kernel, LaunchConfig, default_config, own_programs
from ..pattern import Length
from ..plan import OwnRange, OwnRuns, RankPlan, TileGroup
from .compute import Gradients, Inputs, Merged, Result, TileCall
from .device_tables import TABLES

BLOCK_ROWS = 64
"""Rows of a block of the kernels at most."""
FEWEST_ROWS = 4
"""Fewest rows of a cell that is computed row by row: with fewer, most of a block is empty."""
MOST_SHARE = 0.25
"""Largest share of blocks that may be nearly empty, for a few cells of fewer rows to need no launch
of their own."""


_config = lru_cache(maxsize=256)(default_config)


class OwnLaunch:
    """Ranges of rows that are computed in one launch; keeps no reference to its plan.

    `stores` are bits of branches: see `own_programs.build_programs`.
    """

    def __init__(self, one: RankPlan, ranges: tuple[OwnRange, ...], stores: int) -> None:
        plan = one.plan
        self.ranges, self.is_causal = ranges, plan.is_causal
        self.zero_keys = plan.pattern.zero_keys
        self._rows = max([each.high - each.low for each in ranges])
        self._build = partial(
            own_programs.build_programs,
            ranges,
            _branches(plan.pattern.branches),
            plan.tiling.offsets,
            is_causal=plan.is_causal,
            stores=stores,
        )

    def config(self, kernel: Kernel, query: torch.Tensor) -> LaunchConfig:
        """How a kernel is launched."""
        given, rows = (kernel, query.shape[3], query.dtype), self._rows
        return _config(*given, queries=rows, keys=rows, device=query.device)

    def programs(self, block: int, device: torch.device) -> own_programs.Programs:
        """The tables on the device, for blocks of `block` rows."""
        build = partial(self._build, block=block, device=device)
        return TABLES.get(self, (block, device), device, build)


@dataclass(frozen=True, eq=False)
class OwnSchedule:
    """How a rank computes tiles whose queries and keys it holds, in this order."""

    # no group, or the one that has every row as query and key once, and so needs no result
    # to add to; but for rows that a launch has
    covering: tuple[TileGroup, ...]
    launches: tuple[OwnLaunch, ...]  # what is computed row by row
    others: tuple[TileGroup, ...]  # further groups
    zero_keys: tuple[TileGroup, ...]  # those that are left to be merged


def own_schedule(one: RankPlan, call: TileCall, head_dim: int) -> OwnSchedule:
    """Schedule the tiles whose queries and KV are local to a rank."""
    plan, flops = one.plan, call.limits.own
    branches = _branches(plan.pattern.branches)
    longest = max((stop - start for start, stop in pairwise(plan.documents)), default=0)
    fits = longest <= own_programs.MOST_POSITIONS and len(branches) <= own_programs.MOST_BRANCHES
    if flops and fits:
        factor = (2 if plan.is_causal else 4) * head_dim * call.batch * call.heads_per_kv
        work = one.own_work(partial(by_rows, one, factor, flops))
    else:
        work = one.own_tiles
    launches: list[OwnLaunch] = []
    if work.ranges:
        stores = 1 << plan.covering if one.covers and plan.covering is not None else 0
        parts = own_programs.launches_of(work.ranges, branches, BLOCK_ROWS)
        launches = [OwnLaunch(one, ranges, stores) for ranges in parts]
    covers = one.covers and bool(work.groups) and work.groups[0].branch == plan.covering
    first = work.groups[: int(covers)]
    others = (*work.groups[len(first) :], *work.crossing)
    return OwnSchedule(first, tuple(launches), others, work.zero_keys)


def by_rows(one: RankPlan, factor: int, flops: float, branch: int, runs: OwnRuns) -> Sequence[bool]:
    """Choose the runs of a branch to compute row by row: those of at most `flops` operations.

    `factor`: operations of forward for each pair of a KV head.
    """
    rate = one.plan.pattern.dilation_rates[branch]
    of_branch = factor * len(one.plan.tiling.heads[branch])
    if rate > own_programs.MOST_STEP:
        return [False] * len(runs)
    fewest = FEWEST_ROWS * rate if rate > 1 else 0
    if runs.shorter_than(fewest) * rate <= MOST_SHARE * runs.rows / BLOCK_ROWS:
        fewest = 0
    # Heads of different offsets share a kernel call where they have equally many rows.
    return [
        size >= fewest
        and of_branch * copies * (-(-size // rate)) ** 2 / (1 if size % rate == 0 else 2) <= flops
        for size, _, _, copies in runs
    ]


def _branches(branches: Sequence[tuple[Length, int]]) -> list[tuple[int, int]]:
    """Segment length and rate of each branch; windows, which no launch has, are a document each."""
    longest = own_programs.MOST_POSITIONS
    return [(w if isinstance(w, int) else longest, rate) for w, rate in branches]


def forward_own(launch: OwnLaunch, call: TileCall, inputs: Inputs, result: Result) -> None:
    """Compute a launch and merge it into a result, or write it where nothing else comes before."""
    config = launch.config("own_forward", inputs.query)
    kernels.ranges_forward(
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
    device = inputs.query.device
    dq, dkdv = launch.config("own_dq", inputs.query), launch.config("own_dkdv", inputs.query)
    kernels.ranges_backward(
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
