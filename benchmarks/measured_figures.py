"""The figures of measured numbers; `figures.py` writes them.

Solid lines and bars in full colour are forward and backward together, dashed lines and pale bars
forward alone, in every figure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ring_dilated_attention.draw import Sheet, Style, add_grid, dress, headline

RESULTS = Path(__file__).parent / "results"
SLIDE_STEP = "slide_step.json"
ATTENTION = "attention_speed.json"
TWO_GPUS, FOUR_GPUS = "many_gpus_x2.json", "many_gpus_x4.json"
GIB = 2**30
DIRECTIONS = {"forward_backward": "-", "forward": (0, (4, 2))}
"""Line styles; by the names of the JSON files."""

PALE = 0.45
"""Opacity of bars of forward alone."""

NAMES = {
    "ours": "this library",
    "torchscale": "gather/scatter, FA2",
    "torchscale:cudnn": "gather/scatter, cuDNN",
    "cp:allgather": "torch context_parallel, all-gather",
    "cp:alltoall": "torch context_parallel, all-to-all",
    "sdpa:cudnn": "torch SDPA (cuDNN)",
    "flash4": "flash-attn-4",
}
COLORS = {
    "ours": "ours",
    "torchscale": "torchscale",
    "torchscale:cudnn": "torchscale",
    "cp:allgather": "context_parallel",
    "cp:alltoall": "context_parallel",
    "sdpa:cudnn": "cudnn",
    "flash4": "flash-attn-4",
}


@cache
def results(name: str) -> Any:
    """What a JSON file of benchmarks/results holds."""
    return json.loads((RESULTS / name).read_text())


def rows(table: Any) -> Sequence[Mapping[str, Any]]:
    """The results of a table, which is a list in one file and an object in another."""
    return [row for row in (table["results"] if isinstance(table, dict) else table)
            if row["status"] == "ok"]  # fmt: skip


def color_of(style: Style, contender: str) -> str:
    """The colour of a contender of `rda bench`."""
    return style.systems[COLORS[contender]]


def length_axis(axes, style: Style, lengths: Sequence[int], name: str) -> None:
    """A logarithmic axis that names the lengths that were measured."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{length:,}" for length in lengths])
    axes.set_xlim(min(lengths) / 1.35, max(lengths) * 1.35)
    axes.set_xlabel(name)


