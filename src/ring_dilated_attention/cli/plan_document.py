"""The document of `rda plan --json`: the numbers of its tables, in bytes, operations and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..plan import RankPlan, costs
from .plan_tables import RankFigures, times_mean
from .sharded import Sharded
from .tile_tables import messages_of, tiles_of


def plan_document(
    sharded: Sharded,
    figures: Sequence[RankFigures],
    work: Sequence[int],
    *,
    tiles: bool,
    proven: bool,
) -> dict[str, Any]:
    """What `rda plan` prints.

    Args:
        sharded: what is computed, and on how many ranks.
        figures: of the ranks that are shown.
        work: useful operations of forward, of every rank of the plan.
        tiles: whether to list each tile and message of those ranks.
        proven: whether the plan has been proven by enumeration.
    """
    plan, size, found = sharded.plan, sharded.workload.size, costs.balance(work)
    ranks = [_rank(x, work) for x in figures]
    if tiles:
        for document in ranks:
            document |= _lists(plan.rank(document["rank"]), size)
    several = plan.layout.world_size > 1
    rings = several and not plan.gathers
    return {
        "options": sharded.options,
        "exchange": ("ring" if rings else "gather") if several else None,
        "head_parts": len(plan.rounds) if rings else 1,
        "row_pieces": plan.rounds[0].pieces if rings else 1,
        "totals": {"positions": plan.layout.length, "flops": sum(work)},
        "balance": asdict(found),
        "speed_up_bound": found.speed_up_bound,
        "ranks": ranks,
        "proven": proven,
    }


def _rank(figures: RankFigures, work: Sequence[int]) -> dict[str, Any]:
    rows, flop = figures.rows, work[figures.rank]
    return {
        "rank": figures.rank,
        "positions": figures.positions,
        "local_tiles": figures.local_tiles,
        "local_kernel_calls": figures.local_calls,
        "remote_tiles": figures.remote_tiles,
        "remote_kernel_calls": figures.remote_calls,
        "tile_groups": figures.groups,
        "flops": flop,
        "of_mean": times_mean(flop, work),
        "row_bytes": {
            "read_in_place": rows.in_place,
            "packed_to_send": rows.packed,
            "copied_on_arrival": rows.spread,
            "gradients_returned": rows.returned,
        },
        "rows_received": figures.rows_in,
        "rows_sent": figures.rows_out,
        "traffic_bytes": asdict(figures.moved),
        "forward_messages": figures.messages,
        "memory_bytes": {**asdict(figures.held), "total": figures.held.total},
    }


def _lists(rank: RankPlan, size: costs.TensorSize) -> dict[str, Any]:
    """Every tile and every message of a rank."""
    branches = rank.plan.pattern.branches
    return {
        "tiles": [
            {
                "step": step,
                "segment_length": branches[tile.branch].segment_length,
                "dilation_rate": branches[tile.branch].dilation_rate,
                "kv_heads": list(tile.heads),
                "segments": tile.segments,
                "causal": tile.is_causal,
                "query_rows": tile.queries._asdict(),
                "key_rows": tile.keys._asdict(),
            }
            for step, tile in tiles_of(rank)
        ],
        "messages": [
            {
                "step": x.step,
                "direction": "send" if x.is_sent else "receive",
                "rank": x.peer,
                "rows": x.rows,
                "key_value_bytes": x.key_value_bytes,
                "gradient_bytes": x.gradient_bytes,
            }
            for x in messages_of(rank, size)
        ],
    }
