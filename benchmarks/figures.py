"""The figures of README and docs, light and dark: `make figures`.

    python benchmarks/figures.py [NAME ...]

Writes docs/assets/figures/NAME-light.svg and NAME-dark.svg. Plans come from the library, measured
numbers from the JSON files in benchmarks/results. The same inputs give the same files.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import measured_figures
import predicted_figures

from ring_dilated_attention import AttentionPlan, DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.draw import (
    STYLES,
    CostModel,
    Grid,
    HeadCache,
    Sheet,
    Style,
    branch_key,
    draw_branches,
    draw_growth,
    draw_kept,
    draw_matrix,
    draw_senders,
    draw_timeline,
    draw_work,
    growth,
    headline,
    kept_key,
    rows_sent,
    save,
    shown_to,
    timeline,
    timeline_key,
)
from ring_dilated_attention.plan import costs

FOLDER = Path(__file__).parent.parent / "docs" / "assets" / "figures"
RANKS = 4
LAYOUTS = {"contiguous": SequenceLayout.contiguous, "zigzag": SequenceLayout.zigzag}
SMALL = DilatedPattern([4, 8, None], [1, 2, 4])
"""A pattern to look at: on 4 ranks of 8 positions, one branch crosses ranks."""
CROSSING = DilatedPattern([8, 16, None], [1, 2, 4])
"""One whose segments do not fit the ranks' shards of 48 positions."""
LONGNET = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])


def plan_of(
    pattern: DilatedPattern,
    length: int,
    *,
    layout: str = "contiguous",
    causal: bool,
    heads: int = 4,
) -> AttentionPlan:
    """A plan of `RANKS` ranks."""
    return plan_attention(
        pattern, LAYOUTS[layout](length, RANKS), is_causal=causal, num_heads=heads
    )


def hero(style: Style) -> Sheet:
    """What a dilated pattern shows a head, and what each of 4 ranks sends."""
    plan = plan_of(SMALL, 32, causal=False)
    grid, side = Grid.of(32, 32), 2.75
    shown = shown_to(plan, 0, grid)
    sheet, top, below = Sheet(style, 9.9, 4.75), 1.08, 4.15
    heads = [
        ("1  What one head sees", "near keys densely, far keys sparsely"),
        ("2  Which GPU holds those keys", "mostly the one that needs them"),
        ("3  What each GPU sends", "the few rows that others need, once"),
    ]
    for left, (title, line) in zip((0.4, 3.85, 7.1), heads, strict=True):
        sheet.text(left, 0.27, title, fontsize=11.5, fontweight="bold")
        sheet.text(left, 0.5, line, color=style.muted)
    axes = sheet.axes(0.4, top, side, side)
    draw_branches(axes, style, shown, grid, nested=False)
    name_axes(axes, "keys", "queries")
    words = ["segments of 4: every key", "segments of 8: every 2nd", "whole sequence: every 4th"]
    sheet.key(0.4, below, style.branch_colors(3), words)
    axes = sheet.axes(3.85, top, side, side)
    draw_senders(axes, style, shown, grid, plan.layout)
    name_axes(axes, "keys", "")
    sheet.key(3.85, below, [style.own], ["held where it is needed"])
    for rank in range(RANKS):
        sheet.key(3.85 + 0.15 * rank, below + 0.2, [style.rank_color(rank)], [""])
    sheet.text(
        3.85 + 0.15 * RANKS + 0.07, below + 0.2, "sent by the rank of that colour", fontsize=8.5
    )
    draw_shards(sheet, 7.1, top, side, plan)
    most = int(rows_sent(plan_of(DilatedPattern.dense(), 32, causal=False, heads=1)).max())
    sheet.text(7.1, below, f"Dense ring attention: all {most} of {most}.", fontsize=8.5)
    sheet.text(7.1, below + 0.2, "The result is exact, forward and backward.", fontsize=8.5)
    return sheet


