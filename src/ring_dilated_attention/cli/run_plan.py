"""What `rda plan` prints: tables of what ranks hold, compute and exchange."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ..checks import MOST_PLANNED_RANKS, check_pattern, check_size
from ..engine import kernel_calls
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_choice
from ..plan import (
    AttentionPlan,
    Balance,
    Message,
    RankPlan,
    Rows,
    TensorSize,
    Tile,
    balance,
    check_plan,
    enumerated,
    flops_by_rank,
    memory,
    plan_attention,
    returned_bytes,
    step_imbalance,
    traffic,
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
    console.print(_compute_table(chosen, size, work))
    console.print(_rows_table(chosen, size))
    console.print(_exchange_table(chosen, size))
    console.print(_memory_table(chosen, size))
    if tiles:
        for rank in chosen:
            console.print(_tiles_table(rank))
            console.print(_messages_table(rank, size))
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


def _parts(rank: RankPlan) -> tuple[RankPlan, ...]:
    return rank.parts(gathers=rank.plan.gathers)


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


def make_table(title: str, *columns: str) -> Table:
    """An empty table of right-aligned columns."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True
    )
    for column in columns:
        table.add_column(column, justify="right")
    return table


class RowBytes(NamedTuple):
    """Bytes of the rows that a call of one rank reads in place, and of those that it copies.

    Attributes:
        in_place: rows of query, key and value that tiles read as strided views, in forward; each as
            often as a tile reads it.
        packed: rows of key and value copied into messages, in forward and in backward again; what
            one rank after another is sent is copied once.
        spread: rows of received messages copied because branches share them; also twice.
        home: rows of gradients that come back in backward, and are added to dkey and dvalue.
    """

    in_place: int
    packed: int
    spread: int
    home: int


def row_bytes(rank: RankPlan, size: TensorSize) -> RowBytes:
    """Count the rows that a rank reads in place, and those that it copies."""
    members = rank.plan.num_heads // rank.plan.num_kv_heads
    received = [step.receive for step in rank.steps() if step.receive is not None]
    remote = [tile for step in rank.steps() for tile in step.tiles]  # their keys: see `spread`
    rows = members * sum(_row_count(tile, tile.queries) for tile in (*rank.local, *remote))
    rows += 2 * sum(_row_count(tile, tile.keys) for tile in rank.local)
    sent, packed, last = rank.total_sent_rows, 0, None
    for message in [step.send for step in rank.steps() if step.send is not None]:
        packed += 0 if message.is_same_for(last) else message.rows
        last = message
    return RowBytes(
        in_place=rows * size.batch * size.head_dim * size.element_size,
        packed=size.key_value_bytes(packed),
        spread=size.key_value_bytes(sum(m.slots for m in received if m.rows < m.slots)),
        home=returned_bytes(rank, size, sent),
    )


def _row_count(tile: Tile, rows: Rows) -> int:
    return tile.segments * len(tile.heads) * rows.length


def _compute_table(ranks: Sequence[RankPlan], size: TensorSize, work: Sequence[int]) -> Table:
    table = make_table(
        "Compute of one call (tiles of a group may share one launch)",
        "rank",
        "positions",
        "local tiles",
        "kernel calls",
        "remote tiles",
        "kernel calls",
        "groups",
        "FLOPs forward",
        "of the mean",
    )
    for rank in ranks:
        parts = _parts(rank)
        local = [group for part in parts for group in part.local_groups]
        remote = [group for part in parts for step in part.steps() for group in step.groups]
        table.add_row(
            str(rank.index),
            f"{rank.plan.layout.local_length(rank.index):,}",
            str(sum(len(group.tiles) for group in local)),
            str(kernel_calls(local, rank, size.batch)),
            str(sum(len(group.tiles) for group in remote)),
            str(kernel_calls(remote, rank, size.batch)),
            str(len(local) + len(remote)),
            scaled(work[rank.index], "", 1000),
            of_mean(work[rank.index], work),
        )
    return table


def _rows_table(ranks: Sequence[RankPlan], size: TensorSize) -> Table:
    table = make_table(
        "Rows read in place, as strided views, and rows copied for messages",
        "rank",
        "read in place",
        "packed to send",
        "spread on arrival",
        "gradients home",
    )
    table.caption = "A query, key or value with a strided last dimension is copied whole"
    table.caption_justify = "left"
    for rank in ranks:
        table.add_row(str(rank.index), *map(in_bytes, row_bytes(rank, size)))
    return table


