"""The segments that ranks share, and those whose keys a rank puts side by side. Integers only.

Tiles and messages hold local rows. So two ranks whose parts lie alike relative to the segments that
they share with a third one exchange alike messages with it: they are of one kind. Of thousands of
steps few differ, and what is worked out for one step holds for all of its kind.

A rank could compute its own keys of a shared segment, then those of each other rank, and merge.
Where it has them all at once, they are one tile instead: fewer and larger kernel calls, nothing to
merge. It takes rows of its own a second time, between those that it receives.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from .parts import Link, Part, Pieces, Span, cut_into_pieces, within_rows
from .rows import Message, TileGroup
from .spec import PlanSpec
from .tiling import group_tiles


class Crossings:
    """The segments that a rank shares with each of the others.

    Attributes:
        parts: what the rank holds.
        seen: where the keys of others lie that its queries see.
        shown: where the queries of others lie that see its keys.
    """

    def __init__(self, plan: PlanSpec, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self.parts = plan.parts_of(rank)
        self.seen, self.shown = plan.crossing_spans(self.parts)
        self._kinds: dict[Hashable, int] = {}
        self._kinds_of: dict[int, tuple[int, int]] = {}
        self._pieces_from: dict[int, Pieces] = {}
        self._pieces_to: dict[int, Pieces] = {}

    def kind_from(self, sender: int) -> int:
        """The same for all senders that send this rank alike messages, which make alike tiles."""
        return self._kinds_with(sender)[0]

    def kind_to(self, receiver: int) -> int:
        """The same for all receivers to which this rank sends alike messages."""
        return self._kinds_with(receiver)[1]

    def links_from(self, sender: int, piece: int | None = None) -> list[Link]:
        """This rank's queries that see keys of `sender`: all of those, or those of a piece."""
        if not self.seen:
            return []
        parts = within_rows(self._plan.parts_of(sender), self._piece_from(sender, piece))
        return [
            Link(span.branch, other, span.part, span.start, span.stop)
            for span in self.seen
            for other in parts
            if span.reaches(other)
        ]

    def links_to(self, receiver: int, piece: int | None = None) -> list[Link]:
        """Queries of `receiver` that see this rank's keys: all of those, or those of a piece."""
        if not self.shown:
            return []
        parts, keys = self._plan.parts_of(receiver), self._piece_to(receiver, piece)
        return [
            Link(span.branch, own, other, span.start, span.stop)
            for span in self.shown
            for own in within_rows([span.part], keys)
            if own.start < span.stop and span.start < own.stop  # a piece may be elsewhere
            for other in parts
            if span.reaches(other)
        ]

    @cached_property
    def fetched_ranges(self) -> int:
        """How many ranges are fetched at most, over all ranks and with this rank's own.

        Those that two pieces share count twice.
        """
        ranges = self._plan.layout.ranges
        if self._plan.pieces == 1:
            return sum(map(len, ranges))
        others = (self._cut_from(x).ranges for x in range(len(ranges)) if x != self._rank)
        return len(ranges[self._rank]) + sum(others)

    def _piece_from(self, sender: int, piece: int | None) -> range | None:
        """The local rows of `sender` that this rank fetches at a time; None: all that it needs."""
        if piece is None or self._plan.pieces == 1 or sender == self._rank:
            return None
        return self._cut_from(sender).rows(piece)

    def _piece_to(self, receiver: int, piece: int | None) -> range | None:
        """The local rows of this rank that `receiver` fetches at a time; None: all it needs."""
        if piece is None or self._plan.pieces == 1:
            return None
        kind = self.kind_to(receiver)
        if kind not in self._pieces_to:
            self._pieces_to[kind] = self._cut(self.links_to(receiver), self._rank)
        return self._pieces_to[kind].rows(piece)

    def _cut_from(self, sender: int) -> Pieces:
        kind = self.kind_from(sender)
        if kind not in self._pieces_from:
            self._pieces_from[kind] = self._cut(self.links_from(sender), sender)
        return self._pieces_from[kind]

    def _cut(self, links: Sequence[Link], sender: int) -> Pieces:
        """The pieces in which the keys of these links, which `sender` holds, are fetched."""
        needed = (
            (link.keys.local_row(max(link.keys.start, link.start)),
             link.keys.local_row(min(link.keys.stop, link.stop)))
            for link in links
        )  # fmt: skip
        return cut_into_pieces(needed, self._ends(sender), self._plan.pieces)

    def _ends(self, rank: int) -> tuple[int, ...]:
        """Where the ranges of a rank end, in local rows."""
        return tuple(accumulate(stop - start for start, stop in self._plan.layout.ranges[rank]))

    def _kinds_with(self, other: int) -> tuple[int, int]:
        """The kinds of `other` as a sender and as a receiver."""
        found = self._kinds_of.get(other)
        if found is None:
            parts = self._plan.parts_of(other)
            # Where pieces end depends on where the sender's ranges do.
            ends = self._ends(other) if self._plan.pieces > 1 else ()
            placed = list(zip(_order(parts), parts, strict=True))
            sends = self._kind((ends, *self._places(self.seen, placed)))
            receives = self._kind((None, *self._places(self.shown, placed)))
            found = self._kinds_of[other] = sends, receives
        return found

    def _kind(self, places: Hashable) -> int:
        return self._kinds.setdefault(places, len(self._kinds))

    def _places(self, spans: Sequence[Span], parts: Sequence[tuple[int, Part]]) -> list[int]:
        """How `parts` lie relative to `spans`: all that tiles and messages depend on.

        Five ints for each pair of a span and a part that it reaches.

        Args:
            spans: of this rank.
            parts: of another rank, each with its place in the order of their positions.
        """
        found: list[int] = []
        rates = self._plan.pattern.dilation_rates
        for number, (branch, _, _, low, high, segment, end) in enumerate(spans):
            rate = rates[branch]
            for order, (start, stop, _, local, _, _) in parts:
                if start < high and low < stop:
                    first = start if start > segment else segment
                    size = (stop if stop < end else end) - first
                    found += number, order, local + first - start, size, (segment - first) % rate
        return found


def crossings_of(plan: PlanSpec, rank: int) -> Crossings:
    """The segments that `rank` shares with others: one object for plans of different heads."""
    if plan.whole is not None and plan.whole.covering == plan.covering:
        return crossings_of(plan.whole, rank)  # which branch covers decides their order
    known: dict[int, Crossings] = plan.derived.setdefault(Crossings, {})
    if rank not in known:
        known[rank] = Crossings(plan, rank)
    return known[rank]


def _order(parts: Sequence[Part]) -> Sequence[int]:
    """Of each part, how many of them have lower positions."""
    if all(a.start < b.start for a, b in pairwise(parts)):
        return range(len(parts))
    before = {start: number for number, start in enumerate(sorted(x.start for x in parts))}
    return [before[part.start] for part in parts]


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


def join_segments(plan: PlanSpec, crossings: Crossings, rank: int) -> Joined | None:
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
        sum(group.keys_read for group in groups) == message.slots,
    )