def times_axis(axes, style: Style, ticks: Sequence[float]) -> None:
    """A logarithmic axis of times."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticklabels([f"{tick:g}" for tick in ticks])
    dress(axes, style)
    add_grid(axes, style)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def label(axes, point: tuple[float, float], text: str, color: str, offset=(8, 0), **more) -> None:
    """A text beside the last point of a line."""
    look = {"ha": "left", "va": "center", "fontsize": 8.5, "fontweight": "bold"}
    axes.annotate(
        text, point, xytext=offset, textcoords="offset points", color=color, **{**look, **more}
    )


def slide_step(style: Style) -> Sheet:
    """Milliseconds of a slide encoder's training step against tiles, torchscale's and ours."""
    hosts = results(SLIDE_STEP)
    steps = [step for host in ("host A", "host B") for step in hosts[host]["steps"]]
    kinds = {
        "torchscale": ("torchscale", "torchscale", "-", "o"),
        "replaced": ("ours", "attention replaced by ours", (0, (1, 1.2)), "s"),
        "replaced exact compiled": ("ours", "same, exact, torch.compile", "-", "o"),
    }
    sheet = Sheet(style, 8.8, 5.0)
    sheet.text(0.15, 0.27, "A slide encoder's training step", fontsize=11.5, fontweight="bold")
    sheet.text(
        0.15, 0.5, "GigaPath's LongNet encoder, 1 H200, forward and backward; lower is better",
        color=style.muted,
    )  # fmt: skip
    axes = sheet.axes(0.75, 0.85, 5.5, 3.2)
    times_axis(axes, style, [20, 50, 100, 200, 500])
    found = {}
    for kind, (system, name, line, marker) in kinds.items():
        points = sorted((s["positions"], s["ms"]) for s in steps if s["kind"] == kind)
        xs, ms = [x for x, _ in points], [y for _, y in points]
        found[kind] = dict(zip(xs, [y[0] for y in ms], strict=True))
        color = style.systems[system]
        axes.plot(
            xs, [y[0] for y in ms], color=color, linestyle=line, marker=marker, markersize=5,
            linewidth=2,
        )  # fmt: skip
        axes.vlines(xs, [y[1] for y in ms], [y[2] for y in ms], color=color, linewidth=1.2)
        ratio = found["torchscale"][xs[-1]] / ms[-1][0]
        speed = "" if kind == "torchscale" else f", {ratio:.1f}× as fast"
        label(axes, (xs[-1], ms[-1][0]), f"{name}\n{ms[-1][0]:.0f} ms{speed}", color)
    best = found["replaced exact compiled"]
    for x, y in list(best.items())[:-1]:
        ratio = found["torchscale"][x] / y
        label(axes, (x, y), f"{y:.0f} ms\n{ratio:.1f}× as fast", color, (0, -18), ha="center")
    for s in [s for s in steps if s["kind"] == "torchscale"][:-1]:
        median, _, most = s["ms"]
        place = s["positions"], most
        label(axes, place, f"{median:.0f} ms", style.systems["torchscale"], (0, 8), ha="center")
    length_axis(axes, style, list(best), "tiles of a slide (tokens)")
    axes.set_ylim(15, 650)
    axes.set_ylabel("ms per step")
    sheet.note(
        "Median of 12 steps (6 at 45,681), thin lines: lowest to highest. Up to 10,001 tiles on "
        "one host, 45,681 on another.", 1,
    )  # fmt: skip
    sheet.note("Both axes logarithmic. Baseline of the factors: torchscale at the same length.")
    return sheet


def attention_speed(style: Style) -> Sheet:
    """Attention alone: against length in GigaPath's pattern; LongNet's and dense at one length."""
    sheet = Sheet(style, 9.8, 5.0)
    sheet.text(0.15, 0.27, "Attention alone", fontsize=11.5, fontweight="bold")
    sheet.text(
        0.15, 0.5, "one call on 1 H200, ms; lower is better. Full colour, solid: forward + "
        "backward; pale, dashed: forward", color=style.muted,
    )  # fmt: skip
    data = results(ATTENTION)
    axes = sheet.axes(0.75, 1.15, 3.1, 2.95)
    times_axis(axes, style, [0.1, 1, 10, 100])
    headline(axes, style, "GigaPath's pattern, 16 × 48, fp16")
    axes.set_ylim(0.25, 320)
    found = rows(data["gigapath"])
    for contender in ("ours", "torchscale"):
        draw_times(axes, style, contender, [r for r in found if r["contender"] == contender])
    length_axis(axes, style, sorted({r["case"]["length"] for r in found}), "tokens")
    axes.set_ylabel("ms per call")
    longnet = [
        r for r in rows(data["longnet"])
        if r["case"]["head_dim"] == 128 and not r["case"]["is_causal"]
    ]  # fmt: skip
    bars(
        sheet.axes(7.0, 1.15, 2.0, 1.15), style, "LongNet, 12 × 128, bf16, 262,144 tokens", longnet
    )
    dense = rows(data["dense"])
    title = "Dense, causal, 16 × 128, bf16, 65,536 tokens"
    bars(sheet.axes(7.0, 2.95, 2.0, 1.15), style, title, dense)
    sheet.note(
        "Median of 20 calls in turns, timed on the GPU. gather/scatter: torchscale's method "
        "rewritten for comparison, with FlashAttention-2 (FA2) or cuDNN.", 1,
    )  # fmt: skip
    sheet.note(
        "Left: both axes logarithmic; at 10,001 tokens forward + backward is the CPU's time."
    )
    return sheet


def bars(axes, style: Style, title: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Forward, and forward and backward, of several contenders at one length."""
    dress(axes, style, spines=())
    most = max(r["derived"]["forward_backward"]["median_ms"] for r in found)
    for place, row in enumerate(found):
        color = color_of(style, row["contender"])
        for direction, y, alpha in (("forward_backward", -0.18, 1.0), ("forward", 0.2, PALE)):
            ms = row["derived"][direction]["median_ms"]
            axes.barh(place + y, ms, height=0.36, color=color, alpha=alpha)
            axes.text(
                ms + most * 0.03, place + y, f"{ms:.3g} ms", va="center", fontsize=8,
                color=style.ink if alpha == 1 else style.muted,
            )  # fmt: skip
    axes.set_yticks(range(len(found)), [NAMES[row["contender"]] for row in found])
    axes.tick_params(axis="both", length=0, labelcolor=style.ink)
    axes.set_xticks([])
    axes.set_xlim(0, most)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.annotate(
        title, (0, 1), xytext=(-155, 7), xycoords="axes fraction", textcoords="offset points",
        fontsize=9.5, fontweight="bold", color=style.ink,
    )  # fmt: skip


