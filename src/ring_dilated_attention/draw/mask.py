"""Which keys a head's queries see, by branch or by rank, and which a KV cache keeps of a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..layout import SequenceLayout
from ..pattern import Branch, DilatedPattern, Length, Window
from ..plan import AttentionPlan, costs, plan_cache
from ..units import count_of, in_bytes, short_count
from .style import LIGHT, Style, add_key, dress, new_figure, set_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
By: TypeAlias = Literal["branch", "rank"]

NOTHING, OWN = -1, -2
"""In place of a branch or rank: the query sees no key there; its own rank has the key."""
_MOST_CELLS, _MOST_SQUARES, _MOST_IN_KEY = 128, 64, 10
"""Cells a side of a figure, and of one with squares set apart; lines of a key."""
_MOST_KEYS = 128  # of a cache that are squares, each
_GAP = 0.06  # between a cell's edge and its square, in cells


def cell_size(length: int, most: int) -> int:
    """Positions of a cell a side: the least power of two with at most `most` cells."""
    return 1 << (-(-length // most) - 1).bit_length()


def visible_cells(plan: AttentionPlan, head: int, size: int) -> Bools:
    """Find the cells, of `size` positions a side, in which a query head sees keys.

    Returns:
        bool (branches, cells, cells): whether a branch shows any query of the row any key of the
        column.

    Raises:
        ValueError: there is no such head.
    """
    if not 0 <= head < plan.num_heads:
        raise ValueError(f"head must lie in [0, {plan.num_heads}), the query heads; got {head}")
    kv_head = head // (plan.num_heads // plan.num_kv_heads)
    length, branches = plan.layout.length, plan.pattern.branches
    count = -(-length // size)
    found = []
    for index, branch in enumerate(branches):
        offsets = dict(plan.pattern.heads(index, plan.num_kv_heads))
        if isinstance(branch.segment_length, Window):
            found.append(_window_cells(plan, index, size) & (kv_head in offsets))
            continue
        offset = offsets.get(kv_head, length)  # beyond every segment: the branch shows no keys
        first, last = _end_segments(plan, branch, offset, size)
        has_keys = first <= last
        # Two cells share at most one segment: the last of the earlier, the first of the later one.
        seen = np.tril(first[:, None] == last[None, :], -1)
        seen |= np.eye(count, dtype=np.bool_) | (seen.T & (not plan.is_causal))
        found.append(seen & has_keys[:, None] & has_keys[None, :])
    return np.stack(found)


def _window_cells(plan: AttentionPlan, branch: int, size: int) -> npt.NDArray[np.bool_]:
    """(cells, cells): whether any query of a row sees, in a window, any key of a column."""
    window, rate = plan.tiling.window(branch), plan.pattern.dilation_rates[branch]
    assert window is not None
    borders, length = np.array(plan.documents, dtype=np.int64), plan.layout.length
    first = np.arange(0, length, size)
    last = np.minimum(first + size, length) - 1
    of_first, of_last = (np.searchsorted(borders, x, side="right") - 1 for x in (first, last))
    # Of an earlier cell (row) and a later one: positions of the one document that both may hold.
    low = np.maximum(first, borders[of_last])[:, None]
    high = np.minimum(last, borders[of_first + 1] - 1)
    nearest = first - last[:, None]
    nearest = nearest + -nearest % rate
    shared = (of_last[:, None] == of_first) & (nearest <= high - low)
    before, behind = (np.triu(shared & (nearest <= side), 1) for side in window)
    seen: npt.NDArray[np.bool_] = before.T | behind | np.eye(len(first), dtype=np.bool_)
    return seen


def _end_segments(plan: AttentionPlan, branch: Branch, offset: int, size: int) -> tuple[Ints, Ints]:
    """Starts of the segments of the first and of the last key in each cell; without keys 1 and 0.

    Keys of the head are numbered through all documents; all segments of a document but its last
    have equally many.
    """
    borders, length = np.array(plan.documents, dtype=np.int64), plan.layout.length
    assert not isinstance(branch.segment_length, Window)
    w, rate = min(branch.segment_length or length, length), branch.dilation_rate
    per_segment = len(range(offset, w, rate))

    def keys_before(place: Ints) -> Ints:
        """In a document, by the place in it."""
        before: Ints = place // w * per_segment - np.minimum(offset - place % w, 0) // rate
        return before

    numbers = np.concatenate([[0], keys_before(np.diff(borders)).cumsum()])

    def number(position: Ints) -> Ints:
        document = np.searchsorted(borders, position, side="right") - 1
        return numbers[document] + keys_before(position - borders[document])

    def segment_of(key: Ints) -> Ints:
        document = np.searchsorted(numbers, key, side="right") - 1
        start: Ints = borders[document] + (key - numbers[document]) // max(per_segment, 1) * w
        return start

    cells = np.arange(0, length, size)
    first, stop = number(cells), number(np.minimum(cells + size, length))
    has_keys = first < stop
    return np.where(has_keys, segment_of(first), 1), np.where(has_keys, segment_of(stop - 1), 0)


def mask_cells(plan: AttentionPlan, head: int, by: By, size: int) -> Ints:
    """Find what each cell shows, of `size` positions a side.

    Returns:
        int64 (cells, cells): `NOTHING`, or the first branch that shows the keys; by rank `OWN`, or
        the rank that sends them, judged by the first positions of cells.
    """
    shown = visible_cells(plan, head, size)
    kinds = shown.argmax(0)
    if by == "rank":
        pieces = plan.layout.pieces
        firsts = np.arange(0, plan.layout.length, size)
        place = np.searchsorted([piece.start for piece in pieces], firsts, side="right") - 1
        held = np.array([piece.rank for piece in pieces], dtype=np.int64)[place]
        kinds = np.where(held[:, None] == held[None, :], OWN, held[None, :])
    cells: Ints = np.where(shown.any(0), kinds, NOTHING)
    return cells


def mask_key(plan: AttentionPlan, by: By, style: Style = LIGHT) -> dict[int, tuple[str, str]]:
    """What the values of `mask_cells` mean, and their colours."""
    if by == "rank":
        ranks = range(plan.layout.world_size)
        sent = {rank: (f"sent by rank {rank}", style.rank_color(rank)) for rank in ranks}
        return {OWN: ("on the rank of the query", style.own), **sent}
    words = [
        f"{_reach_in_words(w)}: {f'1 key in {rate:,}' if rate > 1 else 'every key'}"
        for w, rate in plan.pattern.branches
    ]
    return dict(enumerate(zip(words, style.branch_colors(len(words)), strict=True)))


def _reach_in_words(length: Length) -> str:
    if isinstance(length, Window):
        return str(length)
    return f"segments of {length:,}" if length else "whole document"


def plan_in_words(plan: AttentionPlan) -> str:
    """Pattern, length, ranks, mask and documents of a plan, in two lines."""
    words = [count_of(plan.layout.length, "position"), count_of(plan.layout.world_size, "rank")]
    words.append("causal" if plan.is_causal else "not causal")
    documents = len(plan.documents) - 1
    return f"{plan.pattern}\n{', '.join(words)}" + f", {documents:,} documents" * (documents > 1)


def draw_mask(
    plan: AttentionPlan,
    head: int = 0,
    *,
    by: By = "branch",
    style: Style = LIGHT,
    axes: Axes | None = None,
) -> Axes:
    """Draw which keys (columns) each query (rows) of a head sees.

    Args:
        plan: of any number of ranks.
        head: a query head.
        by: ``"branch"``: keys have the colour of the branch that shows them, and up to 64 cells a
            side those of all branches that do, nested. ``"rank"``: that of the rank that sends
            them, or `Style.own` where the query's rank has them.
        style: colours.
        axes: where to draw; None: in a new figure.

    Returns:
        The axes; ``axes.figure`` is the figure.

    Raises:
        ValueError: there is no such head.
    """
    size, key = cell_size(plan.layout.length, _MOST_CELLS), mask_key(plan, by, style)
    if axes is None:
        listed = list(key.values())[:_MOST_IN_KEY]
        figure = new_figure(style, 5.4, 6.8 + 0.2 * len(listed), plan_in_words(plan))
        add_key(figure, style, listed)
        axes = figure.subplots()
    cells = mask_cells(plan, head, by, size)
    end = size * len(cells)
    axes.fill_between([0, end], 0, end, color=style.faint, linewidth=0)
    for kind in np.unique(cells[cells != NOTHING]):
        _fill(axes, size, cells == kind, key[kind][1])
    if by == "branch" and len(cells) <= _MOST_SQUARES:
        shown = visible_cells(plan, head, size)
        before = shown.cumsum(0) - shown
        step = (0.5 - _GAP) / (shown.sum(0).max() + 0.5)
        for index, (seen, number) in enumerate(zip(shown, before, strict=True)):
            for count in range(1, number.max() + 1):
                _fill(axes, size, seen & (number == count), key[index][1], count * step)
    axes.set(xlim=(0, end), ylim=(end, 0), xlabel="key position", ylabel="query position")
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        mark_positions(axis, end)
    dress(axes, style, spines=())
    side = short_count(size)
    many = f"1 cell = {side} × {side} positions, set if any pair is visible"
    words = many if size > 1 else "1 cell = 1 position"
    set_titles(axes, style, f"Head {head}", words, lift=32 * (by == "rank"))
    if by == "rank":
        _mark_ranks(axes, plan.layout, end, style)
    return axes


def _fill(axes: Axes, size: int, cells: Bools, color: str, inset: float = 0.0) -> None:
    """Colour cells, but for `inset` cells at their edges; in large grids whole runs of a row."""
    from matplotlib.collections import PolyCollection

    apart = len(cells) <= _MOST_SQUARES
    q, left = np.nonzero(cells)
    right = left + 1
    if not apart:
        changes = np.diff(np.pad(cells.astype(np.int8), ((0, 0), (1, 1))))
        (q, left), (_, right) = np.nonzero(changes == 1), np.nonzero(changes == -1)
    gap = _GAP + inset if apart else 0.0
    low, high, top, bottom = left + gap, right - gap, q + gap, q + 1 - gap
    corners = np.stack([low, top, high, top, high, bottom, low, bottom], -1).reshape(-1, 4, 2)
    edge = 0.0 if apart else 0.2  # closes hairlines between runs
    squares = PolyCollection(list(size * corners), facecolor=color, edgecolor=color, linewidth=edge)
    axes.add_collection(squares)


def mark_positions(axis: Axis, end: int) -> None:
    """Put a few ticks on an axis of positions, at multiples of a power of two."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    axis.set_major_locator(MultipleLocator(cell_size(end, 6)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: short_count(round(x))))


