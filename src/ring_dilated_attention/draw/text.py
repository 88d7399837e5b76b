"""The four pictures of `rda draw` in characters, for a terminal or a pipe; without colours.

Each function returns lines of at most `width` characters.
"""

from __future__ import annotations

import string
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..plan import AttentionPlan, costs
from ..terminal import BYTES, count_of, in_bytes, in_flop, in_seconds
from .figures import (
    MOST_SENDERS,
    check_documents,
    check_heads,
    check_timeline_ranks,
    head_name,
    share_in_words,
)
from .mask import NOBODY, Grid, Ints, holders, rows_sent, shown_to
from .schedule import Activity, CostModel, timeline
from .words import branch_in_words, kv_head_of, plan_in_words, sent_in_words

WIDTH = 80
"""Characters of a line."""
_MOST_CELLS = 36
"""A side of a mask, of two characters a cell."""
_MOST_BARS = 16
"""Lines of bars; of more ranks, each is for several."""
_MOST_NUMBERS = 8
"""Ranks whose amounts are written as numbers; of more, they are shades."""
_SHADES = " ░▒▓█"
_SIGNS = string.digits[1:] + string.ascii_lowercase
"""Of branches, from the first on; what is left has the last."""
_RANK_SIGNS = string.digits + string.ascii_lowercase
_OWN, _WAIT = "█", "."


def pattern_text(
    plan: AttentionPlan,
    heads: Sequence[int] = (0,),
    *,
    window: range | None = None,
    width: int = WIDTH,
) -> list[str]:
    """Which branch shows which key to which query, head by head; see `pattern_figure`."""
    check_heads(plan, heads)
    check_documents(plan)
    grid = _grid(plan, window, width)
    branches = plan.pattern.branches
    lines = [plan_in_words(plan) + ".", f"{grid.in_words()}. Queries go down, keys go right."]
    signs = [_sign(i) for i in range(len(branches))]
    lines += [f"{s}{s}: {branch_in_words(b)}" for s, b in zip(signs, branches, strict=True)]
    if len(branches) > 1:
        lines.append(f"{signs[0]}+: in that branch and in others (the first of them is named)")
    lines = _wrapped(lines, width)
    for head in heads:
        shown = shown_to(plan, kv_head_of(plan, head), grid)
        share = share_in_words(plan, shown, grid)
        count, first = shown.branches.sum(0), shown.branches.argmax(0)

        def cell(q: int, k: int, count: Ints = count, first: Ints = first) -> str:
            if not count[q, k]:
                return "· "
            sign = _sign(int(first[q, k]))
            return sign + ("+" if count[q, k] > 1 else sign)

        lines += ["", head_name(plan, head) + (f": {share}" if share else "")]
        lines += _mask(grid, cell)
    return lines


def exchange_text(
    plan: AttentionPlan,
    size: costs.TensorSize,
    head: int = 0,
    *,
    layout_name: str = "any layout",
    window: range | None = None,
    width: int = WIDTH,
) -> list[str]:
    """Which rank sends which keys to whom, and how many bytes in all; see `exchange_figure`."""
    kv_head = kv_head_of(plan, head)
    check_documents(plan)
    world_size = plan.layout.world_size
    grid = _grid(plan, window, width)
    lines = [f"{plan.pattern}: {plan_in_words(plan, layout_name)}."]
    if world_size > MOST_SENDERS:
        lines.append(f"The mask is drawn for at most {MOST_SENDERS} ranks.")
        return [*_wrapped(lines, width), "", *_matrix(plan, size, width)]
    lines += [
        f"{grid.in_words()}. Queries go down, keys go right.",
        f"{_OWN}{_OWN} held by the rank that needs it; a digit: sent by that rank. "
        "Top and left: which rank holds the position.",
    ]
    shown, owner = shown_to(plan, kv_head, grid), holders(plan.layout, grid)

    def cell(q: int, k: int) -> str:
        sender = int(shown.sender[q, k])
        if sender == NOBODY:
            return "· "
        return 2 * (_OWN if sender == owner[q] else _RANK_SIGNS[sender])

    lines = [*_wrapped(lines, width), "", head_name(plan, head)]
    lines += _mask(grid, cell, [_RANK_SIGNS[rank] for rank in owner])
    return [*lines, "", *_matrix(plan, size, width)]


