"""What `rda simulate` does: every rank on one device, tables of what they did, and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.markup import escape

from ..bench import memory_of, resolve_device
from ..checks import (
    Case,
    RankReport,
    Simulation,
    Transfers,
    check_memory,
    check_seed,
    simulate,
    simulated_flops,
)
from ..functional import Schedule
from ..plan import costs
from ..terminal import (
    BYTES,
    FLOP,
    SECONDS,
    Column,
    Progress,
    Table,
    amounts,
    count_of,
    counts,
    in_seconds,
    make_console,
    numbers,
    show_table,
)
from .run_plan import SHOWN_ALL, SHOWN_FEW, in_words
from .sharded import Sharded

MEMORY = tuple(field.name for field in fields(costs.Memory))
SHOWN_PROBLEMS = 8
_HELD = 5
"""Tensors of query's size that are held at least: query and its out on one device, query, out and
dout of the ranks; keys and values may be smaller."""

_ColumnOf = Callable[[Callable[[RankReport], float]], list[Any]]
"""From a figure of a rank to the cells of its column."""


def run(
    sharded: Sharded,
    *,
    exchange: Schedule,
    device: str,
    seed: int,
    backward: bool,
    shown: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Simulate a call of `dilated_attention` and print what each rank did.

    Args:
        sharded: what is computed, and on how many ranks.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"auto"`` gathers where all of them are at most the size of a shard.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        seed: of the random inputs.
        backward: whether to run backward too.
        shown: ranks to show; None: a few and the extremes.

    Returns:
        The numbers of every rank, for JSON; ``"ok"``: whether results are those of one device, and
        memory and transfers those of the plan.

    Raises:
        TypeError, ValueError: an option is not allowed.
    """
    console = make_console()
    check_seed(seed)
    workload, on = sharded.workload, resolve_device(device)
    check_memory(_HELD * workload.query_bytes, memory_of(on), "simulating")
    case = Case(
        pattern=workload.pattern,
        layout=sharded.layout,
        num_heads=workload.num_heads,
        num_kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        batch=workload.batch_size,
        is_causal=workload.is_causal,
        documents=None if sharded.documents is None else tuple(sharded.documents),
        dtype=workload.torch_dtype,
        exchange=exchange,
        backend=workload.backend,
        seed=seed,
        device=str(on),
    )
    work = simulated_flops(case, backward=backward)
    with Progress("simulate", total=work, unit=FLOP) as progress:
        found = simulate(case, backward=backward, told=progress.update)
    console.print(f"{sharded}, on {case.device}, seed {case.seed}")
    console.print(f"exchange: {'gather' if found.gathers else 'ring'}")
    console.print(in_words(found.balance))
    chosen = _some(found.ranks) if shown is None else [found.ranks[rank] for rank in shown]
    console.print()
    for table in tables(chosen, found.ranks):
        show_table(console, table)
    for text in _conclusions(found):
        console.print(text)
    asked = {"exchange": exchange, "backend": case.backend, "device": case.device, "seed": seed}
    return {
        "ok": found.ok,
        "options": {**sharded.options, **asked, "backward": backward},
        **asdict(found),
        "speed_up_bound": found.balance.speed_up_bound,
    }


