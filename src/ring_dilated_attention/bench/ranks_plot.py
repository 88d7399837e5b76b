"""Speed-up and memory of several ranks as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .peers import OURS
from .ranks_result import RanksResult, RanksTiming, compare

PLOT_NAME = "scaling.png"
GIBI = 2**30
_STYLES = (("forward", "--"), ("forward + backward", "-"))


def plot(folder: Path, results: Sequence[RanksResult]) -> Path:
    """Draw `PLOT_NAME` in a folder: speed-up (or efficiency) and memory per rank, against ranks.

    Dashed lines are forward, solid ones forward and backward; black dots are ideal. Where the peak
    is not known (CPU), the memory is what inputs, results and planned buffers take.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(14, 6), layout="constrained")
    FigureCanvasAgg(figure)
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
    path = folder / PLOT_NAME
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
    return path


def _timings(result: RanksResult) -> tuple[RanksTiming | None, RanksTiming | None]:
    return result.forward, result.forward_backward


def _held(timing: RanksTiming) -> float:
    memory = timing.memory
    total = memory.total
    return (memory.inputs + memory.expected if total is None else total) / GIBI


def _draw(axes: Any, points: Sequence[tuple[int, float]], drawing: dict[str, Any]) -> None:
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], **drawing)