def _mark_ranks(axes: Axes, layout: SequenceLayout, end: int, style: Style) -> None:
    """A strip of ranks along both axes, and lines between ranks."""
    text: dict[str, Any] = {"color": style.ink, "fontsize": 8, "ha": "center", "va": "center"}
    width = end * 0.04
    for low, stop, rank, _ in layout.pieces:
        span, strip, color = (low, stop - low), (-1.3 * width, width), style.rank_color(rank)
        axes.broken_barh([span], strip, color=color, linewidth=0, clip_on=False)
        axes.broken_barh([strip], span, color=color, linewidth=0, clip_on=False)
        if stop - low > width:
            label = f"rank {rank}" if stop - low > 4 * width else f"{rank}"
            axes.text((low + stop) / 2, -2.1 * width, label, **text)
            axes.text(-2.1 * width, (low + stop) / 2, label, rotation=90, **text)
        for line in (axes.axhline, axes.axvline):
            line(low, color=style.ink, linewidth=0.7 * (low > 0))
    axes.tick_params(labelleft=False)
    axes.yaxis.labelpad = 34


def kept_keys(pattern: DilatedPattern, num_kv_heads: int, kv_head: int, length: int) -> list[range]:
    """Find the keys that a position from `length` on can still see, for each branch."""
    kept = []
    for index, (w, rate) in enumerate(pattern.branches):
        offset = dict(pattern.heads(index, num_kv_heads)).get(kv_head)
        if isinstance(w, Window):
            kept.append(range(length if offset is None else max(length - w.left, 0), length))
            continue
        start, stop = (0, length + rate) if w is None else (length // w * w, length // w * w + w)
        segment = range(0) if offset is None else range(start + offset, stop, rate)
        goes_on = len(segment) > 0 and (w is None or segment[-1] >= length)
        kept.append(range(segment.start, length, rate) if goes_on else range(0))
    return kept


def draw_cache(
    pattern: DilatedPattern,
    length: int,
    size: costs.TensorSize,
    *,
    num_kv_heads: int,
    kv_head: int = 0,
    style: Style = LIGHT,
    axes: Axes | None = None,
) -> Axes:
    """Draw the keys that a KV cache keeps of a KV head after a text, a lane for each branch.

    Up to 128 positions each key is a square; of longer texts the span with kept keys is drawn.

    Args:
        pattern: the branches; generation is causal.
        length: positions of the text, at least 1.
        size: of the tensors.
        num_kv_heads: key and value heads of the layer.
        kv_head: whose keys are drawn.
        style: colours.
        axes: where to draw; None: in a new figure, with the bytes of the layer's cache.

    Returns:
        The axes; ``axes.figure`` is the figure.

    Raises:
        ValueError: there is no such head.
    """
    if not 0 <= kv_head < num_kv_heads:
        raise ValueError(f"kv_head must lie in [0, {num_kv_heads}); got {kv_head}")
    kept = kept_keys(pattern, num_kv_heads, kv_head, length)
    if axes is None:
        cache = plan_cache(pattern, num_kv_heads, length)
        nbytes = in_bytes(cache.nbytes(size.batch, size.head_dim, size.element_size))
        every = in_bytes(size.key_value_bytes(length * num_kv_heads))
        note = f"{count_of(num_kv_heads, 'KV head')}: {nbytes} per layer; all K and V: {every}."
        axes = new_figure(style, 9.4, 1.7 + 0.34 * len(kept), str(pattern), note).subplots()
    for lane, (keys, color) in enumerate(zip(kept, style.branch_colors(len(kept)), strict=True)):
        axes.broken_barh([(0, length)], (lane + 0.15, 0.7), color=style.faint, linewidth=0)
        spans = [(key + 0.06, 0.88) for key in keys]
        if length > _MOST_KEYS and keys:
            spans = [(keys.start, length - keys.start)]
        axes.broken_barh(spans, (lane + 0.15, 0.7), color=color, linewidth=0)
        place = length, lane + 0.5
        axes.annotate(f" {len(keys):,}", place, va="center", fontsize=8.5, color=style.ink)
    axes.set_yticks(np.arange(len(kept)) + 0.5, list(map(str, pattern.branches)))
    axes.set(xlim=(0, length), ylim=(len(kept), 0), xlabel="position")
    mark_positions(axes.xaxis, length)
    dress(axes, style, spines=())
    words = f"{count_of(sum(map(len, kept)), 'key')} kept; later positions see no other one"
    title = f"KV head {kv_head} after {count_of(length, 'position')}"
    set_titles(axes, style, title, words)
    return axes