def _some(ranks: Sequence[RankReport]) -> list[RankReport]:
    """A few ranks, and those that compute, hold or send the most, or compute the least."""
    if len(ranks) <= SHOWN_ALL:
        return list(ranks)
    few = {(len(ranks) - 1) * i // (SHOWN_FEW - 1) for i in range(SHOWN_FEW)}
    few.add(min(ranks, key=lambda x: x.flops).rank)
    for figure in _EXTREMES:
        few.add(max(ranks, key=figure).rank)
    return [ranks[rank] for rank in sorted(few)]


_EXTREMES: tuple[Callable[[RankReport], float], ...] = (
    lambda x: x.flops,
    lambda x: x.held_memory.total,
    lambda x: x.forward.counted.sent,
    lambda x: x.seconds,
)


def tables(chosen: Sequence[RankReport], ranks: Sequence[RankReport]) -> list[Table]:
    """Compute, memory and exchange: a row per chosen rank, and two of all ranks.

    Args:
        chosen: the ranks that have a row.
        ranks: all ranks. The last two rows are the largest figure of a column, and the sum.
    """

    def column(figure: Callable[[RankReport], float]) -> list[Any]:
        every = [figure(x) for x in ranks]
        return [*map(figure, chosen), max(every), sum(every)]

    names = (*(str(x.rank) for x in chosen), "largest", "sum")
    parts = {
        "Compute per rank, one rank at a time": _compute(column),
        "Memory held during forward": _memory(column),
        "Exchange as counted, and planned": _exchange(column),
    }
    keys = [Column(heading="rank", cells=names)]
    return [
        Table(title=title, keys=keys, columns=columns, totals=2) for title, columns in parts.items()
    ]


def _compute(column: _ColumnOf) -> list[Column]:
    return [
        counts("positions", column(lambda x: x.positions)),
        counts("kernel calls", column(lambda x: x.kernel_calls)),
        *amounts([("forward", column(lambda x: x.flops))], FLOP),
        numbers("FLOP / mean", column(lambda x: x.of_mean), ".3f"),
        *amounts(
            [
                ("forward", column(lambda x: x.forward.seconds)),
                ("backward", column(lambda x: x.backward.seconds if x.backward else 0.0)),
            ],
            SECONDS,
        ),
    ]


def _memory(column: _ColumnOf) -> list[Column]:
    held = [(name, column(lambda x, n=name: getattr(x.held_memory, n))) for name in MEMORY]  # type: ignore[misc]
    total = column(lambda x: x.held_memory.total)
    planned = column(lambda x: x.planned_memory.total)
    return amounts([*held, ("total", total), ("planned", planned)], BYTES)


def _exchange(column: _ColumnOf) -> list[Column]:
    def both(figure: Callable[[Transfers], int]) -> list[list[Any]]:
        forward = column(lambda x: figure(x.forward.counted))
        return [forward, column(lambda x: figure(x.backward.counted) if x.backward else 0)]

    def sent(which: str) -> list[Any]:
        def of(x: RankReport) -> int:
            passes = [x.forward, *([x.backward] if x.backward else [])]
            return sum(getattr(done, which).sent for done in passes)

        return column(of)

    messages = both(lambda moved: moved.messages)
    names = ("forward sent", "backward sent", "forward received", "backward received")
    moved = [*both(lambda moved: moved.sent), *both(lambda moved: moved.received)]
    return [
        counts("peers", column(lambda x: len(x.forward.counted.peers))),
        counts("forward messages", messages[0]),
        counts("backward messages", messages[1]),
        *amounts(
            [
                *zip(names, moved, strict=True),
                ("total sent", sent("counted")),
                ("total planned", sent("planned")),
            ],
            BYTES,
        ),
    ]


def _conclusions(found: Simulation) -> list[str]:
    alone, ranks = sum(found.one_device), [x.seconds for x in found.ranks]
    texts = [
        f"time: one device {in_seconds(alone)}, all ranks together {in_seconds(sum(ranks))}, "
        f"slowest rank {in_seconds(max(ranks))} ({alone / max(ranks):.1f} times as fast as one "
        "device, transfers not counted)",
        "error relative to one device: "
        + ", ".join(f"{name} {error:.1e}" for name, error in found.errors.items()),
    ]
    if found.ok:
        return [*texts, "ok: results match one device; memory, bytes and messages match the plan"]
    shown = [f"[bold red]WRONG[/bold red] {escape(text)}" for text in found.problems]
    more = len(shown) - SHOWN_PROBLEMS
    end = [f"and {count_of(more, 'more problem')}"] if more > 0 else []
    return [*texts, *shown[:SHOWN_PROBLEMS], *end]
