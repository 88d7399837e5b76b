"""Results of several ranks as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from .case import Case
from .ranks_plot import plot
from .ranks_result import RankMemory, RanksResult, RanksTiming, compare, to_dict
from .report import JSON_NAME, short_number
from .result import OK

__all__ = ["LEGEND", "bytes_match", "memory_tables", "notes", "plot", "tables", "write_json"]

LEGEND = (
    "ms: of one call on the slowest rank, median of samples [min .. max]; TFLOP/s: useful work "
    "only, backward counts 2.5 times forward; speed-up: time on 1 rank over this (weak scaling: "
    "the efficiency, 1 is ideal where work is linear); rate/1: TFLOP/s per rank over that of 1 "
    "rank; exposed: time that compute waits for rows of others on the rank that waits longest, its "
    "share of the call, and the share on the rank that waits least; sent: bytes per rank, the most "
    "of any rank, and whether all are those of the plan; peak: over the inputs, in multiples of "
    "the rank's query; total/1: inputs and peak over those of 1 rank; error: of out, and the "
    "largest of a gradient"
)
MEBI = 2**20
_PASSES = ("forward", "fwd+bwd")
_COMPONENTS = (
    "query", "key", "value", "dout", "out", "lse", "buffers", "gradients", "temporaries", "peak",
    "total", "outbox",
)  # fmt: skip


def write_json(
    folder: Path,
    results: Sequence[RanksResult],
    environment: dict[str, Any],
    command: Sequence[str],
) -> Path:
    """Write `report.JSON_NAME` in a folder: results, environment and the command line."""
    path = folder / JSON_NAME
    document = {
        "command": list(command),
        "environment": environment,
        "results": [to_dict(result, results) for result in results],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def bytes_match(results: Sequence[RanksResult]) -> bool:
    """Whether every call measured sent the bytes that its plan says."""
    timings = [result.timing(backward) for result in results for backward in (False, True)]
    found = [timing.communication for timing in timings if timing is not None]
    return all(communication.bytes_match for communication in found if communication is not None)


def tables(results: Sequence[RanksResult]) -> list[Table]:
    """A table per case, with two rows per size and contender: forward, and forward+backward."""
    found: dict[Case, Table] = {}
    for result in results:
        if result.base not in found:
            found[result.base] = _table(
                f"{result.base}, {result.scaling} scaling, layout {result.layout}, "
                f"exchange {result.exchange}",
                ("ranks", "", ""),
                (
                    r"ms \[min .. max]", "TFLOP/s", "per rank", "of matmul", "speed-up", "rate/1",
                    "ours/peer", "exposed", "sent", "peak", "total/1", "error",
                ),
            )  # fmt: skip
        errors = (result.errors.out, result.errors.gradients) if result.errors else (None, None)
        for backward, error in enumerate(errors):
            found[result.base].add_row(
                "" if backward else str(result.ranks),
                "" if backward else result.contender,
                _PASSES[backward],
                *_cells(result, results, bool(backward)),
                "" if error is None else f"{error:.1e}",
            )
    return list(found.values())


def memory_tables(results: Sequence[RanksResult]) -> list[Table]:
    """A table per case: MiB of the rank that holds most, by what they are."""
    found: dict[Case, Table] = {}
    for result in results:
        for backward, label in enumerate(_PASSES):
            timing = result.timing(bool(backward))
            if timing is None:
                continue
            if result.base not in found:
                found[result.base] = _table(
                    f"{result.base}: MiB of the rank that holds most; beside its total: the outbox "
                    "of copies between GPUs",
                    ("ranks", "", ""),
                    ("rank", *_COMPONENTS),
                )
            found[result.base].add_row(
                str(result.ranks),
                result.contender,
                label,
                str(timing.memory.rank),
                *(_mebibytes(timing.memory, name) for name in _COMPONENTS),
            )
    return list(found.values())


def notes(results: Sequence[RanksResult]) -> list[str]:
    """What the tables have no room for: matmul rates, twins, and why something is missing."""
    lines = []
    for result in results:
        where = f"{result.case} on {result.ranks}, {result.contender}"
        if result.status != OK:
            lines.append(f"{where}: {result.status}: {result.reason}")
        elif result.errors_reason:
            lines.append(f"{where}: not compared: {result.errors_reason}")
        for backward, label in enumerate(_PASSES):
            timing = result.timing(bool(backward))
            if timing is None:
                continue
            rates = ", ".join(f"{rate:.4g}" for rate in timing.matmul_tflops)
            lines.append(
                f"{where}, {label}: {len(timing.times_ms)} samples of {timing.calls} call(s); "
                f"matmul {timing.matmul_size}^3 {rates} TFLOP/s"
            )
            communication = timing.communication
            if communication is not None and not communication.bytes_match:
                lines.append(
                    f"{where}, {label}: sent {communication.sent_bytes}, "
                    f"planned {communication.planned_bytes}"
                )
    twins = {(r.case, r.contender): r.errors.twin for r in results if r.errors is not None}
    for (case, contender), twin in twins.items():
        pattern = f", {twin.pattern}" if twin.name else ""
        lines.append(f"errors of {contender} in {case}: on {twin}{pattern}")
    return lines


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(result: RanksResult, results: Sequence[RanksResult], backward: bool) -> list[str]:
    timing = result.timing(backward)
    if timing is None:
        return [result.status, *[""] * 10]
    beside = compare(result, results, backward)
    low, high = min(timing.times_ms), max(timing.times_ms)
    exposed, sent = _communication(timing)
    memory = timing.memory
    return [
        f"{short_number(timing.median_ms)} [{short_number(low)} .. {short_number(high)}]",
        short_number(timing.tflops),
        short_number(timing.tflops_per_rank),
        f"{100 * timing.fraction:.1f}%",
        _ratio(beside.speed_up),
        _ratio(beside.rate_to_one),
        _ratio(beside.ours_to_this),
        exposed,
        sent,
        "" if memory.peak is None else f"{memory.peak / memory.query:.2f}",
        _ratio(beside.memory_to_one),
    ]


def _communication(timing: RanksTiming) -> tuple[str, str]:
    found = timing.communication
    if found is None:
        return "", ""
    most, least = (f"{100 * share:.1f}%" for share in (max(found.shares), min(found.shares)))
    exposed = f"{short_number(max(found.exposed_ms))} ms {most} / {least}"
    mark = "✓" if found.bytes_match else "✗"
    return exposed, f"{short_number(max(found.sent_bytes) / MEBI)} MiB {mark}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _mebibytes(memory: RankMemory, name: str) -> str:
    value: int | None = getattr(memory, name)
    return "" if value is None else short_number(value / MEBI)
