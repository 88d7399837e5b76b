"""From (pattern, layout) to what each rank computes and exchanges. Integers only.

A cell is (branch, segment, offset, heads); its rows are one arithmetic progression of positions.
The work of a rank is

- per part that it holds, its own segments: the run of full segments as ONE batched tile, and the
  clipped ones at its two ends (`RankPlan.local`);
- per pair of parts that share a segment, one tile: local where the rank holds both, else part of
  the step at which the keys' owner is the peer (`RankPlan.step`). Where the rank holds both one
  behind the other, the tiles of both and of the pair are one if they can be (`join_runs`).

Any rank can compute every rank's plan. What crosses between two ranks is a `Message`: the sender's
dilated rows that the receiver's queries need, each (row, head) once however many branches need it.
In which order a rank does all this is its program: see `program`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from ..documents import document_borders
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_positive_int
from . import cache
from .rows import Link, Message, OwnRuns, Part, Span, Tile, TileGroup, own_runs
from .spec import FEW_ADDITIONS, PlanSpec
from .tiling import OwnWork, group_tiles, own_work, zero_key_groups


class Crossings:
    """The segments that a rank shares with each of the others.

    Tiles and messages hold local rows. So two ranks whose parts lie alike relative to the segments
    that they share with a third one exchange alike messages with it: they are of one kind. Of
    thousands of steps few differ, and what is worked out for one step holds for all of its kind.

    Attributes:
        parts: what the rank holds.
        seen: where the keys of others lie that its queries see.
        shown: where the queries of others lie that see its keys.
    """

    def __init__(self, plan: PlanSpec, rank: int) -> None:
        self._plan = plan
        self.parts = plan.parts_of(rank)
        self.seen, self.shown = plan.crossing_spans(self.parts)
        self._kinds: dict[Hashable, int] = {}
        self._kinds_of: dict[int, tuple[int, int]] = {}

    def kind_from(self, sender: int) -> int:
        """The same for all senders that send this rank alike messages, which make alike tiles."""
        return self._kinds_with(sender)[0]

    def kind_to(self, receiver: int) -> int:
        """The same for all receivers to which this rank sends alike messages."""
        return self._kinds_with(receiver)[1]

    def links_from(self, sender: int) -> list[Link]:
        """This rank's queries that see keys of `sender`."""
        parts = self._plan.parts_of(sender) if self.seen else ()
        return [
            Link(span.branch, other, span.part, span.start, span.stop)
            for span in self.seen
            for other in parts
            if span.reaches(other)
        ]

    def links_to(self, receiver: int) -> list[Link]:
        """Queries of `receiver` that see this rank's keys."""
        parts = self._plan.parts_of(receiver) if self.shown else ()
        return [
            Link(span.branch, span.part, other, span.start, span.stop)
            for span in self.shown
            for other in parts
            if span.reaches(other)
        ]

    def _kinds_with(self, other: int) -> tuple[int, int]:
        """The kinds of `other` as a sender and as a receiver."""
        if other not in self._kinds_of:
            parts = self._plan.parts_of(other)
            placed = list(zip(_order(parts), parts, strict=True))
            self._kinds_of[other] = (
                self._kind((True, *self._places(self.seen, placed))),
                self._kind((False, *self._places(self.shown, placed))),
            )
        return self._kinds_of[other]

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


