"""The four pictures of `rda draw`, as figures of matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..pattern import DilatedPattern
from ..plan import AttentionPlan, costs
from ..terminal import count_of, in_bytes, in_flop
from .mask import Grid, Shown, rows_sent, shown_to
from .panels import draw_branches, draw_matrix, draw_senders, draw_timeline, draw_work, nests
from .schedule import CostModel, timeline
from .style import LIGHT, Sheet, Style, headline
from .words import branch_in_words, kv_head_of, plan_in_words, sent_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 240
"""A side of a picture of a mask."""
MOST_HEADS = 6
"""Whose masks are drawn at once."""
MOST_SENDERS = 8
"""Ranks that a mask tells apart by colour; of more, only the matrix is drawn."""
MOST_MATRIX_RANKS = 64
"""A side of a matrix of ranks; of more, the first of them are drawn."""
MOST_TIMELINE_RANKS = 32
"""Whose lanes a timeline has room for."""
_MOST_IN_KEY = 10
"""Branches that are listed."""
MOST_DOCUMENTS = 4096
"""Each has its own tiles in the mask: these take some seconds."""


def check_heads(plan: AttentionPlan, heads: Sequence[int]) -> None:
    """Raise a `ValueError` unless there are these heads, each once, and at most `MOST_HEADS`."""
    for head in heads:
        kv_head_of(plan, head)
    if not heads or len(heads) > MOST_HEADS or len(set(heads)) < len(heads):
        raise ValueError(
            f"heads to draw must be 1 to {MOST_HEADS} different ones; got {list(heads)[:20]}"
        )


def check_documents(plan: AttentionPlan) -> None:
    """Raise a `ValueError` if a mask has more than `MOST_DOCUMENTS` documents."""
    count = len(plan.documents) - 1
    if count > MOST_DOCUMENTS:
        raise ValueError(
            f"the mask of at most {MOST_DOCUMENTS:,} documents can be drawn; got {count:,}"
        )


def pattern_figure(
    plan: AttentionPlan,
    heads: Sequence[int] = (0,),
    *,
    window: range | None = None,
    style: Style = LIGHT,
) -> Figure:
    """Draw which branch shows which key to which query, a panel for each head.

    Args:
        plan: of one rank or several; how it is sharded makes no difference to this picture.
        heads: query heads.
        window: positions to draw; None: all.
        style: colours.

    Raises:
        ValueError: there is no such head, too many of them, or the window is not in the sequence.
    """
    check_heads(plan, heads)
    check_documents(plan)
    grid = Grid.of(plan.layout.length, MOST_CELLS, window)
    side, lines = 4.2, min(len(plan.pattern.branches), _MOST_IN_KEY)
    sheet = Sheet(style, 0.9 + (side + 0.9) * len(heads), side + 2.3 + 0.2 * lines)
    sheet.title(plan_in_words(plan))
    for number, head in enumerate(heads):
        axes = sheet.axes(0.9 + (side + 0.9) * number, 1.0, side, side)
        shown = shown_to(plan, kv_head_of(plan, head), grid)
        draw_branches(axes, style, shown, grid)
        headline(axes, style, head_name(plan, head), share_in_words(plan, shown, grid))
    branch_key(sheet, 0.9, side + 1.7, plan.pattern)
    sheet.note(f"{grid.in_words()}.", 1)
    if len(plan.pattern.branches) > 1:
        sheet.note(
            "Nested squares: several branches show the key."
            if nests(grid)
            else "A cell that several branches show has the colour of the first of them."
        )
    return sheet.figure


def head_name(plan: AttentionPlan, head: int) -> str:
    """A query head, with its KV head where that is another."""
    kv_head = kv_head_of(plan, head)
    return f"Head {head}" + ("" if kv_head == head else f" (KV head {kv_head})")


def share_in_words(plan: AttentionPlan, shown: Shown, grid: Grid) -> str:
    """How many of the pairs that dense attention would compute the head sees, if that is known."""
    if grid.size > 1 or grid.count < plan.layout.length:
        return ""
    seen = int(shown.branches.any(0).sum())
    lengths = np.diff(np.array(plan.documents))
    dense = int((lengths * (lengths + 1) // 2 if plan.is_causal else lengths**2).sum())
    return f"sees {seen / max(dense, 1):.0%} of the pairs of dense attention"


def branch_key(sheet: Sheet, left: float, top: float, pattern: DilatedPattern) -> None:
    """What the colours of branches mean."""
    branches = pattern.branches
    colors, words = sheet.style.branch_colors(len(branches)), list(map(branch_in_words, branches))
    if len(words) > _MOST_IN_KEY:
        words = [*words[: _MOST_IN_KEY - 1], f"to {words[-1]}"]
        colors = [*colors[: _MOST_IN_KEY - 1], colors[-1]]
    sheet.key(left, top, colors, words)


def exchange_figure(
    plan: AttentionPlan,
    size: costs.TensorSize,
    head: int = 0,
    *,
    layout_name: str = "any layout",
    window: range | None = None,
    style: Style = LIGHT,
) -> Figure:
    """Draw which rank sends which keys to whom, and how many bytes in all.

    Args:
        plan: of all ranks. Of more than `MOST_SENDERS` only the matrix is drawn, of more than
            `MOST_MATRIX_RANKS` the first of them; the picture says so.
        size: what turns rows into bytes.
        head: the query head whose keys are drawn; bytes are those of all heads.
        layout_name: what to call the layout.
        window: positions to draw; None: all.
        style: colours.

    Raises:
        ValueError: there is no such head, or the window is not in the sequence.
    """
    world_size = plan.layout.world_size
    kv_head = kv_head_of(plan, head)
    check_documents(plan)
    grid = Grid.of(plan.layout.length, MOST_CELLS, window)
    masked = world_size <= MOST_SENDERS
    sheet = Sheet(style, 10.2 if masked else 6.2, 6.8)
    notes = [f"The mask is drawn for at most {MOST_SENDERS} ranks"]
    if masked:
        axes = sheet.axes(0.9, 1.55, 4.4, 4.4)
        draw_senders(axes, style, shown_to(plan, kv_head, grid), grid, plan.layout)
        headline(
            axes, style, f"{head_name(plan, head)}: who holds the keys",
            "grey: the rank that needs them; colour: the rank that sends them", lift=26,
        )  # fmt: skip
        notes = [grid.in_words()]
    ranks = range(min(world_size, MOST_MATRIX_RANKS))
    if len(ranks) < world_size:
        notes.append(f"the first {len(ranks)} of {world_size:,} ranks")
    right = sheet.axes(6.1, 2.35, 3.6, 3.6) if masked else sheet.axes(0.9, 1.35, 4.6, 4.6)
    sent = rows_sent(plan, ranks)
    nbytes = [size.key_value_bytes(int(rows)) for rows in sent.ravel()]
    draw_matrix(right, style, sent, ranks, [in_bytes(x) if x else "·" for x in nbytes])
    headline(
        right, style, "Bytes of K and V sent in forward, all heads",
        sent_in_words(plan, size, ranks),
    )  # fmt: skip
    sheet.title(str(plan.pattern), plan_in_words(plan, layout_name))
    sheet.note("; ".join(notes) + ".")
    return sheet.figure


def work_figure(
    plans: Mapping[str, AttentionPlan], size: costs.TensorSize, *, style: Style = LIGHT
) -> Figure:
    """Draw the FLOPs of each rank over their mean, a panel for each layout.

    Args:
        plans: by the names of their layouts; of the same pattern, length and number of ranks.
        size: what turns pairs into operations.
        style: colours.
    """
    sheet = Sheet(style, 0.9 + 4.1 * len(plans), 4.6)
    panels, total = [], 0
    for number, (name, plan) in enumerate(plans.items()):
        axes = sheet.axes(0.8 + 4.1 * number, 1.45, 3.6, 2.35)
        flops = costs.flops_by_rank(plan, size)
        found, total = costs.balance(flops), sum(flops)
        draw_work(axes, style, flops)
        headline(
            axes, style, name,
            f"the largest is {found.imbalance:.2f} × the mean:\n{plan.layout.world_size:,} ranks "
            f"are at most {found.speed_up_bound:.2f} × as fast as one",
        )  # fmt: skip
        panels.append(axes)
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, top)
    panels[0].set_ylabel("FLOPs of a rank / mean")
    plan = next(iter(plans.values()))
    sheet.title(
        str(plan.pattern), f"{plan_in_words(plan)}, {count_of(plan.layout.world_size, 'rank')}"
    )
    mean = in_flop(total / plan.layout.world_size)
    sheet.note(f"Dashed: the mean, {mean} per rank in forward.")
    return sheet.figure


def timeline_figure(
    plan: AttentionPlan,
    size: costs.TensorSize,
    model: CostModel | None = None,
    *,
    layout_name: str = "any layout",
    gathers: bool | None = None,
    style: Style = LIGHT,
) -> Figure:
    """Draw when ranks compute, receive and wait in a forward call, by a cost model.

    Args:
        plan: of at most `MOST_TIMELINE_RANKS` ranks.
        size: what turns rows into bytes and pairs into operations.
        model: how long they take; None: `CostModel()`.
        layout_name: what to call the layout.
        gathers: whether all transfers start at once; None: what the plan decides.
        style: colours.

    Raises:
        ValueError: there are too many ranks or steps.
    """
    check_timeline_ranks(plan)
    model = CostModel() if model is None else model
    found = timeline(plan, size, model, gathers=gathers)
    lanes = 0.58 * plan.layout.world_size
    sheet = Sheet(style, 9.6, lanes + 2.75)
    sheet.title(str(plan.pattern), plan_in_words(plan, layout_name))
    axes = sheet.axes(0.85, 1.25, 8.5, lanes)
    draw_timeline(axes, style, found)
    ways = "gather" if (plan.gathers if gathers is None else gathers) else "ring"
    headline(axes, style, f"Forward, {ways}", found.in_words())
    timeline_key(sheet, 0.85, lanes + 1.95)
    repeats = f" Colours repeat after {len(style.ranks)} ranks."
    sheet.note(f"{model.in_words()}." + repeats * (plan.layout.world_size > len(style.ranks)))
    return sheet.figure


def timeline_key(sheet: Sheet, left: float, top: float) -> None:
    """What the colours of a timeline mean."""
    style = sheet.style
    sheet.key(left, top, [style.own], ["compute with own keys"])
    sheet.key(
        left + 2.0, top, [style.rank_color(1)],
        ["colour of a rank: its keys; wide: compute, narrow: receive"],
    )  # fmt: skip
    sheet.key(left + 6.2, top, [style.ink], ["waits for rows"], filled=False)


def check_timeline_ranks(plan: AttentionPlan) -> None:
    """Raise a `ValueError` if there are more than `MOST_TIMELINE_RANKS` ranks."""
    if plan.layout.world_size > MOST_TIMELINE_RANKS:
        raise ValueError(
            f"a timeline shows at most {MOST_TIMELINE_RANKS} ranks; got "
            f"{plan.layout.world_size:,}: choose fewer"
        )
