"""The figures of measured numbers; `figures.py` writes them.

Solid lines, full colours and filled dots are forward and backward together; dashed lines, pale bars
and empty dots are forward alone.
"""

from __future__ import annotations

import json
import textwrap
from itertools import product
from pathlib import Path

from matplotlib.ticker import FixedLocator, NullLocator

from ring_dilated_attention import draw

RESULTS = Path(__file__).parent / "results"
BOTH, FORWARD = "forward_backward", "forward"
OURS_AND_CP = ("ours", "cp:allgather", "cp:alltoall")
NAMES = {
    "ours": "this library",
    "torchscale": "gather/scatter, FA2",
    "torchscale:cudnn": "gather/scatter, cuDNN",
    "cp:allgather": "context_parallel, all-gather",
    "cp:alltoall": "context_parallel, all-to-all",
    "sdpa:cudnn": "torch SDPA (cuDNN)",
    "flash4": "flash-attn-4",
}


def new_figure(style, height, title="", note=""):
    """A figure so narrow that a phone shows its text at a size that can be read."""
    return draw.new_figure(style, 5.4, height, title, textwrap.fill(note, 88))


def rows(name, table, **case):
    """The rows of a table of a JSON file whose cases have these values."""
    found = json.loads((RESULTS / name).read_text())
    found = found.get("tables", found)[table]
    found = found["results"] if isinstance(found, dict) else found
    return [r for r in found if r["status"] == "ok" and case.items() <= r["case"].items()]


def ms(row, direction=BOTH):
    """Median milliseconds."""
    return row["derived"][direction]["median_ms"]


def color_of(style, contender):
    """The colour of a contender of `rda bench`."""
    places = {"torchscale": 0, "flash4": 1, "cp": 2, "sdpa": 3}
    kind = contender.split(":")[0]
    return style.branches[1] if kind == "ours" else style.ranks[places[kind]]


def ticks(axis, places, words):
    """Put ticks at these places alone."""
    axis.set_major_locator(FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_ticklabels([words(place) for place in places])


def label(axes, point, text, color, offset=(6, 0), weight="bold"):
    """A text beside a point."""
    look = {"va": "center", "fontsize": 8.5, "weight": weight, "color": color}
    axes.annotate(text, point, xytext=offset, textcoords="offset points", **look)


def dress_bars(axes, style, title, names, most):
    """Horizontal bars from 0 to `most`, with names at their left."""
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, most), ylim=(len(names) - 0.5, -0.5), xticks=[])
    draw.dress(axes, style, spines=())
    axes.tick_params(axis="y", labelcolor=style.ink, labelsize=9)
    draw.set_titles(axes, style, title)


def slide_step(style):
    """Milliseconds of a slide encoder's training step, torchscale's and ours, by tiles."""
    hosts = json.loads((RESULTS / "slide_step.json").read_text())
    steps = [step for host in ("host A", "host B") for step in hosts[host]["steps"]]
    found = {(step["positions"], step["kind"]): step["ms"] for step in steps}
    kinds = {
        "torchscale": "torchscale",
        "replaced": "attention replaced",
        "replaced compiled": "same, torch.compile",
        "replaced exact compiled": "compiled, exact gradient",
    }
    note = (
        "GigaPath's LongNet encoder on one H200, forward and backward: median of 12 steps (6 of "
        "45,681 tiles); thin lines: lowest to highest.\nFactors: torchscale's time over this one. "
        "The longest slide was measured on another host. All axes start at 0."
    )
    title = "A slide encoder's training step in milliseconds: lower is better"
    figure = new_figure(style, 3.3, title, note)
    for axes, tiles in zip(figure.subplots(1, 3, sharey=True), (1501, 10001, 45681), strict=True):
        base, _, most = found[tiles, "torchscale"]
        for place, kind in enumerate(kinds):
            if (tiles, kind) not in found:
                label(axes, (0, place), "not measured", style.muted, weight="normal")
                continue
            median, low, high = found[tiles, kind]
            color = color_of(style, "torchscale" if kind == "torchscale" else "ours")
            axes.barh(place, median, 0.62, color=color)
            axes.hlines(place, low, high, color=style.ink, linewidth=1)
            factor = "" if kind == "torchscale" else f" ({base / median:.1f}×)"
            label(axes, (high, place), f"{median:.0f}{factor}", style.ink)
        dress_bars(axes, style, f"{tiles:,} tiles", list(kinds.values()), most * 1.7)
    return figure


