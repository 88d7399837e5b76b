"""The tables of `rda plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..engine import kernel_calls
from ..plan import RankPlan, Rows, Tile, costs
from ..terminal import BYTES, FLOP, Column, Table, amounts, counts, numbers


def rounds_of(rank: RankPlan) -> tuple[RankPlan, ...]:
    """The rank's plan as it runs, all heads at once or some at a time."""
    return rank.rounds(gathers=rank.plan.gathers)


class RowBytes(NamedTuple):
    """Bytes of the rows that a call of one rank reads in place, and of those that it copies.

    Attributes:
        in_place: rows of query, key and value that tiles read as strided views, in forward; each as
            often as a tile reads it.
        packed: rows of key and value copied into messages, in forward and in backward again; what
            one rank after another is sent is copied once.
        spread: rows copied because branches share those of a message, or because own and received
            rows of a segment are put side by side; also twice.
        returned: rows of gradients that are returned in backward, and are added to dkey and dvalue.
    """

    in_place: int
    packed: int
    spread: int
    returned: int


def row_bytes(rank: RankPlan, size: costs.TensorSize) -> RowBytes:
    """Count the rows that a rank reads in place, and those that it copies."""
    heads_per_kv = rank.plan.num_heads // rank.plan.num_kv_heads
    received = [step.receive for step in rank.steps() if step.receive is not None]
    joined = rank.at_once(gathers=rank.plan.gathers)
    slots = sum(m.slots for m in received if m.rows < m.slots)
    if joined is not None:
        slots = joined.message.slots
    local, remote = (
        [tile for group in groups for tile in group.tiles]
        for groups in rank.groups(gathers=rank.plan.gathers)
    )  # keys of the latter: see `spread`
    rows = heads_per_kv * sum(_row_count(tile, tile.queries) for tile in (*local, *remote))
    rows += 2 * sum(_row_count(tile, tile.keys) for tile in local)
    sent, packed, last = rank.total_sent_rows, 0, None
    for message in [step.send for step in rank.steps() if step.send is not None]:
        packed += 0 if message.is_same_for(last) else message.rows
        last = message
    return RowBytes(
        in_place=rows * size.batch * size.head_dim * size.element_size,
        packed=size.key_value_bytes(packed),
        spread=size.key_value_bytes(slots),
        returned=costs.returned_bytes(rank, size, sent),
    )


def _row_count(tile: Tile, rows: Rows) -> int:
    return tile.segments * len(tile.heads) * rows.length


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """What the tables show of one rank.

    Attributes:
        rank: which rank.
        positions: how many it holds.
        local_tiles: tiles whose keys it holds itself.
        local_calls: kernel calls that compute them.
        remote_tiles: tiles with keys of received messages.
        remote_calls: kernel calls that compute them.
        groups: groups of tiles; those of one may share a launch.
        rows: bytes read in place and copied.
        rows_in: (row, KV head) pairs received.
        rows_out: (row, KV head) pairs sent.
        moved: bytes exchanged.
        messages: sent in forward.
        held: bytes held in forward.
    """

    rank: int
    positions: int
    local_tiles: int
    local_calls: int
    remote_tiles: int
    remote_calls: int
    groups: int
    rows: RowBytes
    rows_in: int
    rows_out: int
    moved: costs.Traffic
    messages: int
    held: costs.Memory

    @classmethod
    def of(cls, rank: RankPlan, size: costs.TensorSize) -> RankFigures:
        """Count; it takes seconds where there are thousands of ranks."""
        steps = [step for one in rounds_of(rank) for step in one.steps()]
        local, remote = rank.groups(gathers=rank.plan.gathers)
        return cls(
            rank=rank.index,
            positions=rank.plan.layout.local_length(rank.index),
            local_tiles=sum(len(group.tiles) for group in local),
            local_calls=kernel_calls(local, rank, size.batch),
            remote_tiles=sum(len(group.tiles) for group in remote),
            remote_calls=kernel_calls(remote, rank, size.batch),
            groups=len(local) + len(remote),
            rows=row_bytes(rank, size),
            rows_in=rank.total_received_rows,
            rows_out=rank.total_sent_rows,
            moved=costs.traffic(rank, size),
            messages=sum(step.send is not None for step in steps),
            held=costs.memory(rank, size),
        )


def rank_tables(ranks: Sequence[RankFigures], work: Sequence[int]) -> list[Table]:
    """Tables with a row per rank: compute, rows, exchange and memory.

    Args:
        ranks: those to show.
        work: useful operations of forward, of every rank of the plan.
    """
    keys = [numbers("rank", [x.rank for x in ranks], "d")]
    compute = [
        counts("positions", [x.positions for x in ranks]),
        counts("local tiles", [x.local_tiles for x in ranks]),
        counts("local kernel calls", [x.local_calls for x in ranks]),
        counts("remote tiles", [x.remote_tiles for x in ranks]),
        counts("remote kernel calls", [x.remote_calls for x in ranks]),
        counts("tile groups", [x.groups for x in ranks]),
        *amounts([("forward", [work[x.rank] for x in ranks])], FLOP),
        of_mean([work[x.rank] for x in ranks], work),
    ]
    rows = amounts(
        [
            ("read in place", [x.rows.in_place for x in ranks]),
            ("packed to send", [x.rows.packed for x in ranks]),
            ("copied on arrival", [x.rows.spread for x in ranks]),
            ("gradients returned", [x.rows.returned for x in ranks]),
        ],
        BYTES,
    )
    exchange = [
        counts("rows received", [x.rows_in for x in ranks]),
        counts("rows sent", [x.rows_out for x in ranks]),
        *amounts(
            [
                ("forward sends", [x.moved.forward_sent for x in ranks]),
                ("backward sends", [x.moved.backward_sent for x in ranks]),
            ],
            BYTES,
        ),
        counts("forward messages", [x.messages for x in ranks]),
    ]
    names = ("query", "key", "value", "out", "lse", "buffers", "total")
    held = amounts([(name, [getattr(x.held, name) for x in ranks]) for name in names], BYTES)
    return [
        Table(
            title="Compute per call (the tiles of a group may share one launch)",
            keys=keys,
            columns=compute,
        ),
        Table(
            title="Rows per call: read in place as strided views, or copied for messages",
            keys=keys,
            columns=rows,
            note="A query, key or value whose last dimension is strided is copied whole.",
        ),
        Table(
            title="Exchange per call (each row that is needed is sent once: the minimum)",
            keys=keys,
            columns=exchange,
        ),
        Table(title="Memory per rank during forward", keys=keys, columns=held),
    ]


def of_mean(flops: Sequence[float], all_flops: Sequence[int]) -> Column:
    """Ranks' operations in multiples of the mean of all ranks; empty where there are none."""
    return numbers("FLOP / mean", [times_mean(x, all_flops) for x in flops], ".3f")


def times_mean(flop: float, all_flops: Sequence[int]) -> float | None:
    """A rank's operations over the mean of all ranks; None where there are none."""
    total = sum(all_flops)
    return flop * len(all_flops) / total if total else None