class Step(NamedTuple):
    """Step s of a rank: it works with the rows of rank ``(rank - s) mod p``.

    The keys of its tiles are slots of the received message.

    Attributes:
        step: s.
        receive: these rows; None: none are needed.
        send: rows that rank ``(rank + s) mod p`` needs; None: none.
        groups: the tiles.
        storing: of how many groups, the first ones, each slot that they read is read for the first
            time: all, where no slot is read twice; 1, where the first reads all, being a group none
            twice; 0, where it may not.
    """

    step: int
    receive: Message | None
    send: Message | None
    groups: tuple[TileGroup, ...]
    storing: int

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of all groups."""
        return _tiles(self.groups)

    @property
    def moves(self) -> bool:
        """Whether any rows are sent or received."""
        return self.receive is not None or self.send is not None


class RankPlan:
    """What one rank computes and exchanges; the messages of a step are worked out when asked for.

    Attributes:
        plan: the plan of all ranks.
        index: the rank.
        world_size: number of ranks.
        covers: whether the first group has every local row of every head as query and as key once.
            It then needs no result to add to.
        programs: what is kept for running it: see `program.lower` and `engine.RingCall`.
    """

    FEW_ADDITIONS = FEW_ADDITIONS

    def __init__(self, plan: PlanSpec, rank: int) -> None:
        self.plan = plan
        self.index = rank
        self.world_size = plan.layout.world_size
        self.programs: dict[Hashable, Any] = {}
        self._steps: dict[int, Step] = {}
        self._crossings = crossings_of(plan, rank)
        self._arrivals: dict[int, tuple[Message | None, tuple[TileGroup, ...], int]] = {}
        self._departures: dict[int, Message | None] = {}
        self._rows: dict[int, int] = {}
        self._crossing: dict[tuple[Link, ...], tuple[TileGroup, ...]] = {}
        self._parts = self._crossings.parts
        # Rows that belong to no document are in no tile.
        held = sum(part.stop - part.start for part in self._parts)
        self.covers = plan.covering is not None and held == plan.layout.local_length(rank)

    @property
    def is_alone(self) -> bool:
        """Whether no segment that this rank holds a part of is anywhere else: nor in another part.

        A rank may hold several ranges of positions, between which there are other positions.
        """
        return not (self._crossings.seen or self._crossings.shown)

    @property
    def held_rows(self) -> int:
        """(row, head) pairs of keys that this rank holds."""
        return self.plan.layout.local_length(self.index) * len(self.plan.kv_heads)

    @cached_property
    def local_groups(self) -> tuple[TileGroup, ...]:
        """Tiles whose queries and keys this rank holds: a group a branch, then those that cross."""
        work = self.own_work(None)
        return (*work.groups, *work.crossing)

    def own_work(self, by_rows: Callable[[int, OwnRuns], Sequence[bool]] | None) -> OwnWork:
        """What this rank computes of its own rows, split by whether it is computed row by row.

        Args:
            by_rows: of each run of a branch, whether it is; None: none is.
        """
        links = self._crossings.links_from(self.index)
        given = self.plan.tiling, self._own_branches, self._parts
        return own_work(*given, links, self._grouped, by_rows)

    def _grouped(self, links: tuple[Link, ...]) -> tuple[TileGroup, ...]:
        """The tiles of links between parts of this rank: worked out once, for both directions."""
        if links not in self._crossing:
            tiling = self.plan.tiling
            self._crossing[links] = group_tiles((x, list(tiling.tiles(x))) for x in links)
        return self._crossing[links]

    @property
    def _own_branches(self) -> list[tuple[int, int | None]]:
        """All of them, in the order of the plan; a length of None: no document is longer."""
        longest = max((part.document_stop - part.document_start for part in self._parts), default=0)
        return [
            (branch, None if length is None or length >= longest else length)
            for branch, length in self.plan.branches
        ]

    @cached_property
    def own_pairs(self) -> float:
        """About how many (query, key) pairs `own_work` computes, over all KV heads."""
        tiling, of_length = self.plan.tiling, {}
        pairs = 0.0
        for branch, length in self._own_branches:
            if length not in of_length:
                of_length[length] = own_runs(self._parts, length)
            runs, rate = of_length[length], tiling.pattern.dilation_rates[branch]
            squares = runs.squares / rate**2
            seen = (squares + runs.rows / rate) / 2 if self.plan.is_causal else squares
            pairs += len(tiling.heads[branch]) * seen
        return pairs

    def groups(self, *, gathers: bool) -> tuple[tuple[TileGroup, ...], tuple[TileGroup, ...]]:
        """The tiles that a call computes: those of own keys, and those of received keys."""
        rounds = self.rounds(gathers=gathers)
        own = (group for one in rounds for group in one.local_groups)
        return tuple(own), tuple(g for one in rounds for step in one.steps() for g in step.groups)

    @property
    def local(self) -> tuple[Tile, ...]:
        """The tiles whose queries and keys this rank holds."""
        return _tiles(self.local_groups)

    @cached_property
    def zero_keys(self) -> tuple[TileGroup, ...]:
        """Which of this rank's queries see how many zero keys; see `zero_key_groups`."""
        return zero_key_groups(self.plan.tiling, self._parts)

    @property
    def single_branches(self) -> tuple[RankPlan, ...]:
        """What the rank does in the plan of each branch by itself."""
        return tuple(rank_plan(plan, self.index) for plan in self.plan.single_branches)

    def rounds(self, *, gathers: bool) -> tuple[RankPlan, ...]:
        """What the rank does one after the other: all at once, or some heads at a time.

        Args:
            gathers: whether all transfers are in flight at once; a ring is cut by heads.
        """
        if gathers or self.world_size == 1:
            return (self,)
        return tuple(rank_plan(plan, self.index) for plan in self.plan.rounds)

    @cached_property
    def mean_additions(self) -> float:
        """A bound on how many tiles add to a row of a head, on average over rows and heads.

        A branch reaches one row in its rate; where it crosses ranks, each part that shares the
        segment adds once.
        """
        crossing = {span.branch for span in (*self._crossings.seen, *self._crossings.shown)}
        others = sum(map(len, self.plan.layout.ranges)) - 1  # of a document
        mean = 0.0
        for branch, rate in enumerate(self.plan.pattern.dilation_rates):
            heads = len(self.plan.tiling.heads[branch]) / len(self.plan.kv_heads)
            mean += heads / rate * (1 + others * (branch in crossing))
        return mean

    def received_rows(self, sender: int) -> int:
        """Distinct (row, head) pairs that `sender` sends this rank."""
        return self._count(self._crossings.kind_from(sender), self._crossings.links_from, sender)

    def sent_rows(self, receiver: int) -> int:
        """Distinct (row, head) pairs that this rank sends `receiver`."""
        return self._count(self._crossings.kind_to(receiver), self._crossings.links_to, receiver)

    def _count(self, kind: int, links: Callable[[int], list[Link]], other: int) -> int:
        if kind not in self._rows:
            self._rows[kind] = self.plan.tiling.count_rows(links(other))
        return self._rows[kind]

    @cached_property
    def total_received_rows(self) -> int:
        """Distinct (row, head) pairs that this rank receives, over all peers."""
        return sum(self.received_rows(x) for x in range(self.world_size) if x != self.index)

    @cached_property
    def total_sent_rows(self) -> int:
        """Distinct (row, head) pairs that this rank sends, over all peers."""
        return sum(self.sent_rows(x) for x in range(self.world_size) if x != self.index)

    def step(self, step: int) -> Step:
        """What this rank exchanges and computes at step 1 <= `step` < world size."""
        if step not in self._steps:
            own, world_size = self.index, self.world_size
            sender, receiver = (own - step) % world_size, (own + step) % world_size
            received, groups, storing = self._arrival(sender)
            sent = self._departure(receiver)
            self._steps[step] = Step(
                step,
                None if received is None else received.between(sender, own),
                None if sent is None else sent.between(own, receiver),
                groups,
                storing,
            )
        return self._steps[step]

    def _arrival(self, sender: int) -> tuple[Message | None, tuple[TileGroup, ...], int]:
        """A message like that from `sender`, the tiles that read it, and `Step.storing`."""
        kind = self._crossings.kind_from(sender)
        if kind not in self._arrivals:
            tiling, links = self.plan.tiling, self._crossings.links_from(sender)
            message, slots = tiling.message(sender, self.index, links)
            groups = group_tiles(
                (link, list(tiling.tiles(link, slots=slots.get(link.message_entry, {}))))
                for link in links
            )
            self._arrivals[kind] = message, groups, _storing(message, groups)
        return self._arrivals[kind]

    def _departure(self, receiver: int) -> Message | None:
        """A message like that to `receiver`."""
        kind = self._crossings.kind_to(receiver)
        if kind not in self._departures:
            links = self._crossings.links_to(receiver)
            self._departures[kind], _ = self.plan.tiling.message(self.index, receiver, links)
        return self._departures[kind]

    def steps(self) -> Iterator[Step]:
        """Every step in order; most exchange nothing when segments are shorter than shards."""
        return map(self.step, range(1, self.world_size))

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs this rank computes, over all query heads, per batch entry."""
        tiles = [*self.local, *(tile for step in self.steps() for tile in step.tiles)]
        return sum(t.pairs for t in tiles) * (self.plan.num_heads // self.plan.num_kv_heads)


def rank_plan(plan: PlanSpec, rank: int) -> RankPlan:
    """What `rank` computes and exchanges: one object for as long as the plan is kept."""
    known: dict[int, RankPlan] = plan.derived.setdefault(RankPlan, {})
    if rank not in known:
        if not 0 <= rank < plan.layout.world_size:
            raise ValueError(f"rank must lie in [0, {plan.layout.world_size}), got {rank}")
        known[rank] = RankPlan(plan, rank)
    return known[rank]


def _storing(message: Message | None, groups: Sequence[TileGroup]) -> int:
    """See `Step.storing`."""
    if message is None:
        return 0
    read = [group.keys_read for group in groups]
    return len(read) if sum(read) == message.slots else int(read[0] == message.slots)


def _tiles(groups: Sequence[TileGroup]) -> tuple[Tile, ...]:
    return tuple(tile for group in groups for tile in group.tiles)


class AttentionPlan(PlanSpec):
    """The plan of all ranks: what was told, and `rank`, which derives what one rank does."""

    def rank(self, rank: int) -> RankPlan:
        """What `rank` computes and exchanges."""
        return rank_plan(self, rank)

    replicated_groups = cache.replicated_groups
    replicated_strips = cache.replicated_strips
    replicated_zero_keys = cache.replicated_zero_keys

    def __str__(self) -> str:
        """A table: what the ranks hold, compute and exchange (the first 16 of them)."""
        layout, shown = self.layout, range(min(self.layout.world_size, 16))
        title = (
            f"{self.pattern} over {layout.length} positions on {layout.world_size} "
            f"rank{'s' * (layout.world_size != 1)}, "
            f"{self.num_heads} heads, {self.num_kv_heads} KV heads, "
            f"{'causal' if self.is_causal else 'not causal'}, "
            f"{len(self.documents) - 1} document(s), {'gather' if self.gathers else 'ring'}"
        )
        rows = [("rank", "positions", "local tiles", "pairs", "rows received", "rows sent")]
        for rank in map(self.rank, shown):
            figures = (
                rank.index,
                layout.local_length(rank.index),
                len(rank.local),
                rank.pairs,
                rank.total_received_rows,
                rank.total_sent_rows,
            )
            rows.append(tuple(map(str, figures)))  # type: ignore[arg-type]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        ]
        left = layout.world_size - len(shown)
        return "\n".join([title, *lines, *[f"and {left} more ranks"] * (left > 0)])


def plan_attention(
    pattern: DilatedPattern,
    layout: SequenceLayout,
    *,
    is_causal: bool,
    num_heads: int = 1,
    num_kv_heads: int | None = None,
    documents: Sequence[int] | None = None,
    length: int | None = None,
    head_slice: Sequence[int] | None = None,
) -> AttentionPlan:
    """Plan dilated attention of `pattern` over a sequence that `layout` shards.

    Args:
        pattern: the branches.
        layout: which rank holds which positions.
        is_causal: whether a query sees only keys at positions <= its own.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads, a divisor of `num_heads`; None: as many.
        documents: cumulative lengths ``[0, ..., layout.length]`` of documents packed in the
            sequence: each is cut into segments on its own and attention never crosses a border.
            None: one document. With `length` they may end behind it, and are cut off there.
        length: how many positions are valid: those from there on are padding, which belongs to no
            document. None: all.
        head_slice: (start, stop, total): the KV heads are heads start to stop (excluded) of a layer
            with total of them. None: they are all.

    Returns:
        A hashable plan; ``plan.rank(i)`` is what rank i does.

    Raises:
        TypeError, ValueError: an argument is not of its kind, `num_kv_heads` does not divide
            `num_heads`, `documents` does not rise from 0 to the layout's length, `length` lies
            outside of [0, layout.length], or `head_slice` names another number of heads.
    """
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {pattern!r}")
    if not isinstance(layout, SequenceLayout):
        raise TypeError(f"layout must be a SequenceLayout, got {layout!r}")
    num_heads = check_positive_int("num_heads", num_heads)
    kv_heads = (
        num_heads if num_kv_heads is None else check_positive_int("num_kv_heads", num_kv_heads)
    )
    if num_heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads; got {num_heads} and {kv_heads}")
    pattern = pattern.of_heads(head_slice, kv_heads)
    borders = document_borders(documents, length, layout.length)
    return AttentionPlan(pattern, layout, bool(is_causal), num_heads, kv_heads, borders)
