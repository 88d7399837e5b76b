"""Results as lines and tables, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..units import count_of, in_bytes, in_flop
from .result import COMPONENTS, OURS, Result

PASSES = ("forward", "forward+backward")
TIMES = ("system", "median", "lowest", "highest", "rate of a rank", "sent")

Table = tuple[str, Sequence[str], list[list[str]]]
"""Title, headings and rows."""


def report(results: Sequence[Result]) -> Iterator[str | Table]:
    """Lines and tables of each workload: ratios of times in words, times, memory, and refusals."""
    components = [name.replace("key_value", "key, value") for name in COMPONENTS]
    for workload in dict.fromkeys(result.workload for result in results):
        own = [result for result in results if result.workload == workload]
        measured = [result for result in own if result.samples_ms]
        yield f"\n{workload}"
        yield from (sentence for result in measured if (sentence := _ratio(result, results)))
        if measured:
            yield "time of a call, ms", TIMES, [_times(result) for result in measured]
            rows = [_memory(result) for result in measured]
            yield "memory of the rank that holds most", ["system", *components, "total"], rows
        yield from dict.fromkeys(
            f"{x.contender}, {count_of(x.ranks, 'rank')}: {x.reason}" for x in own if x.reason
        )


def _ratio(result: Result, results: Sequence[Result]) -> str:
    """The ratio of times that matters, in words; empty: there is none."""
    ours = result.contender == OURS
    ratio = result.time_over(OURS, 1 if ours else result.ranks, results)
    if ratio is None or (ours and result.ranks == 1):
        return ""
    if ours:
        return f"{_name(result)}: {1 / ratio:.2f} times as fast as on 1 rank"
    return f"{_name(result)}: takes {ratio:.2f} times as long as ours"


def _times(result: Result) -> list[str]:
    times = (result.median_ms or 0, min(result.samples_ms), max(result.samples_ms))
    rate = f"{in_flop(1e12 * (result.tflops or 0))}/s"
    sent = in_bytes(result.sent) if result.sent else ""
    return [_name(result), *(f"{ms:,.3f}" for ms in times), rate, sent]


def _memory(result: Result) -> list[str]:
    cells = ["not known" if n is None else in_bytes(n) for n in result.memory.values()]
    return [_name(result), *cells, in_bytes(result.total_memory)]


def _name(result: Result) -> str:
    kernel = "" if result.kernel in result.contender else f" ({result.kernel})"
    ranks = count_of(result.ranks, "rank")
    return f"{result.contender}{kernel}, {ranks}, {PASSES[result.backward]}"


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw times and memory as bars, one for each contender and number of ranks.

    Args:
        results: of one run; what was not measured has no bar.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(result.workload for result in results))
    height = 2 * len(workloads) + 0.2 * len(results)
    figure = Figure(figsize=(13, height), layout="constrained")
    axes = figure.subplots(len(workloads), 2, squeeze=False, sharey="row")
    for (times, memory), workload in zip(axes, workloads, strict=True):
        own = [result for result in results if result.workload == workload and result.samples_ms]
        for result in own:
            name = f"{result.contender}, {count_of(result.ranks, 'rank')}"
            colour = "C0" if result.contender == OURS else "C7"
            alpha = 0.4 if result.backward else 1.0
            bar = times.barh(name, result.median_ms or 0, color=colour, alpha=alpha)
            if not result.backward:
                continue
            times.bar_label(bar, [f" {result.median_ms:,.4g}"])
            left = 0.0
            for number, component in enumerate(COMPONENTS):
                width = max(0, result.memory[component] or 0) / 2**20
                memory.barh(name, width, left=left, color=f"C{number}")
                left += width
        times.set_title(str(workload), loc="left")
        times.invert_yaxis()
        times.margins(x=0.15)
        times.set_xlabel("ms: forward (dark), forward+backward (light)")
        memory.set_xlabel("MiB of the rank that holds most, forward+backward")
        memory.legend(COMPONENTS, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