def draw_shards(sheet: Sheet, left: float, top: float, height: float, plan: AttentionPlan) -> None:
    """Of each rank the keys that it holds; those that it sends in its colour."""
    from matplotlib.patches import Rectangle

    style, sent = sheet.style, rows_sent(plan.narrowed(range(1)))
    axes = sheet.axes(left, top, 2.55, height)
    shown = shown_to(plan, 0, Grid.of(plan.layout.length, plan.layout.length))
    for rank, ((start, stop),) in enumerate(plan.layout.ranges):
        others = [q for q in range(plan.layout.length) if not start <= q < stop]
        travels = (shown.sender[others, start:stop] == rank).any(0)
        for column, moves in enumerate(travels):
            color = style.rank_color(rank) if moves else style.faint
            axes.add_patch(Rectangle((column + 0.06, rank + 0.32), 0.88, 0.4, color=color))
        axes.text(
            0, rank + 0.17, f"rank {rank}", color=style.rank_color(rank), fontsize=9,
            fontweight="bold", va="center",
        )  # fmt: skip
        axes.text(
            8, rank + 0.17, f"{int(sent[rank].max())} of its {stop - start} keys",
            color=style.ink, fontsize=8.5, va="center", ha="right",
        )  # fmt: skip
    axes.set_xlim(0, 8)
    axes.set_ylim(4, 0)
    axes.set_axis_off()