def _exchange_table(ranks: Sequence[RankPlan], size: TensorSize) -> Table:
    table = make_table(
        "Exchange of one call (the lower bound: each needed row once)",
        "rank",
        "rows in",
        "rows out",
        "sent forward",
        "sent backward",
        "messages",
    )
    for rank in ranks:
        moved = traffic(rank, size)
        table.add_row(
            str(rank.index),
            f"{rank.total_received_rows:,}",
            f"{rank.total_sent_rows:,}",
            in_bytes(moved.forward_sent),
            in_bytes(moved.backward_sent),
            str(sum(step.send is not None for part in _parts(rank) for step in part.steps())),
        )
    return table


def _memory_table(ranks: Sequence[RankPlan], size: TensorSize) -> Table:
    names = ("query", "key", "value", "out", "lse", "buffers", "total")
    table = make_table("Memory of one forward call", "rank", *names)
    for rank in ranks:
        held = memory(rank, size)
        table.add_row(str(rank.index), *(in_bytes(getattr(held, name)) for name in names))
    return table


def _tiles_table(rank: RankPlan) -> Table:
    table = make_table(
        f"Tiles of rank {rank.index} (row i of head number j in segment s)",
        "step",
        "branch",
        "KV heads",
        "segments",
        "causal",
        "queries at local row",
        "keys at local row, or slot of the message",
    )

    def add(step: int, tile: Tile) -> None:
        table.add_row(
            str(step),
            str(rank.plan.pattern.branches[tile.branch]),
            _heads(tile.heads),
            str(tile.segments),
            "yes" if tile.is_causal else "no",
            _rows(tile.queries),
            _rows(tile.keys),
        )

    for part in _parts(rank):
        for tile in part.local:
            add(0, tile)
        for step in part.steps():
            for tile in step.tiles:
                add(step.step, tile)
    return table


def _messages_table(rank: RankPlan, size: TensorSize) -> Table:
    table = make_table(
        f"Messages of rank {rank.index}: K and V, and in backward their gradients the other way",
        "step",
        "",
        "peer",
        "rows",
        "K and V",
        "gradients",
    )

    def add(step: int, what: str, peer: int, message: Message) -> None:
        table.add_row(
            str(step),
            what,
            str(peer),
            f"{message.rows:,}",
            in_bytes(size.key_value_bytes(message.rows)),
            in_bytes(returned_bytes(rank, size, message.rows)),
        )

    for step in [step for part in _parts(rank) for step in part.steps()]:
        if step.send is not None:
            add(step.step, "sends to", step.send.receiver, step.send)
        if step.receive is not None:
            add(step.step, "receives from", step.receive.sender, step.receive)
    return table


def _heads(heads: range) -> str:
    if len(heads) == 1:
        return str(heads[0])
    return f"{heads[0]} to {heads[-1]}" + (f" by {heads.step}" if heads.step > 1 else "")


def _rows(rows: Rows) -> str:
    terms = [
        f"{stride} {name}" if stride > 1 else name
        for name, stride in (
            ("s", rows.segment_stride),
            ("j", rows.head_stride),
            ("i", rows.stride),
        )
        if stride
    ]
    return " + ".join([f"{rows.start}", *terms]) + f", i < {rows.length}"


def of_mean(flops: float, all_flops: Sequence[int]) -> str:
    """A rank's operations in multiples of the mean."""
    total = sum(all_flops)
    return f"{flops * len(all_flops) / total:.3f}" if total else "-"


def in_bytes(count: int) -> str:
    """A number of bytes with a binary prefix."""
    return scaled(count, "B", 1024)


def scaled(count: float, unit: str, step: int) -> str:
    """A number with the prefix that suits it; `step` is 1024 or 1000."""
    prefixes = ("", "Ki", "Mi", "Gi", "Ti", "Pi") if step == 1024 else ("", "k", "M", "G", "T", "P")
    for prefix in prefixes:
        if count < step or prefix == prefixes[-1]:
            break
        count /= step
    digits = 0 if prefix == "" else 2 if count < 10 else 1
    return f"{count:.{digits}f} {prefix}{unit}".rstrip()
