"""What `rda plan` prints: tables of what ranks hold, compute and exchange."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from ..checks import MOST_PLANNED_RANKS, check_pattern, check_size
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_choice
from ..plan import (
    AttentionPlan,
    Balance,
    TensorSize,
    balance,
    check_plan,
    enumerated,
    flops_by_rank,
    plan_attention,
    step_imbalance,
)
from .plan_tables import (
    compute_table,
    exchange_table,
    memory_table,
    messages_table,
    rows_table,
    tiles_table,
)

LAYOUTS = {"contiguous": SequenceLayout.contiguous, "zigzag": SequenceLayout.zigzag}
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
CHECK_LIMIT = 2_000_000
"""(Query, key) pairs and positions that `--check` enumerates unless it is told otherwise."""

CHECK_BYTES = 500
"""Memory that it takes for each, about: a key of four numbers in two dicts."""

SHOWN_ALL, SHOWN_FEW = 8, 4
"""When no ranks are named: all of so many, or else so many of them."""


def show(
    pattern: DilatedPattern,
    *,
    length: int,
    world_size: int,
    layout: str,
    is_causal: bool,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int,
    batch: int,
    dtype: str,
    documents: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    tiles: bool = False,
    check: bool = False,
    check_limit: int = CHECK_LIMIT,
    console: Console | None = None,
) -> None:
    """Print the plan of a call of `dilated_attention`.

    Args:
        pattern: the branches.
        length: positions of the whole sequence.
        world_size: number of ranks.
        layout: a key of `LAYOUTS`.
        is_causal: whether queries see no later keys.
        num_heads: query heads.
        num_kv_heads: KV heads; None: as many.
        head_dim: elements of a row of a head.
        batch: sequences in the batch.
        dtype: a key of `DTYPES`.
        documents: cumulative lengths of packed documents; None: one document.
        ranks: ranks to show; None: the first, the last and some between.
        tiles: whether to list each tile and message of those ranks.
        check: whether to prove the plan by enumeration.
        check_limit: the most (query, key) pairs and positions that a proof may enumerate.
        console: where to print; None: standard output.

    Raises:
        TypeError, ValueError: an option is not allowed.
        PlanError: the proof failed.
    """
    console = console or Console()
    check_choice("layout", layout, tuple(LAYOUTS))
    check_choice("dtype", dtype, tuple(DTYPES))
    check_size("length", length)
    check_size("ranks", world_size, MOST_PLANNED_RANKS)
    check_size("heads", num_heads)
    check_pattern(pattern, documents)
    size = TensorSize(
        batch=check_size("batch", batch),
        head_dim=check_size("head_dim", head_dim),
        element_size=DTYPES[dtype],
    )
    plan = plan_attention(
        pattern,
        LAYOUTS[layout](length, world_size),
        is_causal=is_causal,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        documents=documents,
    )
    if check:  # before the tables: whoever asks too much hears it at once
        _refuse_long_check(plan, check_limit)
    if ranks is None:
        count = world_size if world_size <= SHOWN_ALL else SHOWN_FEW
        ranks = [(world_size - 1) * i // max(count - 1, 1) for i in range(count)]
    chosen = [plan.rank(rank) for rank in ranks]
    console.print(
        f"[bold]{pattern}[/bold]: {length:,} positions on {world_size} "
        f"{'rank' if world_size == 1 else 'ranks'} ({layout}), "
        f"{plan.num_heads} heads of {head_dim}, {plan.num_kv_heads} KV heads, batch {batch}, "
        f"{dtype}, {'causal' if is_causal else 'not causal'}{in_documents(documents)}"
    )
    console.print(_decision(plan))
    work = flops_by_rank(plan, size)
    console.print(in_words(balance(work)) + _with_zigzag(plan, size, layout))
    if world_size <= SHOWN_ALL and not plan.gathers and world_size > 1:
        console.print(
            f"step by step: {step_imbalance(plan):.3f} times the mean, if all ranks met at every "
            "step of the ring"
        )
    console.print(compute_table(chosen, size, work))
    console.print(rows_table(chosen, size))
    console.print(exchange_table(chosen, size))
    console.print(memory_table(chosen, size))
    if tiles:
        for rank in chosen:
            console.print(tiles_table(rank))
            console.print(messages_table(rank, size))
    if check:
        check_plan(plan)
        console.print(
            "proven: every (branch, head, query, visible key) is computed once; sends match "
            "receives; each message is the fewest rows; every remote gradient comes home"
        )


def _refuse_long_check(plan: AttentionPlan, limit: int) -> None:
    check_size("check_limit", limit, sys.maxsize)
    work = enumerated(plan)
    if work > limit:
        raise ValueError(
            f"--check would enumerate {work:,} pairs of positions, more than {limit:,}: take a "
            f"shorter length or fewer heads, or raise --check-limit (a million takes about "
            f"{CHECK_BYTES / 1000:.1f} GB and 2 seconds)"
        )


def in_documents(documents: Sequence[int] | None) -> str:
    """How many documents there are, for a title; nothing if there is one."""
    return "" if documents is None else f", {len(documents) - 1:,} documents"


def _decision(plan: AttentionPlan) -> str:
    if plan.layout.world_size == 1:
        return "one rank: nothing is exchanged"
    if plan.gathers:
        return "exchange: gather (no rank receives more rows than the largest shard holds)"
    count, pieces = len(plan.slices), plan.slices[0].pieces
    return (
        "exchange: ring (a rank may receive more rows than the largest shard holds)"
        + f", in {count} parts of the heads one after the other, so that buffers hold one"
        * (count > 1)
        + f", rows in {pieces} pieces" * (pieces > 1)
    )


def in_words(found: Balance) -> str:
    """A sentence on how evenly the operations are dealt to the ranks."""
    if found.world_size == 1:
        return "balance: one rank computes everything"
    return (
        f"balance: rank {found.largest_rank} computes the most, {found.imbalance:.3f} times the "
        f"mean; {found.world_size} ranks can be at most {found.speed_up_bound:.1f} times as fast "
        "as one"
    )


def _with_zigzag(plan: AttentionPlan, size: TensorSize, layout: str) -> str:
    """What zigzag would make of causal work that is dealt unevenly."""
    if not plan.is_causal or layout == "zigzag" or plan.layout.world_size == 1:
        return ""
    zigzag = replace(plan, layout=LAYOUTS["zigzag"](plan.layout.length, plan.layout.world_size))
    return f" (zigzag: {balance(flops_by_rank(zigzag, size)).imbalance:.3f} times the mean)"
