"""The tables of `rda plan`, and how numbers are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE
from rich.table import Table

from ..engine import kernel_calls
from ..plan import (
    Message,
    RankPlan,
    Rows,
    TensorSize,
    Tile,
    memory,
    returned_bytes,
    traffic,
)


def rounds_of(rank: RankPlan) -> tuple[RankPlan, ...]:
    """The rank's plan as it runs, all heads at once or some at a time."""
    return rank.rounds(gathers=rank.plan.gathers)


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
    heads_per_kv = rank.plan.num_heads // rank.plan.num_kv_heads
    received = [step.receive for step in rank.steps() if step.receive is not None]
    remote = [tile for step in rank.steps() for tile in step.tiles]  # their keys: see `spread`
    rows = heads_per_kv * sum(_row_count(tile, tile.queries) for tile in (*rank.local, *remote))
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


def compute_table(ranks: Sequence[RankPlan], size: TensorSize, work: Sequence[int]) -> Table:
    """FLOPs, kernel calls and their balance, a row for each rank."""
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
        rounds = rounds_of(rank)
        local = [group for one in rounds for group in one.local_groups]
        remote = [group for one in rounds for step in one.steps() for group in step.groups]
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


def rows_table(ranks: Sequence[RankPlan], size: TensorSize) -> Table:
    """Bytes of rows that tiles read in place, and of those that are copied, a row for each rank."""
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


def exchange_table(ranks: Sequence[RankPlan], size: TensorSize) -> Table:
    """Messages and bytes that each rank sends and receives, forward and backward."""
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
            str(sum(step.send is not None for part in rounds_of(rank) for step in part.steps())),
        )
    return table


def memory_table(ranks: Sequence[RankPlan], size: TensorSize) -> Table:
    """Bytes that each rank holds, at most, in forward and in backward."""
    names = ("query", "key", "value", "out", "lse", "buffers", "total")
    table = make_table("Memory of one forward call", "rank", *names)
    for rank in ranks:
        held = memory(rank, size)
        table.add_row(str(rank.index), *(in_bytes(getattr(held, name)) for name in names))
    return table


def tiles_table(rank: RankPlan) -> Table:
    """Every tile of a rank."""
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

    for part in rounds_of(rank):
        for tile in part.local:
            add(0, tile)
        for step in part.steps():
            for tile in step.tiles:
                add(step.step, tile)
    return table


def messages_table(rank: RankPlan, size: TensorSize) -> Table:
    """Every message of a rank."""
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

    for step in [step for part in rounds_of(rank) for step in part.steps()]:
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
