"""Results as tables, as JSON and as a picture."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table

from .case import Case
from .result import OK, Result, Timing

JSON_NAME, PLOT_NAME = "results.json", "tflops.png"


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
        "results": [result.to_dict() for result in results],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def read_json(path: Path) -> list[Result]:
    """The results in a file of `write_json`."""
    return [Result.from_dict(data) for data in json.loads(path.read_text())["results"]]


def tables(results: Sequence[Result]) -> list[Table]:
    """A table per case, with two rows per contender: forward, and forward+backward.

    The error of the first row is that of out, of the second the largest of a gradient. Peak memory
    is in multiples of query's; ours/peer is the ratio of useful TFLOP/s.
    """
    found: dict[Case, Table] = {}
    for result in results:
        if result.case not in found:
            found[result.case] = _empty_table(str(result.case))
        name = result.contender
        if result.kernel not in ("", "auto", *name.split(":")):
            name += f" ({result.kernel})"
        errors = (result.errors.out, result.errors.gradients) if result.errors else (None, None)
        passes = (("forward", result.forward), ("fwd+bwd", result.forward_backward))
        for (label, timing), error, ratio in zip(passes, errors, result.ratios, strict=True):
            found[result.case].add_row(
                name if label == "forward" else "",
                label,
                *_cells(result, timing),
                "" if error is None else f"{error:.1e}",
                "" if ratio is None else f"{ratio:.2f}",
            )
    return list(found.values())


def _empty_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("ms [min .. max]", justify="right", no_wrap=True)
    for column in (
        "TFLOP/s",
        "of matmul",
        "wall ms",
        "peak",
        "error",
        "ours/peer",
    ):
        table.add_column(column, justify="right")
    return table


def notes(results: Sequence[Result]) -> list[str]:
    """What the tables have no room for: ceilings, twins, graphs, and why something is missing."""
    ceilings = {result.case.dtype: result.ceilings for result in results}
    lines = [
        f"{dtype}: matmul {c.matmul_size}^3 {c.matmul_tflops:.4g} TFLOP/s in a burst, "
        f"copy {c.copy_gb_s:.4g} GB/s"
        for dtype, c in ceilings.items()
    ]
    for result in results:
        where = f"{result.case}, {result.contender}"
        if result.status != OK:
            lines.append(f"{where}: {result.status}: {result.reason}")
        elif result.errors_reason:
            lines.append(f"{where}: not compared: {result.errors_reason}")
        for what in ("forward", "forward_backward"):
            timing: Timing | None = getattr(result, what)
            if timing is not None and timing.graph_ms:
                low, median, high = map(
                    short_number,
                    (
                        min(timing.graph_ms),
                        statistics.median(timing.graph_ms),
                        max(timing.graph_ms),
                    ),
                )
                lines.append(f"{where}: {what} in a CUDA graph {median} ms [{low} .. {high}]")
            elif timing is not None and timing.graph_reason:
                lines.append(f"{where}: {what} has no CUDA graph: {timing.graph_reason}")
    twins = {r.case: r.errors.twin for r in results if r.errors is not None}
    for case, twin in twins.items():
        pattern = f", {twin.pattern}" if twin.name else ""
        lines.append(f"errors of {case}: {'itself' if twin == case else f'on {twin}{pattern}'}")
    return lines


def _cells(result: Result, timing: Timing | None) -> tuple[str, ...]:
    if timing is None:
        return result.status, "", "", "", ""
    low, high = min(timing.times_ms), max(timing.times_ms)
    peak = timing.peak_bytes
    return (
        f"{short_number(timing.median_ms)} [{short_number(low)} .. {short_number(high)}]",
        short_number(timing.tflops),
        f"{100 * result.fraction(timing):.1f}%",
        short_number(statistics.median(timing.wall_ms)),
        "" if peak is None else f"{peak / result.case.query_bytes:.2f}",
    )


def _matmul_tflops(result: Result) -> float:
    timing = result.forward_backward or result.forward
    return timing.tflops / result.fraction(timing) if timing else result.ceilings.matmul_tflops


def short_number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def plot(folder: Path, results: Sequence[Result]) -> Path:
    """Draw `PLOT_NAME` in a folder: useful TFLOP/s of every contender, grouped by case.

    A black line over a group is the matmul rate. What has no timing has no bar.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(result.case for result in results))
    names = list(dict.fromkeys(result.contender for result in results))
    width = 0.8 / len(names)
    figure = Figure(figsize=(max(8.0, 1.5 + 1.6 * len(cases)), 9), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (field, title) in enumerate(
        (("forward", "forward"), ("forward_backward", "forward + backward")), 1
    ):
        axes = figure.add_subplot(2, 1, number)
        for index, name in enumerate(names):
            bars = [
                (cases.index(result.case) + (index + 0.5) * width - 0.4, getattr(result, field))
                for result in results
                if result.contender == name
            ]
            shown = [(x, timing.tflops) for x, timing in bars if timing is not None]
            if not shown:
                continue
            drawn = axes.bar(
                [x for x, _ in shown],
                [y for _, y in shown],
                width,
                label=name,
                color=f"C{index % 10}",
            )
            axes.bar_label(drawn, [short_number(y) for _, y in shown], fontsize=7)
        for place, case in enumerate(cases):
            rate = next(_matmul_tflops(r) for r in results if r.case == case)
            axes.plot([place - 0.42, place + 0.42], [rate, rate], color="black", linewidth=1.4)
        axes.set_xticks(range(len(cases)), [str(case) for case in cases], rotation=12, fontsize=7)
        axes.set_ylabel("useful TFLOP/s")
        axes.set_title(f"{title} (black: matmul rate)")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        if axes.containers:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    path = folder / PLOT_NAME
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
    return path
