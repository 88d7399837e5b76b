"""The curve of a run, drawn from its log."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from .run_folder import read_log

CURVE = "loss.png"
SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 120
STYLE: dict[Any, Any] = {
    "font.size": 11.0,
    "axes.titlesize": 12.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}
TRAINING, HELDOUT = "#0072b2", "#d55e00"  # told apart by the colour-blind too
MEAN_OF = 20  # the running mean is over this fraction of the steps: a twentieth


def plot_losses(run: Path) -> Path:
    """Draw training and held-out bits per byte against the step, from the log of a run.

    Training is drawn twice: faintly every step, and strongly the running mean of the last twentieth
    of the steps. Held-out evaluations are points, joined by a line.

    Args:
        run: folder of the run; the picture goes to `CURVE` in it.

    Returns:
        The path of the picture.

    Raises:
        ValueError: the log is damaged.
        OSError: the picture cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_log(run)
    with rc_context(STYLE):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        _draw(axes, lines)
        axes.set_title(f"Training of {run.resolve().name}: lower is better", loc="left")
        path = run / CURVE
        partial = path.with_suffix(".partial.png")
        figure.savefig(partial, dpi=DOTS_PER_INCH)
    partial.replace(path)
    return path


def _draw(axes: Any, lines: list[dict[str, Any]]) -> None:
    """The curves of a log, into axes of matplotlib."""
    steps, bits = _series(lines, "step")
    if steps:  # a batch may be one sequence, so losses scatter
        count = max(1, len(bits) // MEAN_OF)
        axes.plot(
            *(steps, bits),
            color=TRAINING,
            alpha=0.35,
            linewidth=0.8,
            label="training text, each step",
        )
        if count > 1:
            label = f"training text, mean of the last {count} steps"
            axes.plot(steps, _trailing_means(bits, count), color=TRAINING, lw=1.8, label=label)
    steps, bits = _series(lines, "eval")
    if steps:
        label = "held-out text"
        axes.plot(steps, bits, "o--", color=HELDOUT, lw=1.4, markersize=5, label=label)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("cross-entropy (bits per byte)")
    if axes.lines:
        axes.legend()


def _series(lines: list[dict[str, Any]], kind: str) -> tuple[list[int], list[float]]:
    chosen = [line for line in lines if line["kind"] == kind]
    return [line["step"] for line in chosen], [line["bits_per_byte"] for line in chosen]


def _trailing_means(values: list[float], count: int) -> list[float]:
    """For every value, the mean of it and the ones before it, at most `count` of them."""
    sums = [0.0, *accumulate(values)]
    starts = (max(0, stop - count) for stop in range(1, len(sums)))
    return [(sums[i + 1] - sums[start]) / (i + 1 - start) for i, start in enumerate(starts)]
