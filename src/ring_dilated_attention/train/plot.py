"""The loss curve of a run as a PNG."""

from __future__ import annotations

from pathlib import Path

from . import log

NAME = "loss.png"


def plot_losses(run: Path) -> Path:
    """Draw training and held-out bits per byte against the step, from the log of a run.

    Training losses are shown faintly one by one, and strongly as means of the last twentieth.

    Args:
        run: folder of the run; the picture goes to `NAME` in it.

    Returns:
        The path of the picture.

    Raises:
        ValueError: the log is damaged.
        OSError: the picture cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = log.read(run)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, label, style in (("step", "training", "-"), ("eval", "held out", "o-")):
        steps = [line["step"] for line in lines if line["kind"] == kind]
        bits = [line["bits_per_byte"] for line in lines if line["kind"] == kind]
        if not steps:
            continue
        if kind == "step":  # a batch may be one sequence, so losses scatter
            axes.plot(steps, bits, color="C0", alpha=0.3, linewidth=0.8)
            bits = _trailing_means(bits, max(1, len(bits) // 20))
        axes.plot(steps, bits, style, label=label, linewidth=1.4, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.set_title(run.name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    path = run / NAME
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
    return path


def _trailing_means(values: list[float], count: int) -> list[float]:
    """For every value, the mean of it and the ones before it, at most `count` of them."""
    windows = (values[max(0, i + 1 - count) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]
