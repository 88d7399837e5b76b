"""What `rda simulate` does: every rank on one device, tables of what they did, and JSON."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..bench import memory_of, named_pattern, resolve_device
from ..checks import (
    MOST_SIMULATED_RANKS,
    Case,
    RankReport,
    Simulation,
    Transfers,
    check_memory,
    check_output,
    check_pattern,
    check_seed,
    check_size,
    simulate,
)
from ..functional import Schedule
from ..pattern import DilatedPattern, check_choice
from ..plan import Memory
from ..tiles import Backend
from .plan_tables import in_bytes, make_table, scaled
from .run_plan import DTYPES, LAYOUTS, SHOWN_ALL, SHOWN_FEW, in_documents, in_words

MEMORY = tuple(field.name for field in fields(Memory))
SHOWN_PROBLEMS = 8
_HELD = 5
"""Tensors of query's size that are held at least: query and its out on one device, query, out and
dout of the ranks; keys and values may be smaller."""
WIDTH = 130
"""Characters of a line at least, where the output is no terminal."""


def run(
    *,
    pattern: str | None,
    segment_lengths: Sequence[int | None] | None,
    dilation_rates: Sequence[int] | None,
    head_offsets: str | None,
    head_branches: str | None,
    length: int,
    world_size: int,
    layout: str,
    is_causal: bool,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int,
    batch: int,
    dtype: str,
    exchange: Schedule,
    backend: Backend,
    device: str,
    seed: int | None,
    backward: bool,
    documents: Sequence[int] | None = None,
    every: bool = False,
    json_file: Path | None = None,
    console: Console | None = None,
) -> bool:
    """Simulate a call of `dilated_attention` and print what each rank did.

    Args:
        pattern: name of a pattern; None: LongNet's, or that of `segment_lengths`.
        segment_lengths: of a pattern without a name, with `dilation_rates`.
        dilation_rates: one for each of `segment_lengths`.
        head_offsets: ``"interleaved"`` or ``"blocked"``; None: the pattern's own.
        head_branches: ``"all"`` or ``"split"``; None: the pattern's own.
        length: positions of the whole sequence.
        world_size: number of ranks.
        layout: a key of `LAYOUTS`.
        is_causal: whether queries see no later keys.
        num_heads: query heads.
        num_kv_heads: KV heads; None: as many.
        head_dim: elements of a row of a head.
        batch: sequences in the batch.
        dtype: a key of `DTYPES`.
        exchange: ``"ring"`` keeps one message in flight during compute and holds the rows of at
            most two remote shards; ``"gather"`` starts all transfers at once and holds them all;
            ``"auto"`` gathers where all of them are at most the size of a shard.
        backend: kernels that compute the tiles, one of `tiles.BACKENDS`.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        seed: of the random inputs; None: a fresh one, which is printed.
        backward: whether to run backward too.
        documents: cumulative lengths of packed documents; None: one document.
        every: whether to show every rank, not a few and the extremes.
        json_file: where to write everything; None: nowhere.
        console: where to print; None: standard output.

    Returns:
        Whether results are those of one device, and memory and transfers those of the plan.

    Raises:
        TypeError, ValueError: an option is not allowed.
        OSError: the file cannot be written.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    check_choice("layout", layout, tuple(LAYOUTS))
    check_choice("dtype", dtype, tuple(DTYPES))
    for name, value in (
        ("length", length),
        ("heads", num_heads),
        ("kv_heads", num_heads if num_kv_heads is None else num_kv_heads),
        ("head_dim", head_dim),
        ("batch", batch),
    ):
        check_size(name, value)
    check_size("ranks", world_size, MOST_SIMULATED_RANKS)
    check_seed(seed)
    of_case = _pattern(pattern, segment_lengths, dilation_rates, head_offsets, head_branches)
    check_pattern(of_case, documents)
    on = resolve_device(device)
    check_memory(
        _HELD * batch * length * num_heads * head_dim * DTYPES[dtype], memory_of(on), "simulating"
    )
    if seed is None:
        seed = secrets.randbelow(10**9)
    case = Case(
        pattern=of_case,
        layout=LAYOUTS[layout](length, world_size),
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        batch=batch,
        is_causal=is_causal,
        documents=None if documents is None else tuple(documents),
        dtype=getattr(torch, dtype),
        exchange=exchange,
        backend=backend,
        seed=seed,
        device=str(on),
    )
    if json_file is not None:
        check_output(json_file)
    found = simulate(case, backward=backward)
    console.print(
        f"[bold]{case.pattern}[/bold]: {length:,} positions on {world_size} "
        f"{'rank' if world_size == 1 else 'ranks'} ({layout}), "
        f"{case.num_heads} heads of {head_dim}, {case.num_kv_heads} KV heads, batch {batch}, "
        f"{dtype}, {'causal' if is_causal else 'not causal'}{in_documents(documents)}, "
        f"{'gather' if found.gathers else 'ring'}, {case.device}, inputs of seed {seed}"
    )
    console.print(in_words(found.balance))
    chosen = found.ranks if every else _some(found.ranks)
    for table in (_compute_table, _memory_table, _exchange_table):
        console.print(table(chosen, found.ranks))
    for text in _conclusions(found):
        console.print(text)
    if json_file is not None:
        json_file.write_text(json.dumps(_as_json(case, layout, found)) + "\n")
        console.print(f"written: {json_file}", soft_wrap=True)
    return found.ok


def _pattern(
    name: str | None,
    segment_lengths: Sequence[int | None] | None,
    dilation_rates: Sequence[int] | None,
    head_offsets: str | None,
    head_branches: str | None,
) -> DilatedPattern:
    if (segment_lengths is None) != (dilation_rates is None):
        raise ValueError(
            "segment_lengths and dilation_rates go together; got "
            f"{segment_lengths} and {dilation_rates}"
        )
    options = {"head_offsets": head_offsets, "head_branches": head_branches}
    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    if segment_lengths is not None and dilation_rates is not None:
        if name is not None:
            raise ValueError(f"give a pattern's name or its segment_lengths, not both; got {name}")
        return DilatedPattern(segment_lengths, dilation_rates, **given)
    own = named_pattern("longnet" if name is None else name)
    names = ("head_offsets", "head_branches", "zero_keys")
    given = {**{key: getattr(own, key) for key in names}, **given}
    return DilatedPattern(own.segment_lengths, own.dilation_rates, **given)


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