def attention_speed(style):
    """Attention alone: against length in GigaPath's pattern; LongNet's and dense at one length."""
    name = "attention_speed.json"
    note = (
        "One call on one H200, median of 20 in turns; full colour: forward + backward; pale and "
        "dashed: forward. gather/scatter: torchscale's\nmethod rewritten for comparison, with "
        "FlashAttention-2 (FA2) or cuDNN. At 10,001 tokens forward + backward is the CPU's time."
    )
    figure = new_figure(style, 7.6, "Attention alone: lower is better", note)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.3])
    axes = above.subplots()
    for contender in ("ours", "torchscale"):
        found = [row for row in rows(name, "gigapath") if row["contender"] == contender]
        found.sort(key=lambda row: row["case"]["length"])
        lengths, color = [row["case"]["length"] for row in found], color_of(style, contender)
        for direction, line, up in ((BOTH, "-", 6), (FORWARD, "--", -6)):
            times = [ms(row, direction) for row in found]
            axes.plot(lengths, times, color=color, linestyle=line, marker="o", markersize=4)
            words = f"{NAMES[contender]}\n" * (direction == BOTH) + f"{times[-1]:.0f} ms"
            label(axes, (lengths[-1], times[-1]), words, color, (7, up))
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms per call")
    ticks(axes.xaxis, lengths, "{:,}".format)
    draw.dress(axes, style, spines=("bottom",), grid="y")
    draw.set_titles(axes, style, "GigaPath's pattern, 16 × 48, fp16")
    longnet = "LongNet, 12 × 128, bf16, 262,144 tokens"
    dense = "Dense, causal, 16 × 128, bf16, 65,536 tokens"
    found_by = {longnet: rows(name, "longnet", head_dim=128, is_causal=False)}
    found_by[dense] = rows(name, "dense")
    for axes, (title, found) in zip(below.subplots(2, 1), found_by.items(), strict=True):
        for place, row in enumerate(found):
            for direction, shift, alpha in ((BOTH, -0.18, 1.0), (FORWARD, 0.2, 0.45)):
                time, color = ms(row, direction), color_of(style, row["contender"])
                axes.barh(place + shift, time, 0.36, color=color, alpha=alpha)
                label(axes, (time, place + shift), f"{time:.3g} ms", style.ink, weight="normal")
        names, most = [NAMES[row["contender"]] for row in found], max(map(ms, found))
        dress_bars(axes, style, title, names, 1.15 * most)
    return figure


def gpu_rows(gpus, table, **case):
    """Rows by the number of GPUs and the contender, of the run on up to 2 or 4 GPUs."""
    found = rows(f"many_gpus_x{gpus}.json", table, **case)
    return {(row["ranks"], row["contender"]): row for row in found}


def gpu_memory(style):
    """GiB per GPU on 1, 2 and 4 GPUs, ours and torch's context_parallel."""
    note = "Dense causal, 16 × 128, bf16, forward + backward: inputs and peak of the fullest H200."
    figure = new_figure(style, 5.2, "Memory per GPU: lower is better", note)
    for axes, length in zip(figure.subplots(2, 1), (65536, 262144), strict=True):
        found = {**gpu_rows(2, "dense", length=length), **gpu_rows(4, "dense", length=length)}
        for contender, line, up in zip(OURS_AND_CP, ("-", "-", ":"), (0, 7, -7), strict=True):
            own = [found[gpus, contender]["derived"][BOTH] for gpus in (1, 2, 4)]
            memory, color = [x["memory_total"] / 2**30 for x in own], color_of(style, contender)
            axes.plot([1, 2, 4], memory, color=color, linestyle=line, marker="o", linewidth=2)
            words = f"{NAMES[contender]}: {memory[-1]:.1f}"
            label(axes, (4, memory[-1]), words, color, (8, up))
        axes.set(xticks=[1, 2, 4], ylim=(0, None), xlabel="GPUs", ylabel="GiB per GPU")
        draw.dress(axes, style, grid="y")
        draw.set_titles(axes, style, f"{length:,} tokens")
    return figure


def speed_per_gpu(style):
    """How much of one GPU's speed each of several has, ours and torch's context_parallel."""
    cases = {
        "dilated, across GPUs": ("crossing", {"is_causal": False}),
        "the same, causal": ("crossing", {"is_causal": True}),
        "dense causal, 262,144": ("dense", {"length": 262144}),
        "dense causal, 65,536": ("dense", {"length": 65536}),
        "LongNet: separate jobs": ("longnet", {"is_causal": False}),
    }
    note = (
        "This library's time on 1 GPU / (GPUs × time on them), in one run on H200s of one host. "
        "Filled: forward + backward, empty: forward.\nDilated; LongNet (closed in blocks of "
        "32,768): 1,048,576 tokens, 12 × 128; dense: 16 × 128; bf16; zigzag if causal.\n"
        "With flash-attn-4 inside, as here, context_parallel is as fast at 262,144 tokens."
    )
    figure = new_figure(style, 5.2, "Speed per GPU: higher is better", note)
    axes, names = figure.subplots(), []
    for name, (table, case) in cases.items():
        for gpus in (2, 4):
            found = gpu_rows(gpus, table, **case)
            for kind, way in product(OURS_AND_CP, (BOTH, FORWARD)):
                if (gpus, kind) in found:
                    share = ms(found[1, "ours"], way) / gpus / ms(found[gpus, kind], way)
                    face = color_of(style, kind) if way == BOTH else "none"
                    look = {"color": color_of(style, kind), "markerfacecolor": face}
                    axes.plot(100 * share, len(names), "o", markersize=7.5, **look)
            names.append(f"{name}: {gpus} GPUs" if gpus == 2 else "4 GPUs")
        axes.axhline(len(names) - 0.5, color=style.faint, linewidth=1)
    axes.axvline(100, color=style.ink, linewidth=1.2)
    dress_bars(axes, style, " ", names, 101.5)
    axes.set(xlim=(65, 101.5), xticks=range(65, 101, 5))
    axes.set_xlabel("% of one GPU's speed, from 65; line: linear scaling")
    draw.dress(axes, style, spines=("bottom",), grid="x")
    axes.tick_params(axis="y", labelcolor=style.ink)
    label(axes, (65, -0.5), "● this library", color_of(style, "ours"), (0, 10))
    label(axes, (76, -0.5), "● context_parallel, cuDNN inside", color_of(style, "cp"), (0, 10))
    return figure


DRAWN = (slide_step, attention_speed, gpu_memory, speed_per_gpu)