def name_axes(axes, below: str, left: str) -> None:
    """Names instead of positions."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel(below, labelpad=3)
    axes.set_ylabel(left, labelpad=3)


def branches(style: Style) -> Sheet:
    """Which branch shows which key, for two heads."""
    plan = plan_of(CROSSING, 48, causal=True)
    grid, side = Grid.of(48, 48), 3.6
    sheet = Sheet(style, 9.4, 5.75)
    for number, head in enumerate((0, 1)):
        left = 0.75 + (side + 0.85) * number
        axes = sheet.axes(left, 0.85, side, side)
        shown = shown_to(plan, head, grid)
        draw_branches(axes, style, shown, grid)
        axes.set_ylabel("" if number else "query position")
        share = shown.branches.any(0).sum() / (48 * 49 / 2)
        headline(
            axes, style, "Head 1: sparse keys shifted by one" if head else "Head 0",
            f"{share:.0%} of the keys that dense causal attention sees",
        )  # fmt: skip
    branch_key(sheet, 0.75, 5.05, CROSSING)
    sheet.text(
        0.75 + side + 0.85, 5.05, "Nested squares: several branches show the key.", fontsize=8.5
    )
    words = "It counts once for each of them, in one softmax."
    sheet.text(0.75 + side + 0.85, 5.25, words, fontsize=8.5)
    return sheet


def senders(style: Style) -> Sheet:
    """Zigzag on 4 ranks: who holds the keys of a head, and how many each rank sends."""
    plan = plan_of(CROSSING, 48, layout="zigzag", causal=True)
    grid, side = Grid.of(48, 48), 4.0
    sheet = Sheet(style, 9.6, 6.0)
    axes = sheet.axes(0.85, 1.15, side, side)
    draw_senders(axes, style, shown_to(plan, 0, grid), grid, plan.layout)
    headline(
        axes, style, "Who holds the keys of head 0",
        "grey: the rank that needs them; colour: the rank that sends them", lift=24,
    )  # fmt: skip
    axes = sheet.axes(5.75, 1.6, 3.3, 3.3)
    sent = rows_sent(plan.narrowed(range(1)))
    draw_matrix(axes, style, sent, range(RANKS), list(map(str, sent.ravel())))
    dense = rows_sent(plan_of(DilatedPattern.dense(), 48, layout="zigzag", causal=True, heads=1))
    headline(
        axes, style, "Rows of K and V sent for head 0",
        f"{sent.sum()} in all; dense attention: {dense.sum()}",
    )  # fmt: skip
    sheet.note(
        "Zigzag: rank i of p holds chunks i and 2p - 1 - i, so that causal work is even. "
        "1 cell = 1 position."
    )
    return sheet


def work(style: Style) -> Sheet:
    """FLOPs per rank of dense causal attention, contiguous and zigzag."""
    sheet, length = Sheet(style, 9.0, 4.1), 65536
    size = costs.TensorSize(batch=1, head_dim=128, element_size=2)
    for number, layout in enumerate(LAYOUTS):
        plan = plan_of(DilatedPattern.dense(), length, layout=layout, causal=True, heads=16)
        flops = costs.flops_by_rank(plan, size)
        found = costs.balance(flops)
        axes = sheet.axes(0.75 + 4.25 * number, 0.95, 3.75, 2.35)
        draw_work(axes, style, flops)
        axes.set_ylim(0, 1.9)
        axes.set_ylabel("" if number else "FLOPs of a rank / mean")
        headline(
            axes, style, layout.capitalize(),
            f"largest: {found.imbalance:.2f} × the mean, so at most "
            f"{found.speed_up_bound:.2f} × as fast as 1 rank",
        )  # fmt: skip
    sheet.note(f"Dense causal attention of {length:,} tokens on {RANKS} ranks. Dashed: the mean.")
    return sheet


def ring(style: Style) -> Sheet:
    """A ring step by step: where transfers hide behind compute, and where ranks wait."""
    size, model = costs.TensorSize(batch=1, head_dim=128, element_size=2), CostModel()
    sheet = Sheet(style, 9.6, 7.4)
    for number, (length, title) in enumerate(
        ((65536, "transfers hide behind compute"), (8192, "too short: ranks wait for rows"))
    ):
        plan = plan_of(DilatedPattern.dense(), length, layout="zigzag", causal=True, heads=16)
        found = timeline(plan, size, model)
        axes = sheet.axes(0.8, 0.75 + 3.15 * number, 8.6, 2.1)
        draw_timeline(axes, style, found)
        headline(axes, style, f"{length:,} tokens: {title}", found.in_words())
    timeline_key(sheet, 0.8, 6.8)
    sheet.note(f"Dense causal, 16 heads of 128, bf16, zigzag. {model.in_words()}.")
    return sheet


def cache(style: Style) -> Sheet:
    """What a KV cache keeps of a head, and how it grows with the text."""
    length = 44
    of = HeadCache(plan_of(CROSSING, length, causal=True), head=0)
    sheet = Sheet(style, 9.4, 5.55)
    axes = sheet.axes(1.3, 0.95, 7.8, 0.36 * len(CROSSING.branches))
    grid = of.grid(64)
    draw_kept(axes, style, of, grid)
    kept = " + ".join(map(str, of.cells(grid).kept.sum(1)))
    headline(axes, style, f"After {length} positions", f"{kept} rows are kept of {length}", lift=12)
    kept_key(sheet, 1.3, 2.6)
    lengths = [1 << power for power in range(8, 31)]
    named = {
        "LongNet": (LONGNET, 12),
        "(2048, 1) (document, 64)": (DilatedPattern([2048, None], [1, 64]), 12),
    }
    caches = {name: growth(*known, 0, lengths) for name, known in named.items()}
    axes = sheet.axes(1.3, 3.4, 6.0, 1.6)
    draw_growth(axes, style, caches)
    most = caches["LongNet"].rows[-1]
    headline(
        axes, style, "Rows of a head in memory",
        f"LongNet: {most:,} rows, after 32,768 positions or a billion",
    )  # fmt: skip
    return sheet


FIGURES: dict[str, Callable[[Style], Sheet]] = {
    "hero": hero,
    "mask-by-branch": branches,
    "mask-by-sender": senders,
    "work-per-rank": work,
    "ring-timeline": ring,
    "kv-cache": cache,
    "slide-step": measured_figures.slide_step,
    "attention-speed": measured_figures.attention_speed,
    "gpu-memory": measured_figures.gpu_memory,
    "speed-per-gpu": measured_figures.speed_per_gpu,
    "many-hosts": predicted_figures.many_hosts,
}


def main() -> None:
    """Write all figures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default: %(default)s)")
    options = parser.parse_args()
    unknown = set(options.names) - set(FIGURES)
    if unknown:
        parser.error(
            f"no figure called {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or FIGURES:
        for style in STYLES.values():
            path = options.out / f"{name}-{style.name}.svg"
            save(FIGURES[name](style).figure, path, transparent=True)
            print(f"{path}  {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
