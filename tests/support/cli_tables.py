"""The tables of commands, with small figures and with the largest that there are."""

from __future__ import annotations

from dataclasses import replace

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.bench import Workload
from ring_dilated_attention.checks import TENSORS, Case, Outcome, simulate, sweep
from ring_dilated_attention.cli import (
    plan_tables,
    run_plan_decode,
    run_simulate,
    run_verify,
    tile_tables,
)
from ring_dilated_attention.cli.sharded import Sharded
from ring_dilated_attention.plan import costs
from ring_dilated_attention.terminal import Table

BILLION = 2**30


def cli_tables() -> list[Table]:
    """Of `rda plan`, `rda simulate` and `rda verify`."""
    return [*plan_of_a_billion(), *small_plan(), *caches(), *simulated(), *verified()]


def plan_of_a_billion() -> list[Table]:
    pattern = DilatedPattern([2048, 32768, None], [1, 12, 65536])
    layout = SequenceLayout.contiguous(BILLION, 4096)
    plan = plan_attention(pattern, layout, is_causal=True, num_heads=12, num_kv_heads=12)
    size = costs.TensorSize(batch=64, head_dim=128, element_size=8)
    ranks = [plan.rank(17), plan.rank(4095)]
    work = costs.flops_by_rank(plan, size)
    figures = [plan_tables.RankFigures.of(rank, size) for rank in ranks]
    return [
        *plan_tables.rank_tables(figures, work),
        tile_tables.tiles_table(ranks[0]),
        tile_tables.messages_table(ranks[0], size),
    ]


def small_plan() -> list[Table]:
    layout = SequenceLayout.zigzag(100, 3)
    pattern = DilatedPattern([16, 64], [1, 3])
    plan = plan_attention(pattern, layout, is_causal=True, num_heads=4, num_kv_heads=2)
    size = costs.TensorSize(batch=1, head_dim=8, element_size=4)
    ranks = [plan.rank(rank) for rank in range(3)]
    figures = [plan_tables.RankFigures.of(rank, size) for rank in ranks]
    return [
        *plan_tables.rank_tables(figures, costs.flops_by_rank(plan, size)),
        *map(tile_tables.tiles_table, ranks),
        *(tile_tables.messages_table(rank, size) for rank in ranks),
    ]


def caches() -> list[Table]:
    """Of a billion positions, and of one."""
    found = []
    for length, batch in ((BILLION, 1 << 20), (1, 1)):
        workload = Workload(
            pattern=DilatedPattern([2048, 32768, None, 7], [1, 12, 65536, 9]),
            seq_len=length,
            batch_size=batch,
            num_heads=6,
            num_kv_heads=3,
            head_dim=4096,
            dtype="float64",
        )
        sharded = Sharded(
            workload=workload, ranks=4096, most_ranks=4096, layout_name="auto", documents=None
        )
        found += run_plan_decode.cache_tables(run_plan_decode.CacheFigures.of(sharded))
    return found


def simulated() -> list[Table]:
    layout = SequenceLayout.contiguous(101, 5)
    case = Case(pattern=DilatedPattern([16, 50, None], [1, 3, 4]), layout=layout, is_causal=True)
    found = simulate(case, backward=True)
    huge = [
        replace(
            x,
            positions=BILLION * 4096,
            flops=10**18 + x.rank,
            held_memory=replace(x.held_memory, buffers=3**35),
            forward=replace(x.forward, seconds=12345.678),
        )
        for x in found.ranks
    ]
    both = run_simulate.tables(found.ranks[:2], found.ranks)
    return [*both, *run_simulate.tables(huge, huge)]


def verified() -> list[Table]:
    cases = list(sweep(4, 7))
    squares = {name: (1e-32 * 3**i, 1.0, 0.0) for i, name in enumerate(TENSORS)}
    huge = Outcome(squares=squares, sent_bytes=3**33, planned_bytes=3**33)
    outcomes = [huge] * len(cases)
    return [run_verify.table(1024, cases, outcomes, every) for every in (False, True)]