def draw_times(axes, style: Style, contender: str, found: Sequence[Mapping[str, Any]]) -> None:
    """Forward, and forward and backward, of one contender."""
    color = color_of(style, contender)
    for direction, line in DIRECTIONS.items():
        points = sorted((r["case"]["length"], r["derived"][direction]["median_ms"]) for r in found)
        xs, ys = zip(*points, strict=True)
        both = direction == "forward_backward"
        axes.plot(
            xs, ys, color=color, linestyle=line, marker="o", markersize=4.5, linewidth=1.8,
            alpha=1 if both else 0.7,
        )  # fmt: skip
        up = 6 if contender == "ours" else -6
        if both:
            label(
                axes, (xs[-1], ys[-1]), f"{NAMES[contender]}\n{ys[-1]:.0f} ms", color, (8, abs(up))
            )
        else:
            label(axes, (xs[-1], ys[-1]), f"{ys[-1]:.0f} ms", color, (8, -7), fontweight="normal")


def gpu_rows(*, length: int) -> dict[tuple[int, str], Mapping[str, Any]]:
    """Dense causal attention of a length, by the number of GPUs and the contender.

    One GPU is that of the file of four.
    """
    return {
        (row["ranks"], row["contender"]): row
        for name in (TWO_GPUS, FOUR_GPUS)
        for row in rows(results(name)["tables"]["dense"])
        if row["case"]["length"] == length
    }


CONTENDERS = ("ours", "cp:allgather", "cp:alltoall")
DENSE_LENGTHS = (65536, 262144)


def gpu_memory(style: Style) -> Sheet:
    """GiB per GPU on 1, 2 and 4 GPUs, ours and torch's context_parallel."""
    sheet = Sheet(style, 9.4, 4.75)
    sheet.text(0.15, 0.27, "Memory per GPU: inputs and peak", fontsize=11.5, fontweight="bold")
    sheet.text(
        0.15, 0.5, "dense causal attention, forward + backward, 16 × 128, bf16; lower is better",
        color=style.muted,
    )  # fmt: skip
    for number, length in enumerate(DENSE_LENGTHS):
        axes = sheet.axes(0.75 + 4.55 * number, 1.25, 2.8, 2.6)
        found = gpu_rows(length=length)
        dress(axes, style)
        add_grid(axes, style)
        for contender in CONTENDERS:
            xs = [1, 2, 4]
            memory = [
                found[p, contender]["derived"]["forward_backward"]["memory_total"] for p in xs
            ]
            ys = [nbytes / GIB for nbytes in memory]
            color = color_of(style, contender)
            line = ":" if contender.endswith("alltoall") else "-"
            axes.plot(xs, ys, color=color, linestyle=line, marker="o", markersize=5, linewidth=2)
            end_label(axes, style, contender, xs[-1], ys[-1])
        one = found[1, "ours"]["derived"]["forward_backward"]["memory_total"] / GIB
        axes.plot(
            [1, 2, 4], [one, one / 2, one / 4], color=style.muted, linewidth=1, linestyle="--"
        )
        label(axes, (0.9, one / 8), "dashed: one GPU's, divided evenly", style.muted, (0, 0),
              ha="left", fontweight="normal")  # fmt: skip
        headline(axes, style, f"{length:,} tokens")
        axes.set_xticks([1, 2, 4])
        axes.set_xlim(0.8, 4.1)
        axes.set_ylim(0, None)
        axes.set_xlabel("GPUs")
        axes.set_ylabel("" if number else "GiB per GPU")
    sheet.note("H200s of one host; the GPU that holds most.")
    return sheet


