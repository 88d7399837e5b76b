"""The tables of `rda plan --tiles`: every tile and every message of a rank."""

from __future__ import annotations

from typing import NamedTuple

from ..plan import RankPlan, Rows, Tile, costs
from ..terminal import BYTES, Table, amounts, counts, numbers, texts
from .plan_tables import rounds_of


def tiles_of(rank: RankPlan) -> list[tuple[int, Tile]]:
    """Every tile of a rank, after the number of its step; 0: local."""
    tiles: list[tuple[int, Tile]] = []
    for part in rounds_of(rank):
        tiles += [(0, tile) for tile in part.local]
        tiles += [(step.step, tile) for step in part.steps() for tile in step.tiles]
    return tiles


def tiles_table(rank: RankPlan) -> Table:
    """Every tile of a rank."""
    branches = rank.plan.pattern.branches
    tiles = tiles_of(rank)
    return Table(
        title=f"Tiles of rank {rank.index} (row i of KV head number j in segment s)",
        keys=[numbers("tile", range(len(tiles)), "d")],
        columns=[
            counts("step", [step for step, _ in tiles]),
            texts("branch", [branches[tile.branch] for _, tile in tiles]),
            texts("KV heads", [_heads(tile.heads) for _, tile in tiles]),
            counts("segments", [tile.segments for _, tile in tiles]),
            texts("causal", ["yes" if tile.is_causal else "no" for _, tile in tiles]),
            texts("queries: local row", [_rows(tile.queries) for _, tile in tiles]),
            texts("keys: local row, or message slot", [_rows(tile.keys) for _, tile in tiles]),
        ],
    )


class SizedMessage(NamedTuple):
    """A message of a rank.

    Attributes:
        step: of the ring.
        is_sent: whether the rank sends it; if not, it receives it.
        peer: the other rank.
        rows: (row, KV head) pairs.
        key_value_bytes: of keys and values, in forward.
        gradient_bytes: of their gradients, which come back in backward.
    """

    step: int
    is_sent: bool
    peer: int
    rows: int
    key_value_bytes: int
    gradient_bytes: int


def messages_of(rank: RankPlan, size: costs.TensorSize) -> list[SizedMessage]:
    """Every message of a rank."""
    found: list[SizedMessage] = []

    def add(step: int, is_sent: bool, peer: int, rows: int) -> None:
        sizes = size.key_value_bytes(rows), costs.returned_bytes(rank, size, rows)
        found.append(SizedMessage(step, is_sent, peer, rows, *sizes))

    for step in [step for part in rounds_of(rank) for step in part.steps()]:
        if step.send is not None:
            add(step.step, True, step.send.receiver, step.send.rows)
        if step.receive is not None:
            add(step.step, False, step.receive.sender, step.receive.rows)
    return found


def messages_table(rank: RankPlan, size: costs.TensorSize) -> Table:
    """Every message of a rank."""
    found = messages_of(rank, size)
    return Table(
        title=f"Messages of rank {rank.index}: K and V; backward returns their gradients",
        keys=[
            counts("step", [x.step for x in found]),
            texts("", ["send to" if x.is_sent else "receive from" for x in found]),
            numbers("rank", [x.peer for x in found], "d"),
        ],
        columns=[
            counts("rows", [x.rows for x in found]),
            *amounts(
                [
                    ("K and V", [x.key_value_bytes for x in found]),
                    ("gradients", [x.gradient_bytes for x in found]),
                ],
                BYTES,
            ),
        ],
    )


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
