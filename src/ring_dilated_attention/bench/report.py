"""Results as tables, as notes and as JSON."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE
from rich.table import Table

from .result import OK, Comparison, RankMemory, Result, Timing, compare, to_dict
from .workload import Workload

JSON_NAME = "results.json"
MEBI = 2**20
PASSES = ("forward", "fwd+bwd")

_LEGEND = (
    "ms: of one call, median [min .. max]; TFLOP/s: useful work only, backward counts 2.5 times "
    "forward; wall: by the clock, from before a call until the device is idle; peak: memory over "
    "the inputs, in multiples of query; error: of out, and the largest of a gradient; "
    "ours/baseline: of TFLOP/s"
)
_LEGEND_OF_SEVERAL = (
    "; ms: of the slowest rank, median of samples; speed-up: time on 1 rank over this (weak "
    "scaling: the efficiency, 1 is ideal where work is linear); rate/1: TFLOP/s per rank over that "
    "of 1 rank; exposed: time that compute waits for rows of others on the rank that waits "
    "longest, its share of the call, and the share on the rank that waits least; sent: bytes per "
    "rank, the most of any rank, and whether all are those of the plan; total/1: inputs and peak "
    "over those of 1 rank"
)
_COMPONENTS = (
    "query", "key", "value", "dout", "out", "lse", "buffers", "gradients", "temporaries", "peak",
    "total", "outbox",
)  # fmt: skip


def environment(device: torch.device | str) -> dict[str, Any]:
    """The device, and the versions of what computes on it."""
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        if torch.distributed.is_nccl_available():
            found["nccl"] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["triton"] = _version("triton")
        found["flash-attn-4"] = _version("flash-attn-4")
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def write_json(
    folder: Path, results: Sequence[Result], environment: dict[str, Any], command: Sequence[str]
) -> Path:
    """Write `JSON_NAME` in a folder: results, environment and the command line."""
    path = folder / JSON_NAME
    document = {
        "command": list(command),
        "environment": environment,
        "results": [to_dict(result, results) for result in results],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def bytes_match(results: Sequence[Result]) -> bool:
    """Whether every call measured sent the bytes that its plan says."""
    timings = [result.timing(backward) for result in results for backward in (False, True)]
    found = [timing.communication for timing in timings if timing is not None]
    return all(communication.bytes_match for communication in found if communication is not None)


def of_several(results: Sequence[Result]) -> bool:
    """Whether several ranks were measured."""
    return any(result.ranks > 1 for result in results)


def legend(results: Sequence[Result]) -> str:
    """What the columns of the tables mean."""
    return _LEGEND + _LEGEND_OF_SEVERAL * of_several(results)


class _Column(NamedTuple):
    """A column of numbers: its title, a cell, and whether it is shown for one rank or several."""

    title: str
    cell: Callable[[Timing, Comparison], str]
    for_one: bool = True
    for_several: bool = True


def short_number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _spread(times: Sequence[float]) -> str:
    median, low, high = map(short_number, (statistics.median(times), min(times), max(times)))
    return f"{median} [{low} .. {high}]"


def _exposed(timing: Timing, _: Comparison) -> str:
    found = timing.communication
    if found is None:
        return ""
    most, least = (f"{100 * share:.1f}%" for share in (max(found.shares), min(found.shares)))
    return f"{short_number(max(found.exposed_ms))} ms {most} / {least}"


def _sent(timing: Timing, _: Comparison) -> str:
    found = timing.communication
    if found is None:
        return ""
    mark = "✓" if found.bytes_match else "✗"
    return f"{short_number(max(found.sent_bytes) / MEBI)} MiB {mark}"


_COLUMNS = (
    _Column(r"ms \[min .. max]", lambda timing, _: _spread(timing.times_ms)),
    _Column("TFLOP/s", lambda timing, _: short_number(timing.tflops)),
    _Column("per rank", lambda timing, _: short_number(timing.tflops_per_rank), for_one=False),
    _Column("of matmul", lambda timing, _: f"{100 * timing.fraction:.1f}%"),
    _Column(
        "wall ms",
        lambda timing, _: short_number(statistics.median(timing.wall_ms)) if timing.wall_ms else "",
        for_several=False,
    ),
    _Column("speed-up", lambda _, beside: _ratio(beside.speed_up), for_one=False),
    _Column("rate/1", lambda _, beside: _ratio(beside.rate_to_one), for_one=False),
    _Column("ours/baseline", lambda _, beside: _ratio(beside.ours_to_this)),
    _Column("exposed", _exposed, for_one=False),
    _Column("sent", _sent, for_one=False),
    _Column("peak", lambda timing, _: _ratio(timing.memory.peak_in_queries, 2)),
    _Column("total/1", lambda _, beside: _ratio(beside.memory_to_one), for_one=False),
)


def tables(results: Sequence[Result]) -> list[Table]:
    """A table per workload, with two rows per size and contender: forward, and forward+backward.

    The error of the first row is that of out, of the second the largest of a gradient.
    """
    several = of_several(results)
    columns = [c for c in _COLUMNS if (c.for_several if several else c.for_one)]
    found: dict[Workload, Table] = {}
    for result in results:
        if result.base not in found:
            title = str(result.base)
            if several:
                title += f", {result.scaling} scaling, layout {result.layout}"
                title += f", exchange {result.exchange}"
            names = ("ranks", "", "") if several else ("", "")
            found[result.base] = _table(title, names, [c.title for c in columns] + ["error"])
        name = result.contender
        if result.kernel not in ("", "auto", *name.split(":")):
            name += f" ({result.kernel})"
        errors = (result.errors.out, result.errors.gradients) if result.errors else (None, None)
        for backward, error in enumerate(errors):
            first = ((str(result.ranks), name) if several else (name,)) if not backward else ()
            timing = result.timing(bool(backward))
            if timing is None:
                cells = [result.status, *[""] * (len(columns) - 1)]
            else:
                beside = compare(result, results, bool(backward))
                cells = [column.cell(timing, beside) for column in columns]
            found[result.base].add_row(
                *(first or [""] * (1 + several)),
                PASSES[backward],
                *cells,
                "" if error is None else f"{error:.1e}",
            )
    return list(found.values())


def memory_tables(results: Sequence[Result]) -> list[Table]:
    """Where several ranks were measured, a table per workload: MiB of the rank that holds most."""
    found: dict[Workload, Table] = {}
    for result in results if of_several(results) else ():
        for backward, label in enumerate(PASSES):
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


def _mebibytes(memory: RankMemory, name: str) -> str:
    value: int | None = getattr(memory, name)
    return "" if value is None else short_number(value / MEBI)


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def notes(results: Sequence[Result]) -> list[str]:
    """What the tables have no room for: rates, twins, graphs, and why something is missing."""
    ceilings = {result.base.dtype: result.ceilings for result in results}
    lines = [
        f"{dtype}: matmul {c.matmul_size}^3 {c.matmul_tflops:.4g} TFLOP/s in a burst, "
        f"copy {c.copy_gb_s:.4g} GB/s"
        for dtype, c in ceilings.items()
    ]
    for result in results:
        on = f" on {result.ranks}" if of_several(results) else ""
        where = f"{result.workload}{on}, {result.contender}"
        if result.status != OK:
            lines.append(f"{where}: {result.status}: {result.reason}")
        elif result.errors_reason:
            lines.append(f"{where}: not compared: {result.errors_reason}")
        for backward, label in enumerate(PASSES):
            timing = result.timing(bool(backward))
            if timing is not None:
                lines += [f"{where}, {label}: {line}" for line in _notes_of(timing)]
    twins: dict[tuple[Workload, Workload], list[str]] = {}
    for result in results:
        if result.errors is not None:
            named = twins.setdefault((result.workload, result.errors.twin), [])
            named += [result.contender] * (result.contender not in named)
    for (workload, twin), names in twins.items():
        pattern = f", {twin.pattern}" if twin.name else ""
        shown = "itself" if twin == workload else f"{twin}{pattern}"
        lines.append(f"errors of {', '.join(names)} in {workload}: on {shown}")
    return lines


def _notes_of(timing: Timing) -> list[str]:
    lines = []
    if len(timing.flops_by_rank) > 1:
        rates = ", ".join(f"{rate:.4g}" for rate in timing.matmul_tflops)
        lines.append(
            f"{len(timing.times_ms)} samples of {timing.calls} call(s); "
            f"matmul {timing.matmul_size}^3 {rates} TFLOP/s"
        )
    communication = timing.communication
    if communication is not None and not communication.bytes_match:
        lines.append(f"sent {communication.sent_bytes}, planned {communication.planned_bytes}")
    if timing.graph_ms:
        lines.append(f"in a CUDA graph {_spread(timing.graph_ms)} ms")
    elif timing.graph_reason:
        lines.append(f"no CUDA graph: {timing.graph_reason}")
    return lines
