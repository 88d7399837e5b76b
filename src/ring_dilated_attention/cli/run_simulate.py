"""What `rda simulate` does: every rank on one device, tables of what they did, and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..bench import memory_of, resolve_device
from ..checks import (
    Case,
    RankReport,
    Simulation,
    Transfers,
    check_memory,
    check_output,
    check_seed,
    simulate,
)
from ..functional import Schedule
from ..plan import Memory
from .plan_tables import in_bytes, make_table, scaled
from .run_plan import SHOWN_ALL, SHOWN_FEW, in_words
from .sharded import Sharded

MEMORY = tuple(field.name for field in fields(Memory))
SHOWN_PROBLEMS = 8
_HELD = 5
"""Tensors of query's size that are held at least: query and its out on one device, query, out and
dout of the ranks; keys and values may be smaller."""
WIDTH = 130
"""Characters of a line at least, where the output is no terminal."""


def run(
    sharded: Sharded,
    *,
    exchange: Schedule,
    device: str,
    seed: int,
    backward: bool,
    shown: Sequence[int] | None = None,
    json_file: Path | None = None,
) -> bool:
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
        json_file: where to write everything; None: nowhere.

    Returns:
        Whether results are those of one device, and memory and transfers those of the plan.

    Raises:
        TypeError, ValueError: an option is not allowed.
        OSError: the file cannot be written.
    """
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
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
    if json_file is not None:
        check_output(json_file)
    found = simulate(case, backward=backward)
    schedule = "gather" if found.gathers else "ring"
    console.print(f"{sharded}, {schedule}, {case.device}, inputs of seed {case.seed}")
    console.print(in_words(found.balance))
    chosen = _some(found.ranks) if shown is None else [found.ranks[rank] for rank in shown]
    for table in (_compute_table, _memory_table, _exchange_table):
        console.print(table(chosen, found.ranks))
    for text in _conclusions(found):
        console.print(text)
    if json_file is not None:
        json_file.write_text(json.dumps(_as_json(case, sharded.layout_name, found)) + "\n")
        console.print(f"written: {json_file}", soft_wrap=True)
    return found.ok


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


def _add_rows(
    table: Table,
    chosen: Sequence[RankReport],
    ranks: Sequence[RankReport],
    columns: Sequence[tuple[Callable[[RankReport], float], Callable[[Any], str]]],
) -> Table:
    """A row per chosen rank; then the largest figure of all ranks in each column, and their sum."""
    for report in chosen:
        table.add_row(str(report.rank), *(show(figure(report)) for figure, show in columns))
    table.add_section()
    for name, combine in (("largest", max), ("all", sum)):
        combined: Callable[[list[float]], float] = combine
        cells = [show(combined([figure(x) for x in ranks])) for figure, show in columns]
        table.add_row(name, *cells)
    return table


def _compute_table(chosen: Sequence[RankReport], ranks: Sequence[RankReport]) -> Table:
    table = make_table(
        "Compute, one rank at a time",
        *("rank", "positions", "kernel calls", "FLOPs forward", "of the mean"),
        *("forward", "backward"),
    )
    columns: list[tuple[Callable[[RankReport], float], Callable[[Any], str]]] = [
        (lambda x: x.positions, "{:,}".format),
        (lambda x: x.kernel_calls, "{:,}".format),
        (lambda x: x.flops, lambda flops: scaled(flops, "", 1000)),
        (lambda x: x.of_mean, "{:.3f}".format),
        (lambda x: x.forward.seconds, _seconds),
        (lambda x: x.backward.seconds if x.backward else 0.0, _seconds),
    ]
    return _add_rows(table, chosen, ranks, columns)


def _memory_table(chosen: Sequence[RankReport], ranks: Sequence[RankReport]) -> Table:
    table = make_table("Memory held in forward", "rank", *MEMORY, "total", "planned")
    columns: list[tuple[Callable[[RankReport], float], Callable[[Any], str]]] = [
        (lambda x, n=name: getattr(x.held_memory, n), in_bytes)  # type: ignore[misc]
        for name in (*MEMORY, "total")
    ]
    columns.append((lambda x: x.planned_memory.total, in_bytes))
    return _add_rows(table, chosen, ranks, columns)


def _exchange_table(chosen: Sequence[RankReport], ranks: Sequence[RankReport]) -> Table:
    table = make_table(
        "Exchange, as counted (planned: sent in both passes)",
        *("rank", "peers", "messages forward", "backward"),
        *("sent forward", "backward", "received forward", "backward", "sent", "planned"),
    )

    def both(figure: Callable[[Transfers], int]) -> list[Callable[[RankReport], float]]:
        return [
            lambda x: figure(x.forward.counted),
            lambda x: figure(x.backward.counted) if x.backward else 0,
        ]

    def sent(x: RankReport, which: str) -> int:
        passes = [x.forward, *([x.backward] if x.backward else [])]
        return sum(getattr(done, which).sent for done in passes)

    columns: list[tuple[Callable[[RankReport], float], Callable[[Any], str]]] = [
        (lambda x: len(x.forward.counted.peers), "{:,}".format),
        *((figure, "{:,}".format) for figure in both(lambda moved: moved.messages)),
        *((figure, in_bytes) for figure in both(lambda moved: moved.sent)),
        *((figure, in_bytes) for figure in both(lambda moved: moved.received)),
        (lambda x: sent(x, "counted"), in_bytes),
        (lambda x: sent(x, "planned"), in_bytes),
    ]
    return _add_rows(table, chosen, ranks, columns)


def _conclusions(found: Simulation) -> list[str]:
    alone, ranks = sum(found.one_device), [x.seconds for x in found.ranks]
    texts = [
        f"compute: one device {_seconds(alone)}, all ranks {_seconds(sum(ranks))}, the slowest "
        f"rank {_seconds(max(ranks))} ({alone / max(ranks):.1f} times as fast as one device, if "
        "transfers took no time)",
        "relative errors to one device: "
        + ", ".join(f"{name} {error:.1e}" for name, error in found.errors.items()),
    ]
    if found.ok:
        return [*texts, "ok: results are one device's; memory, bytes and messages are the plan's"]
    shown = [f"[bold red]WRONG[/bold red] {text}" for text in found.problems[:SHOWN_PROBLEMS]]
    more = len(found.problems) - len(shown)
    return [*texts, *shown, *([f"and {more} more problems"] if more else [])]


def _seconds(count: float) -> str:
    return f"{count:.2f} s" if count >= 1 else f"{1000 * count:.1f} ms"


def _as_json(case: Case, layout: str, found: Simulation) -> dict[str, Any]:
    options = {field.name: getattr(case, field.name) for field in fields(case)}
    options |= {
        "pattern": str(case.pattern),
        "layout": layout,
        "length": case.layout.length,
        "world_size": case.layout.world_size,
        "dtype": str(case.dtype).removeprefix("torch."),
    }
    finite = {name: error if error < torch.inf else None for name, error in found.errors.items()}
    return {
        "ok": found.ok,
        "options": options,
        **asdict(found),
        "errors": finite,  # null: not a number
        "speed_up_bound": found.balance.speed_up_bound,
    }
