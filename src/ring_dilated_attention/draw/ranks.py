"""What ranks send each other, how much each computes, and when."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from ..plan import AttentionPlan, costs, lower
from ..units import in_bytes, in_flop, in_seconds
from .mask import plan_in_words
from .style import LIGHT, Style, dress, new_figure, set_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_MATRIX_RANKS, _MOST_NUMBERED_RANKS, _MOST_TIMELINE_RANKS = 64, 10, 32
TFLOPS, LINK_GB_S = 600, 350
"""Of a rank: about what one H200 reaches in dense causal forward, bfloat16, and over NVLink."""
TIMELINE_KEY = (
    "Wide: computes, with its own keys (grey) or with those of the rank of that colour. Narrow: "
    f"receives them. Empty box: waits.\nA model, not a measurement: {TFLOPS} TFLOP/s and "
    f"{LINK_GB_S} GB/s per rank; nothing else takes time."
)


def draw_exchange(
    plan: AttentionPlan,
    size: costs.TensorSize | None,
    *,
    style: Style = LIGHT,
    axes: Axes | None = None,
) -> Axes:
    """Draw how much each rank (rows) sends each other one (columns) in forward.

    Args:
        plan: of all ranks; of more than 64 the first are drawn.
        size: what turns keys into bytes of K and V; None: the keys of all heads are counted.
        style: colours.
        axes: where to draw; None: in a new figure.

    Returns:
        The axes; ``axes.figure`` is the figure.
    """
    from matplotlib.colors import LinearSegmentedColormap

    ranks = range(min(plan.layout.world_size, _MOST_MATRIX_RANKS))
    receivers = [plan.rank(rank) for rank in ranks]
    rows = [[0 if j.index == i else j.received_rows(i) for j in receivers] for i in ranks]
    amounts = np.array(rows, dtype=np.float64) * (size.key_value_bytes(1) if size else 1)
    in_words = in_bytes if size else "{:,.0f}".format
    axes = axes or new_figure(style, 6.2, 6.6, plan_in_words(plan)).subplots()
    heat = LinearSegmentedColormap.from_list("heat", [style.faint, *reversed(style.branches)])
    shares = amounts / max(amounts.max(), 1)
    line = 2 if len(ranks) <= 16 else 0.3
    axes.pcolormesh(shares, cmap=heat, vmin=0, vmax=1, edgecolors=style.page, linewidth=line)
    if len(ranks) <= _MOST_NUMBERED_RANKS:
        for (sender, receiver), amount in np.ndenumerate(amounts):
            is_bright = np.dot(heat(shares[sender, receiver])[:3], (0.3, 0.59, 0.11)) > 0.5
            place, text = (receiver + 0.5, sender + 0.5), in_words(amount) if amount else "·"
            color = "#10161d" if is_bright else "#ffffff"
            axes.text(*place, text, ha="center", va="center", fontsize=8, color=color)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(np.array(ranks) + 0.5, list(map(str, ranks)))
    axes.set(aspect="equal", xlabel="to rank", ylabel="from rank", ylim=(len(ranks), 0))
    dress(axes, style, spines=())
    some = f" among the first {len(ranks)} ranks" * (len(ranks) < plan.layout.world_size)
    words = (
        f"{in_words(amounts.sum())}{some}; at most {in_words(amounts.max())} from one to another"
    )
    set_titles(axes, style, f"{'Bytes of K and V' if size else 'Keys'} sent in forward", words)
    return axes


def draw_work(
    plan: AttentionPlan, size: costs.TensorSize, *, style: Style = LIGHT, axes: Axes | None = None
) -> Axes:
    """Draw the FLOPs of each rank in forward over their mean, which is a dashed line.

    See `draw_exchange` for arguments; all ranks are drawn.
    """
    axes = axes or new_figure(style, 5, 4, plan_in_words(plan)).subplots()
    flops = costs.flops_by_rank(plan, size)
    count, total = len(flops), sum(flops)
    over_mean = np.array(flops, dtype=np.float64) * count / max(total, 1)
    axes.bar(range(count), over_mean, width=0.72, color=style.branches[1], linewidth=0)
    axes.axhline(1, color=style.ink, linewidth=1.2, linestyle="--")
    axes.set(xlabel="rank", ylabel="FLOPs of a rank / mean", xlim=(-0.6, count - 0.4))
    axes.locator_params(axis="x", integer=True)
    dress(axes, style, spines=("bottom",), grid="y")
    busiest = costs.balance(flops).imbalance
    words = f"mean: {in_flop(total / count)}; busiest rank: {busiest:.2f} × that"
    set_titles(axes, style, "Work per rank", words)
    return axes


def timeline(
    plan: AttentionPlan, size: costs.TensorSize
) -> list[tuple[int, str, int, float, float]]:
    """Model when each rank computes, receives and waits in a forward call.

    Each runs its program: it computes at `TFLOPS` and receives at `LINK_GB_S`, nothing else counts.

    Returns:
        (rank, "compute", "receive" or "wait", whose keys, start, stop), in seconds.
    """
    per_pair = 4e-12 * size.batch * size.head_dim / TFLOPS
    found = []
    for rank in range(plan.layout.world_size):
        now = free = 0.0  # when the rank, and its link, have nothing to do
        peer, started = rank, deque[tuple[int, float, float]]()
        for action in lower(plan.rank(rank), gathers=plan.gathers, backward=False):
            if action.kind == "fetch":
                begin = max(now, free)
                free = begin + action.nbytes(size)[1] / (LINK_GB_S * 1e9)
                started.append((action.receives[0] if action.receives else rank, begin, free))
            elif action.kind == "wait":
                peer, begin, arrived = started.popleft()
                found.append((rank, "receive", peer, begin, arrived))
                found.append((rank, "wait", peer, now, arrived))
                now = max(now, arrived)
            elif action.kind == "tiles":
                begin, now = now, now + per_pair * action.pairs
                found.append((rank, "compute", peer if action.step else rank, begin, now))
    return [x for x in found if x[4] > x[3]]


def draw_timeline(
    plan: AttentionPlan, size: costs.TensorSize, *, style: Style = LIGHT, axes: Axes | None = None
) -> Axes:
    """Draw when ranks compute, receive and wait in a forward call, by the model of `timeline`.

    See `draw_exchange` for arguments; what bars mean is in `TIMELINE_KEY`, a note of new figures.

    Raises:
        ValueError: there are more than 32 ranks.
    """
    count, most = plan.layout.world_size, _MOST_TIMELINE_RANKS
    if count > most:
        raise ValueError(f"a timeline has at most {most} ranks; got {count:,}: choose fewer")
    if axes is None:
        height = 0.55 * count + 2.2
        axes = new_figure(style, 9.6, height, plan_in_words(plan), TIMELINE_KEY).subplots()
    activities, waits = timeline(plan, size), [0.0] * count
    total = max((stop for *_, stop in activities), default=0.0)
    unit, factor = ("ms", 1e3) if total >= 1e-3 else ("µs", 1e6)
    for rank, kind, peer, start, stop in activities:
        waits[rank] += (stop - start) * (kind == "wait")
        lane = (rank + 0.14, 0.2) if kind == "receive" else (rank - 0.36, 0.46)
        color = style.own if peer == rank else style.rank_color(peer)
        face, edge = ("none", style.ink) if kind == "wait" else (color, style.page)
        bar = [(start * factor, (stop - start) * factor)]
        axes.broken_barh(bar, lane, facecolor=face, edgecolor=edge, linewidth=0.8)
    axes.set_yticks(range(count), [f"rank {rank}" for rank in range(count)])
    axes.set(xlim=(0, total * factor or 1), ylim=(count - 0.4, -0.5))
    axes.set_xlabel(f"{unit} from the start of the call")
    dress(axes, style, spines=("bottom",), grid="x")
    longest = max(waits)
    words = f"a rank waits {in_seconds(longest)}, {longest / (total or 1):.0%} of that"
    words = f"{in_seconds(total)}; {words if longest else 'no rank waits'}"
    set_titles(axes, style, f"Forward, {'gather' if plan.gathers else 'ring'}", words)
    return axes