def work_text(
    plans: Mapping[str, AttentionPlan], size: costs.TensorSize, *, width: int = WIDTH
) -> list[str]:
    """FLOPs of each rank, layout by layout; see `work_figure`."""
    work = {name: costs.flops_by_rank(plan, size) for name, plan in plans.items()}
    plan = next(iter(plans.values()))
    count = plan.layout.world_size
    most = max(max(map(max, work.values())), 1)
    title = f"{plan.pattern}: {plan_in_words(plan)}, {count_of(count, 'rank')}."
    group = -(-count // _MOST_BARS)
    lines = [title, "FLOPs of a forward call per rank, and over the mean of all ranks."]
    if group > 1:
        lines.append(f"Each line is the largest of {group:,} ranks.")
    lines = _wrapped(lines, width)
    for name, flops in work.items():
        found, mean = costs.balance(flops), sum(flops) / count
        lines += [
            "",
            f"{name}: largest {found.imbalance:.2f} × the mean; at most "
            f"{found.speed_up_bound:.2f} × as fast as 1 rank",
        ]
        for first in range(0, count, group):
            last = min(first + group, count) - 1
            largest = max(flops[first : last + 1])
            ranks = f"rank {first}" if group == 1 else f"ranks {first}-{last}"
            bar = "█" * round(largest / most * (width - 44))
            ratio = f"{largest / mean:.2f} ×" if mean else "-"
            lines.append(f"{ranks:<17} {in_flop(largest):>11} {ratio:>9}  {bar}".rstrip())
    return lines


def timeline_text(
    plan: AttentionPlan,
    size: costs.TensorSize,
    model: CostModel | None = None,
    *,
    layout_name: str = "any layout",
    gathers: bool | None = None,
    width: int = WIDTH,
) -> list[str]:
    """When ranks compute, receive and wait in a forward call; see `timeline_figure`."""
    check_timeline_ranks(plan)
    model = CostModel() if model is None else model
    found = timeline(plan, size, model, gathers=gathers)
    names = [f"rank {rank}" for rank in range(found.world_size)]
    left = max(map(len, names)) + len(" compute ")
    columns = width - left
    step = found.total / columns
    ways = "gather" if (plan.gathers if gathers is None else gathers) else "ring"
    lines = _wrapped(
        [
            f"{plan.pattern}: {plan_in_words(plan, layout_name)}.",
            f"Forward, {ways}: {found.in_words()}.",
            f"{model.in_words()}.",
            f"1 character = {in_seconds(step)}; what is much shorter does not show. {_OWN}: "
            "computes with its own keys; a digit: computes with, or receives, keys of that rank"
            f"{' (a = 10, b = 11, ...)' if found.world_size > 10 else ''}; {_WAIT}: waits.",
        ],
        width,
    )
    lines.append("")
    for rank, name in enumerate(names):
        own = [x for x in found.activities if x.rank == rank]
        for kind, kinds in (("compute", ("compute", "wait")), ("receive", ("receive",))):
            bar = _bar([x for x in own if x.kind in kinds], step, columns)
            lines.append(f"{name if kind == 'compute' else '':<{left - 9}} {kind} {bar}".rstrip())
    return lines


def _bar(activities: Sequence[Activity], step: float, columns: int) -> str:
    bar = [" "] * columns
    for item in activities:
        sign = _WAIT if item.kind == "wait" else _RANK_SIGNS[item.peer]
        if item.kind == "compute" and item.peer == item.rank:
            sign = _OWN
        for column in range(round(item.start / step), min(round(item.stop / step), columns)):
            bar[column] = sign
    return "".join(bar)


def _sign(branch: int) -> str:
    return _SIGNS[min(branch, len(_SIGNS) - 1)]


def _grid(plan: AttentionPlan, window: range | None, width: int) -> Grid:
    room = (width - len(f"{plan.layout.length:,}") - 4) // 2
    return Grid.of(plan.layout.length, max(min(room, _MOST_CELLS), 1), window)


def _mask(
    grid: Grid, cell: Callable[[int, int], str], signs: Sequence[str] | None = None
) -> Iterator[str]:
    """Lines of cells, with the position of some queries and, if given, a sign for each block."""
    names = [f"{grid.start + i * grid.size:,}" for i in range(grid.count)]
    left = max(map(len, names))
    if signs is not None:
        yield f"{'':>{left}}   " + "".join(f"{sign} " for sign in signs).rstrip()
    for q in range(grid.count):
        name = names[q] if q % 4 == 0 else ""
        sign = "" if signs is None else f"{signs[q]} "
        yield f"{name:>{left}} {sign}" + "".join(cell(q, k) for k in range(grid.count)).rstrip()


def _matrix(plan: AttentionPlan, size: costs.TensorSize, width: int) -> Iterator[str]:
    """Bytes from rank to rank, as numbers or shades."""
    world_size = plan.layout.world_size
    ranks = range(min(world_size, _MOST_CELLS))
    sent = rows_sent(plan, ranks)
    nbytes = [[size.key_value_bytes(int(rows)) for rows in row] for row in sent]
    most = max(map(max, nbytes))
    found = sent_in_words(plan, size, ranks)
    yield from textwrap.wrap(f"Bytes of K and V sent in forward, all heads: {found}", width)
    if len(ranks) < world_size:
        yield f"Drawn: the first {len(ranks)} of {world_size:,} ranks."
    if len(ranks) > _MOST_NUMBERS:
        yield f"From the rank on the left to the column's; {_SHADES[1:]}: quarters of the most."
        for rank, row in zip(ranks, nbytes, strict=True):
            yield (
                f"{rank:>5} "
                + "".join(2 * _SHADES[-(-4 * x // max(most, 1))] for x in row).rstrip()
            )
        return
    unit = in_bytes(most).split()[-1]
    factor = dict(BYTES)[unit]
    yield f"{unit + ' from':<9}" + "".join(f"{f'to {rank}':>8}" for rank in ranks)
    for i, row in zip(ranks, nbytes, strict=True):
        cells = ["·" if not x else _amount(x / factor) for x in row]
        yield f"rank {i:<4}" + "".join(f"{cell:>8}" for cell in cells)


def _amount(value: float) -> str:
    if value < 0.1:
        return "<0.1"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def _wrapped(lines: Sequence[str], width: int) -> list[str]:
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="   ")]
