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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

from ..documents import document_borders
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, check_positive_int
from .crossings import Joined, crossings_of, join_segments
from .own import OwnBranch, OwnWork, own_work, zero_key_groups
from .parts import Link, OwnRuns, own_runs
from .replicated import replicated_groups, replicated_strips, replicated_zero_keys
from .rows import Message, Tile, TileGroup
from .spec import FEW_ADDITIONS, PlanSpec
from .tiling import group_tiles


class Step(NamedTuple):
    """Step s of a rank: it works with the rows of rank ``(rank - s) mod p``, or a piece of them.

    The keys of its tiles are slots of the received message.

    Attributes:
        step: s.
        piece: which piece.
        receive: these rows; None: none are needed.
        send: rows that rank ``(rank + s) mod p`` needs; None: none.
        groups: the tiles.
        storing: of how many groups, the first ones, each slot that they read is read for the first
            time: all, where no slot is read twice; 1, where the first reads all, being a group none
            twice; 0, where it may not.
    """

    step: int
    piece: int
    receive: Message | None
    send: Message | None
    groups: tuple[TileGroup, ...]
    storing: int

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of all groups."""
        return _tiles(self.groups)


class _Arrival(NamedTuple):
    """A message that a rank receives, the tiles that read it, and `Step.storing`."""

    message: Message | None
    groups: tuple[TileGroup, ...]
    storing: int


class LocalHalves(NamedTuple):
    """Local groups to compute before remote ones, and behind them.

    Attributes:
        early: the first group at least, so that it may be stored.
        late: the others.
        late_heads: the KV heads whose rows `late` alone has to itself; None: `early` has them too.
    """

    early: tuple[TileGroup, ...]
    late: tuple[TileGroup, ...]
    late_heads: range | None


class RankPlan:
    """What one rank computes and exchanges; the messages of a step are worked out when asked for.

    Attributes:
        plan: the plan of all ranks.
        index: the rank.
        world_size: number of ranks.
        covers: whether the first group has every local row of every head as query and as key once.
            It then needs no result to add to.
    """

    FEW_ADDITIONS = FEW_ADDITIONS

    def __init__(self, plan: PlanSpec, rank: int) -> None:
        self.plan = plan
        self.index = rank
        self.world_size = plan.layout.world_size
        self._steps: dict[int, Step] = {}
        self._crossings = crossings_of(plan, rank)
        self._arrivals: dict[tuple[int, int], _Arrival] = {}
        self._departures: dict[tuple[int, int], Message | None] = {}
        self._rows: dict[tuple[int, int | None], int] = {}
        self._crossing: dict[tuple[Link, ...], tuple[TileGroup, ...]] = {}
        self._parts = self._crossings.parts
        # Rows that belong to no document are in no tile.
        held = sum(part.stop - part.start for part in self._parts)
        self.covers = plan.covering is not None and held == plan.layout.local_length(rank)
        self._seen, self._shown = self._crossings.seen, self._crossings.shown

    @property
    def is_alone(self) -> bool:
        """Whether no segment that this rank holds a part of is anywhere else: nor in another part.

        A rank may hold several ranges of positions, between which there are other positions.
        """
        return not (self._seen or self._shown)

    @cached_property
    def local_groups(self) -> tuple[TileGroup, ...]:
        """Tiles whose queries and keys this rank holds: a group a branch, then those that cross."""
        work = self.own_work(None)
        return (*work.groups, *work.crossing)

    def own_work(
        self,
        by_rows: Callable[[int, OwnRuns], Sequence[bool]] | None,
        *,
        joins: bool = True,
        joined: Joined | None = None,
    ) -> OwnWork:
        """What this rank computes of its own rows, split by whether it is computed row by row.

        Args:
            by_rows: of each run of a branch, whether it is; None: none is.
            joins: whether parts that lie in one segment make one tile where they can.
            joined: whose own tiles are left out; None: none are.
        """
        branches = self._own_branches
        if joined is not None:
            none: frozenset[int] = frozenset()
            branches = [x._replace(without=joined.own.get(x.number, none)) for x in branches]
        given = self.plan.tiling, branches, self._parts
        links = self._crossings.links_from(self.index)
        return own_work(*given, links, self._grouped, by_rows, joins=joins)

    def _grouped(self, links: tuple[Link, ...]) -> tuple[TileGroup, ...]:
        """The tiles of links between parts of this rank: worked out once, for both directions."""
        if links not in self._crossing:
            tiling = self.plan.tiling
            self._crossing[links] = group_tiles((x, list(tiling.tiles(x))) for x in links)
        return self._crossing[links]

    @property
    def _own_branches(self) -> list[OwnBranch]:
        """All of them, in the order of the plan."""
        longest = max((part.document_stop - part.document_start for part in self._parts), default=0)
        return [
            OwnBranch(branch, None if length is None or length >= longest else length)
            for branch, length in self.plan.branches
        ]

    @cached_property
    def own_pairs(self) -> float:
        """About how many (query, key) pairs `own_work` computes, over all KV heads."""
        tiling, of_length = self.plan.tiling, {}
        pairs = 0.0
        for branch, length, _ in self._own_branches:
            if length not in of_length:
                of_length[length] = own_runs(self._parts, length)
            runs, rate = of_length[length], tiling.pattern.dilation_rates[branch]
            squares = runs.squares / rate**2
            seen = (squares + runs.rows / rate) / 2 if self.plan.is_causal else squares
            pairs += len(tiling.heads[branch]) * seen
        return pairs

    @cached_property
    def joined(self) -> Joined | None:
        """What may be computed at once where all messages are in flight; see `join_segments`."""
        return join_segments(self.plan, self._crossings, self.index)

    def at_once(self, *, gathers: bool) -> Joined | None:
        """What a call computes at once, when the rows of all steps have arrived, if anything.

        That is where all messages are in flight anyway, or there is only one.

        Args:
            gathers: as of `rounds`.
        """
        if self.is_alone:
            return None
        one, *more = self.rounds(gathers=gathers)
        return one.joined if gathers or (not more and one.num_steps == 1) else None

    def groups(self, *, gathers: bool) -> tuple[tuple[TileGroup, ...], tuple[TileGroup, ...]]:
        """The tiles that a call computes: those of own keys alone, and those of received keys.

        The latter may have own keys, too; see `at_once`, whose arguments these are.
        """
        joined = self.at_once(gathers=gathers)
        if joined is not None:
            return self.own_work(None, joined=joined).groups, joined.groups
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
    def local_halves(self) -> LocalHalves:
        """The local work cut in two, so that some is left to do while the last gradients return."""
        if len(self.local_groups) > 1:
            return LocalHalves(self.local_groups[:1], self.local_groups[1:], None)
        heads = self.plan.kv_heads
        if self.is_alone:
            return LocalHalves(self.local_groups, (), None)
        if len(heads) < 2:
            work = self.own_work(None, joins=False)
            return LocalHalves(work.groups, work.crossing, None)
        middle = len(heads) // 2
        early, late = (
            rank_plan(self.plan.narrowed(half), self.index).local_groups
            for half in (heads[:middle], heads[middle:])
        )
        return LocalHalves(early, late, heads[middle:])

    @cached_property
    def mean_additions(self) -> float:
        """A bound on how many tiles add to a row of a head, on average over rows and heads.

        A branch reaches one row in its rate; where it crosses ranks, each part that shares the
        segment adds once.
        """
        crossing = {span.branch for span in (*self._seen, *self._shown)}
        others = self._crossings.fetched_ranges - 1  # of a document
        mean = 0.0
        for branch, rate in enumerate(self.plan.pattern.dilation_rates):
            heads = len(self.plan.tiling.heads[branch]) / len(self.plan.kv_heads)
            mean += heads / rate * (1 + others * (branch in crossing))
        return mean

    def received_rows(self, sender: int, piece: int | None = None) -> int:
        """Distinct (row, head) pairs that `sender` sends this rank: in all, or of a piece."""
        key = self._crossings.kind_from(sender), piece
        if key not in self._rows:
            links = self._crossings.links_from(sender, piece)
            self._rows[key] = self.plan.tiling.count_rows(links)
        return self._rows[key]

    def sent_rows(self, receiver: int) -> int:
        """Distinct (row, head) pairs that this rank sends `receiver`."""
        key = self._crossings.kind_to(receiver), None
        if key not in self._rows:
            self._rows[key] = self.plan.tiling.count_rows(self._crossings.links_to(receiver))
        return self._rows[key]

    @cached_property
    def _peers(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.index]

    @cached_property
    def total_received_rows(self) -> int:
        """Distinct (row, head) pairs that this rank receives, over all peers."""
        return sum(map(self.received_rows, self._peers))

    @cached_property
    def total_sent_rows(self) -> int:
        """Distinct (row, head) pairs that this rank sends, over all peers."""
        return sum(map(self.sent_rows, self._peers))

    def step(self, step: int, piece: int = 0) -> Step:
        """What this rank exchanges and computes at step 1 <= `step` < world size, of a piece."""
        number = piece * self.world_size + step
        found = self._steps.get(number)
        if found is None:
            found = self._steps[number] = self._make_step(step, piece)
        return found

    def _make_step(self, step: int, piece: int) -> Step:
        own, world_size = self.index, self.world_size
        sender, receiver = (own - step) % world_size, (own + step) % world_size
        received, groups, storing = self._arrival(sender, piece)
        sent = self._departure(receiver, piece)
        return Step(
            step,
            piece,
            None if received is None else received.between(sender, own),
            None if sent is None else sent.between(own, receiver),
            groups,
            storing,
        )

    def _arrival(self, sender: int, piece: int) -> _Arrival:
        """The message from `sender` and its tiles; from another sender of its kind, maybe."""
        key = self._crossings.kind_from(sender), piece
        if key not in self._arrivals:
            tiling, links = self.plan.tiling, self._crossings.links_from(sender, piece)
            message, slots = tiling.message(sender, self.index, links)
            groups = group_tiles(
                (link, list(tiling.tiles(link, slots=slots.get(link.message_entry, {}))))
                for link in links
            )
            self._arrivals[key] = _Arrival(message, groups, _storing(message, groups))
        return self._arrivals[key]

    def _departure(self, receiver: int, piece: int) -> Message | None:
        """The message to `receiver`; to another receiver of its kind, maybe."""
        key = self._crossings.kind_to(receiver), piece
        if key not in self._departures:
            links = self._crossings.links_to(receiver, piece)
            self._departures[key], _ = self.plan.tiling.message(self.index, receiver, links)
        return self._departures[key]

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return self.plan.pieces * (self.world_size - 1)

    def steps(self) -> Iterator[Step]:
        """Every step in order; most exchange nothing when segments are shorter than shards.

        A piece goes to all ranks before the next: it is packed once where they need the same.
        """
        order = product(range(self.plan.pieces), range(1, self.world_size))
        return (self.step(step, piece) for piece, step in order)

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

    def replicated_groups(self, positions: range, rank: int) -> tuple[TileGroup, ...]:
        """The tiles of `rank` for queries that every rank holds: see `replicated`."""
        return replicated_groups(self, positions, rank)

    def replicated_strips(self, positions: range, rank: int) -> list[list[tuple[int, ...]]]:
        """The keys of `rank` that such queries see, head by head: see `replicated`."""
        return replicated_strips(self, positions, rank)

    def replicated_zero_keys(self, positions: range) -> tuple[TileGroup, ...]:
        """The zero keys that such queries see: see `replicated`."""
        return replicated_zero_keys(self, positions)

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
        more = [f"and {layout.world_size - len(shown)} more ranks"] * (
            layout.world_size > len(shown)
        )
        return "\n".join([title, *lines, *more])


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
