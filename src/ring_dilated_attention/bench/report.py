"""Results as tables, as notes and as JSON."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..terminal import (
    BYTES,
    Table,
    amounts,
    count_of,
    in_flop,
    in_seconds,
    json_text,
    numbers,
)
from .columns import PASSES, groups_of, keys_of, rows_of
from .contenders import OURS
from .options import Options
from .result import OK, Result, Timing, to_dict
from .workload import Workload

JSON_NAME = "results.json"

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


def document(
    results: Sequence[Result], environment: dict[str, Any], command: Sequence[str]
) -> dict[str, Any]:
    """What `JSON_NAME` holds: results, environment and the command line."""
    return {
        "command": list(command),
        "environment": environment,
        "results": [to_dict(result, results) for result in results],
    }


def write_json(
    folder: Path, results: Sequence[Result], environment: dict[str, Any], command: Sequence[str]
) -> Path:
    """Write `document` to `JSON_NAME` in a folder."""
    path = folder / JSON_NAME
    path.write_text(json_text(document(results, environment, command)))
    return path


def bytes_match(results: Sequence[Result]) -> bool:
    """Whether every call measured sent the bytes that its plan says."""
    timings = [result.timing(backward) for result in results for backward in (False, True)]
    found = [timing.communication for timing in timings if timing is not None]
    return all(communication.bytes_match for communication in found if communication is not None)


def of_several(results: Sequence[Result]) -> bool:
    """Whether several ranks were measured."""
    return any(result.ranks > 1 for result in results)


def introduction(workloads: Sequence[Workload], options: Options) -> str:
    """A line on what is about to be measured, and how."""
    sizes = sorted(set(options.ranks))
    contenders = ", ".join(dict.fromkeys((OURS, *options.baselines)))
    return (
        f"measuring {count_of(len(workloads), 'workload')} on {' and '.join(map(str, sizes))} "
        f"{'rank' if sizes == [1] else 'ranks'}: {contenders}; forward, and forward + backward; "
        f"at most {count_of(options.repeats, 'sample')} or {options.seconds:g} s each"
        f"{'; errors relative to float64' * options.errors}; seed {options.seed}"
    )


def legend(results: Sequence[Result]) -> list[str]:
    """What the columns of the tables mean, a line each."""
    return [group.meaning for group in groups_of(rows_of(results, results), of_several(results))]


def short_number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def tables(results: Sequence[Result]) -> list[Table]:
    """A table per workload, with two rows per size and contender: forward, and forward + backward.

    What was refused has no rows; `notes` say why. The error of the first row is that of out, of the
    second the largest of a gradient.
    """
    several = of_several(results)
    found: list[Table] = []
    for base, group in _by_workload(results).items():
        first, rows = group[0], rows_of(group, results)
        if not rows:
            continue
        title = str(base)
        if several:
            title += f", {first.scaling} scaling, layout {first.layout}, exchange {first.exchange}"
        columns = [column for group in groups_of(rows, several) for column in group.columns]
        found.append(Table(title=title, keys=keys_of(rows, several), columns=columns))
    return found


def _by_workload(results: Sequence[Result]) -> dict[Workload, list[Result]]:
    found: dict[Workload, list[Result]] = {}
    for result in results:
        found.setdefault(result.base, []).append(result)
    return found


def memory_tables(results: Sequence[Result]) -> list[Table]:
    """Where several ranks were measured, a table per workload: of the rank that holds most."""
    found: list[Table] = []
    for base, group in _by_workload(results).items() if of_several(results) else ():
        rows = [row for row in rows_of(group, results) if row.timing is not None]
        held = [row.timing.memory for row in rows if row.timing is not None]
        named = [(name, [getattr(memory, name) for memory in held]) for name in _COMPONENTS]
        known = [(name, values) for name, values in named if any(x is not None for x in values)]
        columns = [numbers("rank", [memory.rank for memory in held], "d"), *amounts(known, BYTES)]
        title = f"{base}: memory of the rank that holds most"
        note = "outbox: of copies between GPUs, not in the total"
        if rows:
            found.append(Table(title=title, keys=keys_of(rows, True), columns=columns, note=note))
    return found


def notes(results: Sequence[Result]) -> list[str]:
    """What the tables have no room for: why something is missing, rates, twins and graphs."""
    ceilings = {result.base.dtype: result.ceilings for result in results}
    lines = [
        f"{dtype}: matmul {c.matmul_size}^3 {in_flop(c.matmul_tflops * 1e12)}/s in a burst, "
        f"copy {c.copy_gb_s:.4g} GB/s"
        for dtype, c in ceilings.items()
    ]
    for result in results:
        on = f" on {count_of(result.ranks, 'rank')}" if of_several(results) else ""
        where = f"{result.workload}{on}, {result.contender}"
        if result.status != OK:
            lines.append(f"not measured: {where}: {result.status}: {result.reason}")
        elif result.errors_reason:
            lines.append(f"no errors: {where}: {result.errors_reason}")
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
        shown = "the workload itself" if twin == workload else f"{twin}{pattern}"
        lines.append(f"errors of {', '.join(names)} in {workload}: measured on {shown}")
    return lines


def _notes_of(timing: Timing) -> list[str]:
    lines = []
    if len(timing.flops_by_rank) > 1:
        rates = ", ".join(f"{rate:.4g}" for rate in timing.matmul_tflops)
        lines.append(
            f"{count_of(len(timing.times_ms), 'sample')} of {count_of(timing.calls, 'call')}; "
            f"matmul {timing.matmul_size}^3 {rates} TFLOP/s"
        )
    communication = timing.communication
    if communication is not None and not communication.bytes_match:
        lines.append(f"sent {communication.sent_bytes}, planned {communication.planned_bytes}")
    if timing.graph_ms:
        median, low, high = (
            in_seconds(figure(timing.graph_ms) / 1e3) for figure in (statistics.median, min, max)
        )
        lines.append(f"in a CUDA graph {median} ({low} to {high})")
    elif timing.graph_reason:
        lines.append(f"no CUDA graph: {timing.graph_reason}")
    return lines
