"""The figures of README and docs, light and dark: `make figures`.

    python benchmarks/figures.py [NAME ...]

Writes docs/assets/figures/NAME-light.svg and NAME-dark.svg. Plans come from the library, measured
numbers from the JSON files in benchmarks/results. The same inputs give the same files. Of measured
numbers solid lines, full colours and filled dots are forward and backward together; dashed lines,
pale bars and empty dots are forward alone.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator

from ring_dilated_attention import DilatedPattern, SequenceLayout, draw, plan_attention
from ring_dilated_attention.plan import costs, plan_cache
from ring_dilated_attention.units import in_bytes, short_count

FOLDER = Path(__file__).parent.parent / "docs" / "assets" / "figures"
SMALL = DilatedPattern([4, 8, None], [1, 2, 4])
CROSSING = DilatedPattern([8, 16, None], [1, 2, 4])
LONGNET = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
DENSE = DilatedPattern.dense()
SIZE = costs.TensorSize(batch=1, head_dim=128, element_size=2)
RESULTS = Path(__file__).parent / "results"
BOTH, FORWARD = "forward_backward", "forward"
NAMES = {
    "ours": "this library",
    "torchscale": "gather/scatter, FA2",
    "torchscale:cudnn": "gather/scatter, cuDNN",
    "sdpa:cudnn": "torch SDPA (cuDNN)",
    "flash4": "flash-attn-4",
}


def plan_of(pattern, length, layout, causal=True, heads=4):
    """A plan of 4 ranks."""
    where = SequenceLayout.named(layout, length, 4, is_causal=causal)
    return plan_attention(pattern, where, is_causal=causal, num_heads=heads)


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
    places = {"torchscale": 0, "flash4": 1, "sdpa": 3}
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


def hero(style):
    """What a dilated pattern shows a head, and what each of 4 ranks sends; legible on a phone."""
    plan = plan_of(SMALL, 32, "contiguous", causal=False)
    figure = new_figure(style, 5.9)
    masks, below = figure.subfigures(2, 1, height_ratios=[3.1, 1.5])
    (sees, holds), sends = masks.subplots(1, 2), below.subplots()
    draw.draw_mask(plan, style=style, axes=sees)
    draw.draw_mask(plan, by="rank", style=style, axes=holds)
    sees.set(xlabel="keys", ylabel="queries", xticks=[], yticks=[])
    holds.set(xlabel="keys", ylabel="", xticks=[], yticks=[])
    sent = plan_of(SMALL, 32, "contiguous", causal=False, heads=1).rank(1).received_rows(0)
    for rank, ((start, stop),) in enumerate(plan.layout.ranges):
        for key in range(start, stop):  # the branch that crosses ranks shows one key in 4
            color = style.faint if key % 4 else style.rank_color(rank)
            sends.broken_barh([(key - start, 0.9)], (rank + 0.1, 0.8), color=color, linewidth=0)
        words = f"rank {rank}: {sent} of its {stop - start} keys"
        label(sends, (-7.4, rank + 0.5), words, style.rank_color(rank), (0, 0))
    sends.set(xlim=(-7.4, 8), ylim=(4, 0))
    sends.set_axis_off()
    for axes, title, words in (
        (sees, "1  What a head sees", "nearby keys, few distant ones"),
        (holds, "2  Which GPU holds it", "mostly the one that needs it"),
        (sends, "3  What each GPU sends", "only what others need; dense attention: all"),
    ):
        draw.set_titles(axes, style, title, words, lift=0 if axes is sends else 24)
    by_branch, by_rank = (draw.mask_key(plan, by, style).values() for by in ("branch", "rank"))
    draw.add_key(figure, style, [*by_branch, *by_rank], columns=3)
    return figure


def mask_by_branch(style):
    """Which branch shows which key, for two heads."""
    plan = plan_of(CROSSING, 48, "contiguous")
    figure = new_figure(style, 3.8)
    words = ["nested: keys of several branches", "dilated keys one position later"]
    for head, axes in enumerate(figure.subplots(1, 2)):
        draw.draw_mask(plan, head, style=style, axes=axes)
        draw.set_titles(axes, style, f"Head {head}", words[head])
    draw.add_key(figure, style, draw.mask_key(plan, "branch", style).values())
    return figure


def mask_by_sender(style):
    """Zigzag on 4 ranks: who holds the keys of a head, and how many each rank sends."""
    plan = plan_of(CROSSING, 48, "zigzag", heads=1)
    figure = new_figure(style, 7.6)
    above, below = figure.subplots(2, 1, height_ratios=[1.6, 1])
    draw.draw_mask(plan, by="rank", style=style, axes=above)
    words = "zigzag: rank i of 4 holds chunks i and 7 - i of 8"
    above.yaxis.labelpad = 46  # beyond the names of the ranks
    draw.set_titles(above, style, "Which rank sends the keys of head 0", words, lift=32)
    draw.draw_exchange(plan, None, style=style, axes=below)
    dense = plan_of(DENSE, 48, "zigzag", heads=1)
    words = f"Dense attention: {sum(dense.rank(i).total_sent_rows for i in range(4))}"
    draw.set_titles(below, style, "Keys sent for head 0", f"In all {below.get_title()}. {words}")
    draw.add_key(figure, style, draw.mask_key(plan, "rank", style).values(), columns=2)
    return figure


def work_per_rank(style):
    """FLOPs per rank of dense causal attention, contiguous and zigzag."""
    note = "Dense causal attention of 65,536 tokens on 4 ranks. Dashed: the mean."
    figure = new_figure(style, 3.2, note=note)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, layout in ((left, "contiguous"), (right, "zigzag")):
        plan = plan_of(DENSE, 65536, layout, heads=16)
        draw.draw_work(plan, SIZE, style=style, axes=axes)
        draw.set_titles(axes, style, layout.capitalize(), axes.get_title().replace("; ", "\n"))
    right.set_ylabel("")
    return figure


def ring_timeline(style):
    """A ring step by step: where transfers hide behind compute, and where ranks wait."""
    note = f"Dense causal, 16 heads of 128, bf16, zigzag. {draw.TIMELINE_KEY}"
    figure = new_figure(style, 6.4, note=note)
    titles = {65536: "transfers hide behind compute", 8192: "too short: ranks wait for keys"}
    for axes, length in zip(figure.subplots(2, 1), titles, strict=True):
        plan = plan_of(DENSE, length, "zigzag", heads=16)
        draw.draw_timeline(plan, SIZE, style=style, axes=axes)
        draw.set_titles(axes, style, f"{length:,} tokens: {titles[length]}", axes.get_title())
        for rank, name in enumerate(axes.get_yticklabels()):
            name.set(color=style.rank_color(rank), weight="bold")
    return figure


def reach(pattern, length, cell):
    """Which cells of positions influence which later ones through any number of layers.

    A branch joins all cells of a segment, as no rate is longer than a cell.
    """
    starts = cell * np.arange(length // cell)
    segments = [starts // (w or length) for w in pattern.segment_lengths]
    found = np.tril(np.any([s[:, None] == s for s in segments], axis=0))
    while (more := found.astype(int) @ found > 0).sum() > found.sum():
        found = more
    return found


def closed_blocks(style):
    """What positions depend on at any depth: LongNet's pattern, and one that spans."""
    length, cell = 131072, 2048
    closed = reach(LONGNET, length, cell)
    spans = DilatedPattern([*LONGNET.segment_lengths, None], [*LONGNET.dilation_rates, 64])
    note = "Cells of 2,048 × 2,048 tokens: filled if the row depends on the column, at any depth."
    figure = new_figure(style, 3.2, note=note)
    titles = {
        "LongNet's published pattern": (closed, "blocks of 32,768 are separate"),
        "The same with (None, 64)": (reach(spans, length, cell), "the new branch connects blocks"),
    }
    for axes, (title, (found, below)) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        for query, (reached, block) in enumerate(zip(found, closed, strict=True)):
            start, stop = np.flatnonzero(block)[[0, -1]] + [0, 1]
            if reached[:start].any():  # from one side to the other: all earlier blocks
                axes.broken_barh([(0, start)], (query, 0.92), color=style.branches[2], linewidth=0)
            bar, look = [(start, stop - start)], {"color": style.branches[1], "linewidth": 0}
            axes.broken_barh(bar, (query, 0.92), **look)
        places = range(0, length // cell + 1, 16)
        words = [short_count(place * cell) for place in places]
        axes.set_xticks(places, words)
        axes.set_yticks(places, words)
        axes.set(xlim=(0, len(found)), ylim=(len(found), 0), box_aspect=1)
        axes.set(xlabel="depends on token", ylabel="output of token")
        draw.dress(axes, style)
        draw.set_titles(axes, style, title, below)
    return figure


def kv_cache(style):
    """What a KV cache keeps of a head, and how it grows with the text."""
    figure = new_figure(style, 4.6)
    above, below = figure.subplots(2, 1, height_ratios=[1, 1.7])
    draw.draw_cache(CROSSING, 44, SIZE, num_kv_heads=4, style=style, axes=above)
    lengths = [1 << power for power in range(8, 31)]
    for name, pattern, color in (
        ("all keys", DENSE, style.muted),
        ("(2048, 1) (document, 64)", DilatedPattern([2048, None], [1, 64]), style.ranks[0]),
        ("LongNet", LONGNET, style.branches[1]),
    ):
        keys = [plan_cache(pattern, 12, length).rows // 12 for length in lengths]
        below.plot(lengths, keys, color=color, linewidth=2)
        label(below, (1 << 30, keys[-1]), f"{name}: {keys[-1]:,}", color)
    for axis, scale in ((below.xaxis, below.set_xscale), (below.yaxis, below.set_yscale)):
        scale("log", base=2)
        ticks(axis, [1 << power for power in range(9, 31, 7)], short_count)
    below.set(xlabel="positions of the text", ylabel="keys of a head")
    draw.dress(below, style, grid="y")
    words = f"LongNet: at most {keys[-1]:,} keys, none from before its block of 32,768"
    draw.set_titles(below, style, "Keys of a head in memory", words)
    return figure


def received_by_layer(style):
    """What a layer of a window, of a dilated and of a dense pattern receives on several ranks."""
    length = 131072
    layers = {
        "window of 1,024": DilatedPattern.window(1023),
        "dilated, spans the text": DilatedPattern.geometric(length),
        "dense": DENSE,
    }
    note = (
        "By the plan of one sequence of 131,072 tokens, causal, 8 KV heads of 128, bf16, zigzag, a "
        "ring or gather: the rank that receives most.\nDilated: DilatedPattern.geometric(131072), "
        "7 branches. All axes start at 0."
    )
    title = "Keys and values that a rank receives in forward, per layer"
    figure = new_figure(style, 2.8, title, note)
    for axes, ranks in zip(figure.subplots(1, 3, sharey=True), (2, 4, 8), strict=True):
        layout = SequenceLayout.zigzag(length, ranks)
        for place, pattern in enumerate(layers.values()):
            plan = plan_attention(pattern, layout, is_causal=True, num_heads=32, num_kv_heads=8)
            traffic = [costs.traffic(plan.rank(rank), SIZE) for rank in range(ranks)]
            received = max(each.forward_received for each in traffic)
            axes.barh(place, received, 0.62, color=style.branches[place])
            label(axes, (received, place), in_bytes(received), style.ink)
        dress_bars(axes, style, f"{ranks} ranks", list(layers), 640e6)
    return figure


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


DRAWN = (
    hero,
    mask_by_branch,
    mask_by_sender,
    work_per_rank,
    ring_timeline,
    closed_blocks,
    kv_cache,
    received_by_layer,
    slide_step,
    attention_speed,
)
FIGURES = {function.__name__.replace("_", "-"): function for function in DRAWN}


def main() -> None:
    """Write all figures, or those that are named."""
    for name in sys.argv[1:] or FIGURES:
        for style in draw.STYLES.values():
            path = FOLDER / f"{name}-{style.name}.svg"
            draw.save(FIGURES[name](style), path, transparent=True)
            print(f"{path}  {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
