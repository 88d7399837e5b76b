"""Segments of several ranks whose keys are put side by side, own and received. Integers only.

A rank could compute its own keys of such a segment, then those of each other rank, and merge. Where
it has them all at once, they are one tile instead: fewer and larger kernel calls, nothing to merge.
It takes rows of its own a second time, between those that it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .crossings import Crossings
from .grouping import group_tiles
from .parts import Link
from .rows import Message, TileGroup, keys_read

if TYPE_CHECKING:
    from .attention import AttentionPlan


@dataclass(frozen=True, eq=False)
class Joined:
    """What a rank computes with keys that it does not all hold. Equal only to itself.

    Attributes:
        message: its runs list the keys in slots, by positions of the sequence instead of local
            rows. It is sent by nobody: who holds a position holds its row.
        groups: tiles; their keys are slots.
        branches: of each branch, one behind the other, which slots it reads; no two of these slots
            are the same row.
        own: by branch, the local rows at which own runs begin whose tiles are among `groups`.
        reads_once: whether every slot is a key of exactly one tile.
    """

    message: Message
    groups: tuple[TileGroup, ...]
    branches: tuple[range, ...]
    own: dict[int, frozenset[int]]
    reads_once: bool


def join_segments(plan: AttentionPlan, crossings: Crossings, rank: int) -> Joined | None:
    """Join the keys of each segment that a rank shares with others; None where it does not pay.

    Of a single sequence, not causal, of which the rank holds one range. The branch in which every
    row takes part stays apart: its own tiles are computed first, and written over what is there.
    None if the slots outnumber the rows that the rank holds: K and V would more than double.

    Args:
        plan: of all ranks.
        crossings: of the rank.
        rank: which one.
    """
    parts = crossings.parts
    if plan.is_causal or plan.pieces > 1 or len(parts) != 1 or len(plan.documents) != 2:
        return None
    (own,) = parts
    start = own.document_start
    whole = own._replace(start=start, stop=own.document_stop, local=start)
    links: dict[tuple[int, int, int], Link] = {}
    joined: dict[int, set[int]] = {}
    for span in crossings.seen:
        keys = whole
        if span.branch == plan.covering:
            keys = whole.within(span.low, span.high)
        else:
            first = own.local_row(max(span.start, own.start))
            joined.setdefault(span.branch, set()).add(first)
        link = Link(span.branch, keys, own, span.start, span.stop)
        links[link.message_entry] = link
    if not joined:
        return None
    message, slots = plan.tiling.message(rank, rank, list(links.values()))
    if message is None or message.slots > plan.layout.local_length(rank) * len(plan.kv_heads):
        return None
    groups = group_tiles(
        (link, list(plan.tiling.tiles(link, slots=slots.get(entry, {}))))
        for entry, link in links.items()
    )
    firsts: dict[int, int] = {}
    for (branch, _, _), of_heads in slots.items():
        firsts[branch] = min(firsts.get(branch, message.slots), *of_heads.values())
    borders = (*sorted(firsts.values()), message.slots)
    return Joined(
        message,
        groups,
        tuple(range(a, b) for a, b in pairwise(borders)),
        {branch: frozenset(rows) for branch, rows in joined.items()},
        sum(map(keys_read, groups)) == message.slots,
    )
