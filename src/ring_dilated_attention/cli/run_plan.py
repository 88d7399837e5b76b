"""What `rda plan` prints: tables of what ranks hold, compute and exchange."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from ..checks import check_size
from ..layout import SequenceLayout
from ..plan import AttentionPlan, check_plan, costs
from ..terminal import Progress, make_console, show_table
from .options import CHECKED_PAIRS
from .plan_document import plan_document
from .plan_tables import RankFigures, rank_tables
from .run_plan_hosts import Hosts, show_hosts
from .sharded import Sharded
from .tile_tables import messages_table, tiles_table

CHECK_BYTES = 500
"""Memory that it takes for each, about: a key of four numbers in two dicts."""

SHOWN_ALL, SHOWN_FEW = 8, 4
"""Ranks that are shown when none are named: of at most SHOWN_ALL all, of more SHOWN_FEW."""


def show(
    sharded: Sharded,
    *,
    shown: Sequence[int] | None = None,
    tiles: bool = False,
    check: bool = False,
    check_limit: int | None = None,
    hosts: Hosts | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Print the plan of a call of `dilated_attention`.

    Args:
        sharded: what is computed, and on how many ranks.
        shown: ranks to show; None: the first, the last and some between.
        tiles: whether to list each tile and message of those ranks.
        check: whether to prove the plan by enumeration.
        check_limit: the most (query, key) pairs and positions that a proof may enumerate; None:
            `options.CHECKED_PAIRS`.
        hosts: where the ranks are, for predicted times; None: nothing is predicted.
        console: where to print; None: standard output.

    Returns:
        The same numbers, for JSON.

    Raises:
        TypeError, ValueError: an option is not allowed.
        PlanError: the proof failed.
    """
    console = console or make_console()
    plan, size, world_size = sharded.plan, sharded.workload.size, sharded.ranks
    if check:  # before the tables: whoever asks too much hears it at once
        _refuse_long_check(plan, CHECKED_PAIRS if check_limit is None else check_limit)
    if shown is None:
        count = world_size if world_size <= SHOWN_ALL else SHOWN_FEW
        shown = [(world_size - 1) * i // max(count - 1, 1) for i in range(count)]
    chosen = [plan.rank(rank) for rank in shown]
    console.print(str(sharded))
    console.print(_decision(plan))
    work = costs.flops_by_rank(plan, size)
    console.print(in_words(costs.balance(work)) + _with_zigzag(plan, size))
    if world_size <= SHOWN_ALL and not plan.gathers and world_size > 1:
        console.print(
            f"balance by ring step: {costs.step_imbalance(plan):.3f} times the mean, if all ranks "
            "waited for each other after every step"
        )
    console.print()
    figures = []
    with Progress("plan", total=len(chosen), unit="ranks") as progress:
        for rank in chosen:
            figures.append(RankFigures.of(rank, size))
            progress.update(len(figures))
    for table in rank_tables(figures, work):
        show_table(console, table)
    for rank in chosen if tiles else ():
        show_table(console, tiles_table(rank))
        show_table(console, messages_table(rank, size))
    if check:
        _prove(plan, console)
    document = plan_document(sharded, figures, work, tiles=tiles, proven=check)
    if hosts is not None:
        document["prediction"] = show_hosts(sharded, hosts, shown, console)
    return document


def _prove(plan: AttentionPlan, console: Console) -> None:
    with Progress("check", total=costs.proof_steps(plan), unit="pairs") as progress:
        check_plan(plan, told=progress.update)
    console.print(
        "proven: every (branch, head, query, visible key) is computed once; sends match receives; "
        "each message has the fewest rows; every remote gradient is returned to its owner"
    )


def _refuse_long_check(plan: AttentionPlan, limit: int) -> None:
    check_size("check_limit", limit, sys.maxsize)
    work = costs.enumerated(plan)
    if work > limit:
        raise ValueError(
            f"--check would enumerate {work:,} pairs of positions, more than {limit:,}: take a "
            f"shorter length or fewer heads, or raise --check-limit (a million takes about "
            f"{CHECK_BYTES / 1000:.1f} GB and 2 seconds)"
        )


def _decision(plan: AttentionPlan) -> str:
    if plan.layout.world_size == 1:
        return "exchange: none on one rank"
    if plan.gathers:
        return "exchange: gather (no rank receives more rows than the largest shard holds)"
    count, pieces = len(plan.rounds), plan.rounds[0].pieces
    return (
        "exchange: ring (some rank receives more rows than the largest shard holds)"
        + f", heads in {count} parts, one after the other, so that buffers hold one part"
        * (count > 1)
        + f", rows in {pieces} pieces" * (pieces > 1)
    )


def in_words(found: costs.Balance) -> str:
    """A sentence on how evenly the operations are dealt to the ranks."""
    if found.world_size == 1:
        return "balance: one rank computes everything"
    return (
        f"balance: rank {found.largest_rank} computes the most, {found.imbalance:.3f} times the "
        f"mean; maximum speed-up on {found.world_size:,} ranks: {found.speed_up_bound:,.1f}"
    )


def _with_zigzag(plan: AttentionPlan, size: costs.TensorSize) -> str:
    """What zigzag would make of causal work that is dealt unevenly."""
    layout = SequenceLayout.zigzag(plan.layout.length, plan.layout.world_size)
    if not plan.is_causal or plan.layout == layout or plan.layout.world_size == 1:
        return ""
    zigzag = replace(plan, layout=layout)
    imbalance = costs.balance(costs.flops_by_rank(zigzag, size)).imbalance
    return f" (layout zigzag: {imbalance:.3f} times the mean)"
