"""Results as a picture: rates on one rank, scaling and memory on several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .contenders import OURS
from .report import of_several, short_number
from .result import Result, Timing, compare

RATES_NAME, SCALING_NAME = "tflops.png", "scaling.png"
GIBI = 2**30
_STYLES = (("forward", "--"), ("forward + backward", "-"))


def plot(folder: Path, results: Sequence[Result]) -> Path:
    """Draw `SCALING_NAME` in a folder if several ranks were measured, otherwise `RATES_NAME`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    several = of_several(results)
    workloads = {result.workload for result in results}
    size = (14.0, 6.0) if several else (max(8.0, 1.5 + 1.6 * len(workloads)), 9.0)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    (_draw_scaling if several else _draw_rates)(figure, results)
    path = folder / (SCALING_NAME if several else RATES_NAME)
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
    return path


def _draw_rates(figure: Any, results: Sequence[Result]) -> None:
    """Useful TFLOP/s of every contender, grouped by workload.

    A black line over a group is the matmul rate. What has no timing has no bar.
    """
    workloads = list(dict.fromkeys(result.workload for result in results))
    names = list(dict.fromkeys(result.contender for result in results))
    width = 0.8 / len(names)
    for backward, (title, _) in enumerate(_STYLES):
        axes = figure.add_subplot(2, 1, 1 + backward)
        timed = [(r, t) for r in results if (t := r.timing(bool(backward))) is not None]
        for index, name in enumerate(names):
            shown = [
                (workloads.index(r.workload) + (index + 0.5) * width - 0.4, t.tflops)
                for r, t in timed
                if r.contender == name
            ]
            if shown:
                places, rates = zip(*shown, strict=True)
                bars = axes.bar(places, rates, width, label=name, color=f"C{index % 10}")
                axes.bar_label(bars, [short_number(rate) for rate in rates], fontsize=7)
        for place, workload in enumerate(workloads):
            of_group = [t.matmul_tflops for r, t in timed if r.workload == workload]
            if of_group:
                rate = statistics.mean(of_group[0])
                axes.plot([place - 0.42, place + 0.42], [rate] * 2, color="black", linewidth=1.4)
        labels = [str(workload) for workload in workloads]
        axes.set_xticks(range(len(workloads)), labels, rotation=12, fontsize=7)
        axes.set_ylabel("useful TFLOP/s")
        axes.set_title(f"{title} (black: matmul rate)")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        if axes.containers:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_scaling(figure: Any, results: Sequence[Result]) -> None:
    """Speed-up (or efficiency) and memory per rank, against ranks.

    Dashed lines are forward, solid ones forward and backward; black dots are ideal. Where the peak
    is not known (CPU), the memory is what inputs, results and planned buffers take.
    """
    from matplotlib.ticker import MaxNLocator

    speed, memory = figure.subplots(1, 2)
    sizes = sorted({result.ranks for result in results})
    weak = any(result.scaling == "weak" for result in results)
    lines = {(result.base, result.contender): None for result in results}
    several = len({base for base, _ in lines}) > 1
    for index, (base, contender) in enumerate(lines):
        of_line = [r for r in results if (r.base, r.contender) == (base, contender)]
        label = f"{contender}, {base}" if several else contender
        for backward, (what, style) in enumerate(_STYLES):
            drawing = {
                "color": f"C{index % 10}", "linestyle": style, "marker": "o", "markersize": 4,
                "label": f"{label}, {what}",
            }  # fmt: skip
            timings = [(r, t) for r in of_line if (t := r.timing(bool(backward))) is not None]
            ratios = [
                (r.ranks, ratio)
                for r, _ in timings
                if (ratio := compare(r, results, bool(backward)).speed_up) is not None
            ]
            _draw(speed, ratios, drawing)
            held = [(r.ranks, _held(t)) for r, t in timings]
            _draw(memory, held, drawing)
            if not weak and contender == OURS and held and held[0][0] == 1:
                ideal = [held[0][1] / size for size in sizes]
                memory.plot(sizes, ideal, color="black", linestyle=":", linewidth=1)
    speed.plot(sizes, [1 if weak else s for s in sizes], color="black", linestyle=":", linewidth=1)
    speed.set_ylabel("time on 1 rank / time" + (" (efficiency)" if weak else " (speed-up)"))
    title = f"{'weak' if weak else 'strong'} scaling"
    speed.set_title(title if several else f"{title}\n{results[0].base}", fontsize=9)
    known = all(t is None or t.memory.peak is not None for r in results for t in _timings(r))
    memory.set_ylabel("GiB per rank: inputs and " + ("peak" if known else "what is planned"))
    memory.set_title("memory of the rank that holds most", fontsize=9)
    for axes in (speed, memory):
        axes.set_xlabel("ranks")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    memory.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)


def _timings(result: Result) -> tuple[Timing | None, Timing | None]:
    return result.forward, result.forward_backward


def _held(timing: Timing) -> float:
    memory = timing.memory
    total = memory.total
    return (memory.inputs + memory.expected if total is None else total) / GIBI


def _draw(axes: Any, points: Sequence[tuple[int, float]], drawing: dict[str, Any]) -> None:
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], **drawing)
