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
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress, pairwise
from operator import not_
from typing import Any, NamedTuple, TypeVar

from ..documents import document_borders
from ..layout import SequenceLayout
from ..pattern import DilatedPattern, Length, Window, band_pairs, check_positive_int
from .rows import (
    Link,
    Message,
    OwnRun,
    OwnRuns,
    Part,
    Span,
    Tile,
    TileGroup,
    cut,
    join_links,
    join_runs,
    own_runs,
    spans,
    window_links,
)
from .tiling import FlaggedRows, OwnWork, Tiling, own_ranges, tiling_of, zero_key_groups

_T = TypeVar("_T")


FEW_ADDITIONS = 8.0
"""Additions to a row, on average, that may round to half precision each: errors of out and of the
gradients stay below those of the kernels (benchmarks/results/attention_speed.md)."""

ROUND_PAIRS = 1 << 31
"""(Query, key) pairs of a head and step that keep a rank busy: 1.7 ms of an H200's forward at a
head_dim of 128 (half of it if causal), behind which their rows travel and the gaps between kernels
matter little. With half as many, forward of a dense causal ring of 65,536 tokens on four takes 15
to 30% longer, with a quarter three times as long: the host does not keep up.
"""


@dataclass(frozen=True)
class AttentionPlan:
    """The plan of all ranks: the arguments of `plan_attention`, and what is equal on all ranks.

    Attributes:
        pattern: the branches.
        layout: which rank holds which positions.
        is_causal: whether a query sees only keys at positions <= its own.
        num_heads: number of query heads.
        num_kv_heads: number of KV heads.
        documents: cumulative lengths ``[0, ..., n]`` of the documents; ``(0, n)`` is one document.
        narrowed_to: the KV heads that the plan is for; None: all of them.
    """

    pattern: DilatedPattern
    layout: SequenceLayout
    is_causal: bool
    num_heads: int
    num_kv_heads: int
    documents: tuple[int, ...]
    narrowed_to: range | None = None

    @cached_property
    def _ranks(self) -> dict[int, RankPlan]:
        return {}

    def rank(self, rank: int) -> RankPlan:
        """What `rank` does: one object for as long as the plan is kept."""
        if rank not in self._ranks:
            if not 0 <= rank < self.layout.world_size:
                raise ValueError(f"rank must lie in [0, {self.layout.world_size}), got {rank}")
            self._ranks[rank] = RankPlan(self, rank)
        return self._ranks[rank]

    @property
    def kv_heads(self) -> range:
        """The KV heads that the plan is for."""
        return range(self.num_kv_heads) if self.narrowed_to is None else self.narrowed_to

    @cached_property
    def single_branches(self) -> tuple[AttentionPlan, ...]:
        """The plan of each branch by itself; heads run all branches."""
        return tuple(replace(self, pattern=pattern) for pattern in self.pattern.single_branches())

    @cached_property
    def rounds(self) -> tuple[AttentionPlan, ...]:
        """The plan for a few heads at a time: what a ring runs.

        Its buffers then hold rows of these heads alone. They are as few as keep a rank busy, or as
        many as make a message of K and V an eighth of the query: with grouped queries more heads a
        round are fewer kernel calls, and still less memory.
        """
        # Of a head, in the branch that has the most of them in a shard.
        most = self.layout.max_local_length
        of_branches = (
            most * -(-(sum(length) + 1) // rate)
            if isinstance(length, Window)
            else (-(-min(most, length or most) // rate)) ** 2
            for length, rate in self.pattern.branches
        )
        pairs = max(max(of_branches) * (self.num_heads // self.num_kv_heads), 1)
        total = self.num_kv_heads
        heads = max(-(-ROUND_PAIRS // pairs), self.num_heads // 16)
        count = -(-total // min(total, heads))
        if count == 1:
            return (self,)
        borders = (total * i // count for i in range(count + 1))
        return tuple(replace(self, narrowed_to=range(a, b)) for a, b in pairwise(borders))

    @cached_property
    def covering(self) -> int | None:
        """The first branch in which every row of every head takes part; None if there is none."""
        return next(
            (
                branch
                for branch, each in enumerate(self.pattern.branches)
                if each.stride == 1 and len(self.tiling.heads[branch]) == len(self.kv_heads)
            ),
            None,
        )

    @cached_property
    def branches(self) -> list[tuple[int, Length]]:
        """The number of each branch and its segments' length; the one that covers first."""
        lengths = enumerate(self.pattern.segment_lengths)
        return sorted(lengths, key=lambda item: item[0] != self.covering)

    def crossing_spans(self, parts: Sequence[Part]) -> tuple[list[Span], list[Span]]:
        """Segments shared with parts whose keys `parts` see, and with parts that see theirs."""
        cut_parts = [part for part in parts if not part.is_whole]
        seen: list[Span] = []
        shown: list[Span] = []
        for branch, length in self.branches:
            window = self.tiling.window(branch)
            # Whoever a position sees in its window sees it in the mirrored one.
            ways = (length, length) if window is None else (window, Window(*reversed(window)))
            for found, way in zip((seen, shown), ways, strict=True):
                found += [x for part in cut_parts for x in spans(branch, part, way)]
        if not self.is_causal:
            return seen, shown
        return [x for x in seen if x.is_before], [x for x in shown if not x.is_before]

    def parts_of(self, rank: int) -> list[Part]:
        """The ranges that `rank` holds, cut at document borders."""
        return cut(self.layout.ranges[rank], self.documents, rank)

    @cached_property
    def returns_wide(self) -> bool:
        """Whether gradients of received rows are summed, and returned, in float32 at least.

        Else in the dtype of the inputs. It is alike on all ranks: a branch reaches one row in its
        rate, once from each part of the rank that received it and for each query head of a KV head.
        """
        parts = max(map(len, self.layout.ranges))  # of a document
        heads_per_kv = self.num_heads // self.num_kv_heads
        reached = sum(1 / branch.stride for branch in self.pattern.branches)
        return heads_per_kv * parts * reached > FEW_ADDITIONS

    @cached_property
    def tiling(self) -> Tiling:
        """The rows of each head, by branch; see `Tiling`."""
        return tiling_of(self.pattern, self.num_kv_heads, self.is_causal, self.kv_heads)

    @cached_property
    def gathers(self) -> bool:
        """Whether ``exchange="auto"`` chooses gather for this plan; False: ring.

        Gather is chosen where received keys and values take no more memory than the query and out
        of the largest shard, for fewer, larger kernel calls: in dense attention on two ranks, with
        grouped queries on a few. A bound decides, as all ranks are to decide alike: of a branch, a
        piece shares two segments with others at most, which hold the rest of the rows.
        """
        layout, pattern = self.layout, self.pattern
        pieces = max(map(len, layout.ranges))
        others = layout.length - min(map(layout.local_length, range(layout.world_size)))
        documents = [b - a for a, b in pairwise(self.documents)] or [1]
        longest, bound = max(documents), 0
        for branch, (length, rate) in enumerate(pattern.branches):
            if isinstance(length, Window):
                rows = pieces * sum(length)
            else:
                w = longest if length is None else min(length, longest)
                segments = min(2 * pieces, sum(-(-document // w) for document in documents))
                rows = segments * -(-w // rate)
            bound += min(rows, others) * len(pattern.heads(branch, self.num_kv_heads))
        return bound <= layout.max_local_length * self.num_heads

    def __str__(self) -> str:
        layout = self.layout
        return (
            f"{self.pattern} over {layout.length} positions on {layout.world_size} "
            f"rank{'s' * (layout.world_size != 1)}, {self.num_heads} heads, "
            f"{self.num_kv_heads} KV heads, {'causal' if self.is_causal else 'not causal'}, "
            f"{len(self.documents) - 1} document(s), {'gather' if self.gathers else 'ring'}"
        )


class Step(NamedTuple):
    """Step s of a rank: it works with the rows of rank ``(rank - s) mod p``.

    The keys of its tiles are slots of the received message.

    Attributes:
        step: s.
        receive: these rows; None: none are needed.
        send: rows that rank ``(rank + s) mod p`` needs; None: none.
        groups: the tiles.
        storing: how many groups, from the first on, read no slot that was read before: all of them,
            1 (the first reads every slot) or 0.
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
    """Tiles and messages of one rank; those of a step are worked out when it is asked for.

    Tiles and messages hold local rows. So two ranks whose parts lie alike relative to the segments
    that they share with this one exchange alike messages with it. Of thousands of steps few differ,
    and what is worked out for one step holds for all that are alike.

    Attributes:
        plan: the plan of all ranks.
        index: the rank.
        world_size: number of ranks.
        covers: whether the first group has every local row of every head as query and as key once.
            It then needs no result to add to.
    """

    FEW_ADDITIONS = FEW_ADDITIONS

    def __init__(self, plan: AttentionPlan, rank: int) -> None:
        self.plan = plan
        self.index = rank
        self.world_size = plan.layout.world_size
        self._steps: dict[int, Step] = {}
        self._known: dict[Hashable, Any] = {}
        self._parts = plan.parts_of(rank)
        # Where the keys of others lie that queries of this rank see, and queries that see its keys.
        self._seen, self._shown = plan.crossing_spans(self._parts)
        # Rows that belong to no document are in no tile.
        held = sum([part.stop - part.start for part in self._parts])
        self.covers = plan.covering is not None and held == plan.layout.local_length(rank)

    @property
    def is_alone(self) -> bool:
        """Whether no segment that this rank holds a part of is anywhere else: nor in another part.

        A rank may hold several ranges of positions, between which there are other positions.
        """
        return not (self._seen or self._shown)

    @property
    def held_rows(self) -> int:
        """(row, head) pairs of keys that this rank holds."""
        return self.plan.layout.local_length(self.index) * len(self.plan.kv_heads)

    @cached_property
    def own_tiles(self) -> OwnWork:
        """All work on own rows, branch by branch."""
        return self.own_work(lambda branch, runs: [False] * len(runs))

    @cached_property
    def local_groups(self) -> tuple[TileGroup, ...]:
        """Tiles whose queries and keys this rank holds: a group a branch, then those that cross."""
        return (*self.own_tiles.groups, *self.own_tiles.crossing)

    def own_work(self, by_rows: Callable[[int, OwnRuns], Sequence[bool]]) -> OwnWork:
        """The tiles of this rank's own rows, split by whether they are computed row by row.

        `by_rows`: of each run of a branch, whether it is.
        """
        tiling, links = self.plan.tiling, self._links(self.index, receives=True)
        groups: list[TileGroup] = []
        apart: list[Link] = []
        chosen: dict[int, FlaggedRows] = {}
        for branch, length in self._own_branches:
            runs = self._own_runs(length)
            if tiling.window(branch) is not None:
                if runs and (of_window := tiling.own_windows(branch, runs)):
                    groups.append(of_window)
                apart += [link for link in links if link.branch == branch]
                continue
            flags = by_rows(branch, runs)
            chosen[branch] = FlaggedRows(runs, flags)
            left: Sequence[OwnRun] = [*compress(runs, map(not_, flags))]
            between = [link for link in links if link.branch == branch]
            if between:
                left, between = join_runs(left, between, tiling.pattern.dilation_rates[branch])
            apart += between
            own = tiling.own_group(branch, left)
            groups.extend([own] if own else [])
        # The same objects for both directions, which kernels' tables are kept by.
        crossing = self._once(
            tuple(apart),
            lambda: tiling.groups(join_links(apart, tiling.pattern.dilation_rates), None),
        )
        ranges = tuple(own_ranges(self._parts, chosen))
        zero_keys = zero_key_groups(tiling, self._parts, chosen)
        return OwnWork(ranges, tuple(groups), crossing, zero_keys)

    def _own_runs(self, length: int | None) -> OwnRuns:
        return self._once(("runs", length), partial(own_runs, self._parts, length))

    def _once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        if key not in self._known:
            self._known[key] = make()
        found: _T = self._known[key]
        return found

    @property
    def _own_branches(self) -> list[tuple[int, int | None]]:
        """Number and segment length of each branch; length None: no document is longer."""
        longest = max([part.document_stop - part.document_start for part in self._parts], default=0)
        return [
            (branch, length if isinstance(length, int) and length < longest else None)
            for branch, length in self.plan.branches
        ]

    @cached_property
    def own_pairs(self) -> float:
        """About how many (query, key) pairs `own_work` computes, over all KV heads."""
        tiling, pairs = self.plan.tiling, 0.0
        for branch, length in self._own_branches:
            runs, rate = self._own_runs(length), tiling.pattern.dilation_rates[branch]
            if window := tiling.window(branch):
                low, high = (side // rate for side in window)
                pairs += len(tiling.heads[branch]) * sum(
                    copies * rate * band_pairs(size // rate, size // rate, -low, high)
                    for size, _, _, copies in runs
                )
                continue
            squares = runs.squares / rate**2
            seen = (squares + runs.rows / rate) / 2 if self.plan.is_causal else squares
            pairs += len(tiling.heads[branch]) * seen
        return pairs

    @property
    def local(self) -> tuple[Tile, ...]:
        """The tiles whose queries and keys this rank holds."""
        return _tiles(self.local_groups)

    @cached_property
    def zero_keys(self) -> tuple[TileGroup, ...]:
        """Number of zero keys that this rank's queries see; see `zero_key_groups`."""
        return self.own_tiles.zero_keys

    def rounds(self, *, gathers: bool) -> tuple[RankPlan, ...]:
        """The rank's parts of the plan to run one after the other: one, or some heads at a time.

        Args:
            gathers: whether all transfers are in flight at once; a ring is cut by heads.
        """
        if gathers or self.world_size == 1:
            return (self,)
        return tuple(plan.rank(self.index) for plan in self.plan.rounds)

    @cached_property
    def mean_additions(self) -> float:
        """A bound on how many tiles add to a row of a head, on average over rows and heads.

        A branch reaches one row in its rate; where it crosses ranks, each part that shares the
        segment adds once.
        """
        crossing = {span.branch for span in (*self._seen, *self._shown)}
        others = sum(map(len, self.plan.layout.ranges)) - 1  # of a document
        mean = 0.0
        for branch, each in enumerate(self.plan.pattern.branches):
            heads = len(self.plan.tiling.heads[branch]) / len(self.plan.kv_heads)
            mean += heads / each.stride * (1 + others * (branch in crossing))
        return mean

    def received_rows(self, sender: int) -> int:
        """Distinct (row, head) pairs that `sender`, another rank, sends this one."""
        message = self.step((self.index - sender) % self.world_size).receive
        return 0 if message is None else message.rows

    @cached_property
    def total_received_rows(self) -> int:
        """Distinct (row, head) pairs that this rank receives, over all peers."""
        return sum(step.receive.rows for step in self.steps() if step.receive is not None)

    @cached_property
    def total_sent_rows(self) -> int:
        """Distinct (row, head) pairs that this rank sends, over all peers."""
        return sum(step.send.rows for step in self.steps() if step.send is not None)

    def step(self, step: int) -> Step:
        """The messages and tiles of this rank at step 1 <= `step` < world size."""
        if step not in self._steps:
            sender, receiver = ((self.index + x) % self.world_size for x in (-step, step))
            received, groups, storing = self._arrival(sender)
            sent = self._departure(receiver)
            self._steps[step] = Step(
                step,
                None if received is None else replace(received, sender=sender),
                None if sent is None else replace(sent, receiver=receiver),
                groups,
                storing,
            )
        return self._steps[step]

    def _arrival(self, sender: int) -> tuple[Message | None, tuple[TileGroup, ...], int]:
        """A message like that from `sender`, the tiles that read it, and `Step.storing`."""
        tiling, links = self.plan.tiling, self._links(sender, receives=True)

        def make() -> tuple[Message | None, tuple[TileGroup, ...], int]:
            joined = join_links(links, tiling.pattern.dilation_rates)
            message, slots = tiling.message(sender, self.index, joined)
            groups = tiling.groups(joined, slots)
            return message, groups, _storing(message, groups)

        return self._once(("from", *self._places(links)), make)

    def _departure(self, receiver: int) -> Message | None:
        """A message like that to `receiver`."""
        tiling, links = self.plan.tiling, self._links(receiver, receives=False)

        def make() -> Message | None:
            joined = join_links(links, tiling.pattern.dilation_rates)
            return tiling.message(self.index, receiver, joined)[0]

        return self._once(("to", *self._places(links)), make)

    def _links(self, other: int, *, receives: bool) -> list[Link]:
        """Links of keys of `other` to this rank's queries, or if it sends of own keys to others'.

        A span is a segment that a part of this rank (``span.part``) shares with other parts.
        """
        spans = self._seen if receives else self._shown
        parts = self.plan.parts_of(other) if spans else ()
        found = []
        for span in spans:
            window = self.plan.tiling.window(span.branch)
            for part in filter(span.reaches, parts):
                keys, queries = (part, span.part) if receives else (span.part, part)
                if window is None:
                    found.append(Link(span.branch, keys, queries, span.start, span.stop))
                else:
                    rate = self.plan.pattern.dilation_rates[span.branch]
                    found += window_links(span.branch, keys, queries, window, rate)
        return found

    def _places(self, links: Sequence[Link]) -> list[Hashable]:
        """Key of links whose messages and tiles are alike: how their parts lie in local rows."""
        rates = self.plan.pattern.dilation_rates
        starts = sorted({link.keys.start for link in links})  # messages go by positions
        found: list[Hashable] = []
        for branch, keys, queries, start, stop, window, _ in links:
            found += branch, start, starts.index(keys.start), queries.local
            if window is not None:  # tiles depend on how far apart the parts are
                found.append(keys.start - queries.start)
            for part in (keys, queries):
                low = max(part.start, start)
                size, phase = min(part.stop, stop) - low, (start - low) % rates[branch]
                found += part.local_row(low), size, phase
        return found

    def steps(self) -> Iterator[Step]:
        """Every step in order; most exchange nothing when segments are shorter than shards."""
        return map(self.step, range(1, self.world_size))

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs this rank computes, over all query heads, per batch entry."""
        tiles = [*self.local, *(tile for step in self.steps() for tile in step.tiles)]
        return sum(t.pairs for t in tiles) * (self.plan.num_heads // self.plan.num_kv_heads)


def _storing(message: Message | None, groups: Sequence[TileGroup]) -> int:
    """See `Step.storing`."""
    if message is None:
        return 0
    read = [sum(len(x.heads) * x.keys.length for x in group.tiles) for group in groups]
    return len(read) if sum(read) == message.slots else int(read[0] == message.slots)


def _tiles(groups: Sequence[TileGroup]) -> tuple[Tile, ...]:
    return tuple(tile for group in groups for tile in group.tiles)


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