def end_label(axes, style: Style, contender: str, x: float, y: float) -> None:
    """What a line is, beside its end."""
    names = {"ours": "this library", "cp:allgather": "context_parallel,\nall-gather",
             "cp:alltoall": "all-to-all"}  # fmt: skip
    up = {"ours": 0, "cp:allgather": 7, "cp:alltoall": -9}[contender]
    text = f"{names[contender]} {y:.1f}" if y < 100 else f"{names[contender]} {y:.0f}%"
    label(axes, (x, y), text, color_of(style, contender), (8, up))


CASES = {
    "LongNet": ("longnet", {"is_causal": False}),
    "dilated, across GPUs": ("crossing", {"is_causal": False}),
    "the same, causal": ("crossing", {"is_causal": True}),
    "dense causal, 262,144": ("dense", {"length": 262144}),
    "dense causal, 65,536": ("dense", {"length": 65536}),
}
"""What a case of `speed_per_gpu` is: a table of the JSON files, and which of its workloads."""
FLOOR = 65
"""Per cent at which the axis of `speed_per_gpu` starts."""


def speed_per_gpu(style: Style) -> Sheet:
    """How much of one GPU's speed each of several has, ours and torch's context_parallel."""
    sheet = Sheet(style, 9.4, 5.5)
    sheet.text(0.15, 0.27, "Speed per GPU", fontsize=11.5, fontweight="bold")
    sheet.text(
        0.15, 0.5, "this library's time on 1 GPU / (GPUs × time on them); higher is better",
        color=style.muted,
    )  # fmt: skip
    axes = sheet.axes(2.35, 1.1, 6.75, 3.45)
    dress(axes, style, spines=("bottom",))
    add_grid(axes, style, "x")
    names: list[str] = []
    for case, (table, wanted) in CASES.items():
        for gpus, name in ((2, TWO_GPUS), (4, FOUR_GPUS)):
            found = [
                row for row in rows(results(name)["tables"][table])
                if wanted.items() <= row["case"].items()
            ]  # fmt: skip
            draw_shares(axes, style, found, gpus, len(names))
            names.append(f"{case}: {gpus} GPUs" if gpus == 2 else "4 GPUs")
        if len(names) < 2 * len(CASES):
            axes.axhline(len(names) - 0.5, color=style.faint, linewidth=1)
    axes.axvline(100, color=style.ink, linewidth=1.2)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0, labelcolor=style.ink, labelsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(FLOOR, 101.5)
    axes.xaxis.set_major_formatter("{x:.0f}%")
    axes.set_xlabel(f"of one GPU's speed (the axis starts at {FLOOR}%); line: linear scaling")
    for number, (contender, text) in enumerate(
        (("ours", "this library"), ("cp:allgather", "torch context_parallel (2 methods)"))
    ):
        sheet.key(2.35 + 1.4 * number, 0.85, [color_of(style, contender)], [text])
    sheet.text(6.45, 0.85, "●  forward + backward    ○  forward", fontsize=8.5)
    sheet.note(
        "LongNet's pattern and one whose segments cross GPUs: 1,048,576 tokens, 12 × 128; dense: "
        "16 × 128; bf16; zigzag for causal work.", 1,
    )  # fmt: skip
    sheet.note("H200s of one host; the one GPU is of the same run.")
    return sheet


def draw_shares(axes, style: Style, found: Sequence[Mapping[str, Any]], gpus: int, y: int) -> None:
    """A dot for each contender and direction on a number of GPUs."""
    one = next(r for r in found if (r["ranks"], r["contender"]) == (1, "ours"))
    for row in found:
        if row["ranks"] != gpus or row["contender"] not in CONTENDERS:
            continue
        color = color_of(style, row["contender"])
        for direction in DIRECTIONS:
            share = one["derived"][direction]["median_ms"] / gpus
            share *= 100 / row["derived"][direction]["median_ms"]
            filled = direction == "forward_backward"
            axes.plot(
                share, y, "o", markersize=7.5, markeredgewidth=1.6, markeredgecolor=color,
                markerfacecolor=color if filled else "none",
            )  # fmt: skip
