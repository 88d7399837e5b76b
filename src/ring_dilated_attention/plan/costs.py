"""What a plan costs: bytes exchanged, bytes held, operations; and seconds, by a model.

Seconds (`predict`): a rank computes its own tiles, then those of each step once their rows have
arrived. In a ring the rows of the next step travel meanwhile, in a gather those of all steps. Other
ranks are taken to be as fast as this one, and the rates are arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

from ..layout import SequenceLayout
from ..pattern import DilatedPattern
from .attention import AttentionPlan, RankPlan, Step
from .cache import CachedBranch, CachePlan, plan_cache
from .rows import Message, TileGroup


@dataclass(frozen=True, kw_only=True)
class TensorSize:
    """What turns rows into bytes.

    Attributes:
        batch: sequences in the batch.
        head_dim: elements of a row of one head.
        element_size: bytes of an element of query, key and value (8, 4 or 2).
    """

    batch: int
    head_dim: int
    element_size: int

    @property
    def accumulate_size(self) -> int:
        """Bytes of an element of lse: float32, or float64."""
        return max(self.element_size, 4)

    def key_value_bytes(self, rows: int, element_size: int | None = None) -> int:
        """Bytes of K and V of `rows` (row, head) pairs."""
        size = self.element_size if element_size is None else element_size
        return 2 * self.batch * rows * self.head_dim * size


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that one rank exchanges in one call. The lower bound: each needed row once."""

    forward_sent: int
    forward_received: int
    backward_sent: int
    backward_received: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that one rank holds in one forward call, by what they are.

    `buffers` are the received rows: all of them with gather, at most two messages with ring.
    """

    query: int
    key: int
    value: int
    out: int
    lse: int
    buffers: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.query + self.key + self.value + self.out + self.lse + self.buffers


@dataclass(frozen=True, kw_only=True)
class Balance:
    """How evenly the operations of a call are dealt to the ranks.

    Attributes:
        world_size: number of ranks.
        largest_rank: the rank with the most operations, the first of several.
        imbalance: its operations over the mean of all ranks; 1.0 is even, p is all on one rank.
    """

    world_size: int
    largest_rank: int
    imbalance: float

    @property
    def speed_up_bound(self) -> float:
        """How many times as fast as one rank all can be at most: p / imbalance."""
        return self.world_size / self.imbalance


def returned_bytes(rank: RankPlan, size: TensorSize, rows: int) -> int:
    """Bytes of the returned gradients of K and V of `rows` (row, head) pairs."""
    element_size = size.accumulate_size if rank.plan.returns_wide else size.element_size
    return size.key_value_bytes(rows, element_size)


def traffic(rank: RankPlan, size: TensorSize) -> Traffic:
    """Bytes that a rank exchanges: K and V of each needed row; in backward its gradients too."""
    sent = size.key_value_bytes(rank.total_sent_rows)
    received = size.key_value_bytes(rank.total_received_rows)
    return Traffic(
        forward_sent=sent,
        forward_received=received,
        backward_sent=sent + returned_bytes(rank, size, rank.total_received_rows),
        backward_received=received + returned_bytes(rank, size, rank.total_sent_rows),
    )


def sent_bytes(rank: RankPlan, size: TensorSize, *, backward: bool) -> int:
    """Bytes that a rank sends in a call, forward or forward and backward.

    Args:
        rank: the rank.
        size: of its tensors.
        backward: whether the call has a backward.
    """
    found = traffic(rank, size)
    return found.forward_sent + found.backward_sent * backward


def memory(rank: RankPlan, size: TensorSize, *, gathers: bool | None = None) -> Memory:
    """Bytes that a rank holds in forward; `gathers` None: what the plan decides."""
    plan = rank.plan
    local = plan.layout.local_length(rank.index) * size.batch
    queries = local * plan.num_heads * size.head_dim * size.element_size
    keys = local * plan.num_kv_heads * size.head_dim * size.element_size
    world_size = plan.layout.world_size
    if plan.gathers if gathers is None else gathers:
        rows = rank.total_received_rows
    else:
        by_step = [
            one.received_rows((rank.index - s) % world_size, piece)
            for one in rank.rounds(gathers=False)
            for piece in range(one.plan.pieces)
            for s in range(1, world_size)
        ]
        rows = max((a + b for a, b in pairwise([*by_step, 0])), default=0)
    return Memory(
        query=queries,
        key=keys,
        value=keys,
        out=queries,
        lse=local * plan.num_heads * size.accumulate_size,
        buffers=size.key_value_bytes(rows),
    )


def flops(rank: RankPlan, size: TensorSize) -> int:
    """Useful floating-point operations of a forward call; a backward call takes 2.5 times these."""
    return 4 * size.batch * size.head_dim * rank.pairs


def flops_of_rank(plan: AttentionPlan, size: TensorSize, rank: int) -> int:
    """`flops` of one rank, counted without planning it.

    How many keys a query sees is a matter of the pattern, whoever holds them.
    """
    return _flops_of_ranges(plan, size, plan.layout.ranges[rank], partial(_pairs_before, plan))


def flops_by_rank(plan: AttentionPlan, size: TensorSize) -> list[int]:
    """`flops_of_rank` of every rank: quick for thousands of ranks."""
    pairs_before = cache(partial(_pairs_before, plan))
    return [_flops_of_ranges(plan, size, ranges, pairs_before) for ranges in plan.layout.ranges]


def _flops_of_ranges(
    plan: AttentionPlan,
    size: TensorSize,
    ranges: Sequence[tuple[int, int]],
    pairs_before: Callable[[int], int],
) -> int:
    pairs = sum(pairs_before(stop) - pairs_before(start) for start, stop in ranges)
    return 4 * size.batch * size.head_dim * (plan.num_heads // plan.num_kv_heads) * pairs


def balance(flops: Sequence[int]) -> Balance:
    """How evenly `flops`, one figure per rank, are dealt; even if they are all 0."""
    largest = max(flops)
    return Balance(
        world_size=len(flops),
        largest_rank=flops.index(largest),
        imbalance=largest * len(flops) / sum(flops) if largest else 1.0,
    )


def step_imbalance(plan: AttentionPlan) -> float:
    """How long a ring takes in which all ranks meet at every step, over the mean of all ranks.

    1.0 is even. Ranks do not meet, but one that computes longer at a step sends its next rows
    later. Forward, of the heads that are run first: others are like them.
    """
    ranks = list(map(plan.rounds[0].rank, range(plan.layout.world_size)))
    steps = [
        [sum(tile.pairs for tile in rank.local) for rank in ranks],
        *(
            [sum(tile.pairs for tile in step.tiles) for step in together]
            for together in zip(*(rank.steps() for rank in ranks), strict=True)
        ),
    ]
    total = sum(map(sum, steps))
    return sum(map(max, steps)) * len(ranks) / total if total else 1.0


def _pairs_before(plan: AttentionPlan, position: int) -> int:
    """(query, key) pairs of the queries before `position`, over all KV heads."""
    pairs = 0
    for start, stop in pairwise(plan.documents):
        if start >= position:
            break
        length, queries = stop - start, min(position, stop) - start
        for branch, (segment_length, rate) in enumerate(plan.pattern.branches):
            w = length if segment_length is None else min(segment_length, length)
            full, rest = divmod(queries, w)  # full segments, and queries of the one after them
            last = min(w, length - full * w)
            for offset, heads in Counter(o for _, o in plan.tiling.heads[branch]).items():
                for count, rows, of in ((full, w, w), (1, rest, last)):
                    q, k = len(range(offset, rows, rate)), len(range(offset, of, rate))
                    pairs += heads * count * (q * (q + 1) // 2 if plan.is_causal else q * k)
    return pairs


def enumerated(plan: AttentionPlan) -> int:
    """How many things `check_plan` looks at, about: what its time and memory grow with.

    They are (branch, KV head, query, key) quadruples, positions, the segments of every KV head,
    and the steps of every rank.
    """
    segments = sum(
        -(-(stop - start) // min(length or stop - start, stop - start))
        for start, stop in pairwise(plan.documents)
        for length, _ in plan.pattern.branches
    )
    steps = plan.layout.world_size**2 * plan.pieces
    return _num_quadruples(plan) + plan.layout.length + segments * plan.num_kv_heads + steps


def proof_steps(plan: AttentionPlan) -> int:
    """How many quadruples `check_plan` goes through: the plan's, and the pattern's."""
    return 2 * _num_quadruples(plan)


def _num_quadruples(plan: AttentionPlan) -> int:
    size = TensorSize(batch=1, head_dim=1, element_size=1)
    return sum(flops_by_rank(plan, size)) // (4 * (plan.num_heads // plan.num_kv_heads))


@dataclass(frozen=True, kw_only=True)
class ComputeRates:
    """How fast a rank computes in one direction.

    Attributes:
        flops: operations per second of long tiles.
        half_keys: keys per query with which a tile runs at half of `flops`.
        group_seconds: that a group of tiles takes besides: launches, and multiprocessors that are
            idle at its end.
        host_step: seconds that the host takes for a step with rows.
    """

    flops: float
    half_keys: float
    group_seconds: float
    host_step: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between ranks.

    Attributes:
        bytes_per_second: that a rank sends, and as many that it receives at the same time.
        latency: seconds from the start of a message to its first byte.
    """

    bytes_per_second: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What turns a plan into seconds.

    Attributes:
        forward: of compute.
        backward: of compute; it has 2.5 times the operations.
        inside: between ranks of one host.
        across: between ranks of different hosts.
        beside_transfers: how many times as long compute takes in calls in which rows travel.
        host_call: seconds that the host takes for a call without steps, in each direction.
        host_empty_step: seconds that the host takes for a step without rows.
    """

    forward: ComputeRates
    backward: ComputeRates
    inside: Link
    across: Link
    beside_transfers: float
    host_call: float
    host_empty_step: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A call of one rank, in one direction.

    Attributes:
        seconds: until it is done.
        compute: seconds of compute.
        exposed: seconds that compute waits for rows: `device` less `compute`.
        host: seconds that the host takes; where that is more than the device needs, it decides.
        steps: steps in which rows are received.
        inside_bytes: received from ranks of the own host.
        across_bytes: received from other hosts.
    """

    seconds: float
    compute: float
    exposed: float
    host: float
    steps: int
    inside_bytes: int
    across_bytes: int

    @property
    def device(self) -> float:
        """Seconds that the device takes, waits included."""
        return self.compute + self.exposed

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step with rows and of the compute of own rows."""
        return self.seconds / (self.steps + 1)


class _Section(NamedTuple):
    """Own tiles, or a step: seconds of compute; bytes that arrive before it, and return after."""

    compute: float
    inside: int
    across: int
    home_inside: int
    home_across: int
    is_own: bool

    @property
    def fetched(self) -> int:
        """Bytes of rows that it waits for."""
        return self.inside + self.across


def host_of_ranks(hosts: int, ranks_per_host: int) -> tuple[int, ...]:
    """The host of each rank, where ranks are numbered host by host."""
    return tuple(rank // ranks_per_host for rank in range(hosts * ranks_per_host))


def predict(
    rank: RankPlan,
    size: TensorSize,
    rates: Rates,
    *,
    backward: bool,
    hosts: Sequence[int] | None = None,
    gathers: bool | None = None,
) -> Prediction:
    """Predict forward, or backward alone, of one rank.

    Args:
        rank: which rank of which plan.
        size: what turns rows into bytes and pairs into operations.
        rates: how fast ranks compute, and how fast rows travel.
        backward: which direction.
        hosts: host of each rank; None: all are on one. A rank receives all rows of other hosts
            across the network, also those that its neighbours receive too.
        gathers: whether all rows travel at once; None: what the plan decides.
    """
    gathers = rank.plan.gathers if gathers is None else gathers
    model = _Model(rank, size, rates, backward, hosts)
    sections = list(model.sections(gathers))
    fetched = [section for section in sections if section.fetched]
    if fetched:
        slower = rates.beside_transfers
        sections = [s._replace(compute=s.compute * slower) for s in sections]
    compute = sum(section.compute for section in sections)
    device = max(model.device_seconds(sections, gathers), compute)
    empty = sum(not section.fetched for section in sections if not section.is_own)
    host_step = model.compute_rates.host_step
    host = rates.host_call + len(fetched) * host_step + empty * rates.host_empty_step
    return Prediction(
        seconds=max(device, host),
        compute=compute,
        exposed=device - compute,
        host=host,
        steps=len(fetched),
        inside_bytes=sum(section.inside for section in fetched),
        across_bytes=sum(section.across for section in fetched),
    )


class _Model:
    """What `predict` is told, and what follows from it."""

    def __init__(
        self,
        rank: RankPlan,
        size: TensorSize,
        rates: Rates,
        backward: bool,
        hosts: Sequence[int] | None,
    ) -> None:
        self._rank, self._size, self._rates, self._backward = rank, size, rates, backward
        self._hosts = [0] * rank.world_size if hosts is None else hosts
        self.compute_rates = rates.backward if backward else rates.forward
        plan = rank.plan
        heads_per_kv = plan.num_heads // plan.num_kv_heads
        self._per_pair = 4 * size.batch * size.head_dim * heads_per_kv * (2.5 if backward else 1)
        self._known: dict[int, float] = {}  # by the identity of groups, which plans keep

    def sections(self, gathers: bool) -> Iterator[_Section]:
        """What the rank does, in order."""
        for one in self._rank.rounds(gathers=gathers):
            yield _Section(self._seconds(one.local_groups), 0, 0, 0, 0, is_own=True)
            for step in one.steps() if self._rank.world_size > 1 else ():
                yield self._step(step)

    def _step(self, step: Step) -> _Section:
        inside, across = self._split(step.receive, self._size.key_value_bytes)
        home = (0, 0)
        if self._backward:
            home = self._split(step.receive, self._returned)
        return _Section(self._seconds(step.groups), inside, across, *home, is_own=False)

    def _returned(self, rows: int) -> int:
        return returned_bytes(self._rank, self._size, rows)

    def _split(self, message: Message | None, nbytes: Callable[[int], int]) -> tuple[int, int]:
        """Bytes of a message that travel inside the host, and those that come from outside."""
        if message is None:
            return 0, 0
        total = nbytes(message.rows)
        if self._hosts[message.sender] == self._hosts[self._rank.index]:
            return total, 0
        return 0, total

    def _seconds(self, groups: tuple[TileGroup, ...]) -> float:
        """How long these groups take to compute."""
        if id(groups) not in self._known:
            rates = self.compute_rates
            seconds = len(groups) * rates.group_seconds
            for tile in (tile for group in groups for tile in group.tiles):
                keys = (tile.keys.length + 1) / 2 if tile.is_causal else tile.keys.length
                seconds += tile.pairs * self._per_pair / rates.flops * (1 + rates.half_keys / keys)
            self._known[id(groups)] = seconds
        return self._known[id(groups)]

    def _travel(self, inside: int, across: int) -> float:
        """Seconds until bytes have arrived that travel at once, inside and from outside."""
        links = ((inside, self._rates.inside), (across, self._rates.across))
        return max(x.latency + nbytes / x.bytes_per_second if nbytes else 0 for nbytes, x in links)

    def device_seconds(self, sections: Sequence[_Section], gathers: bool) -> float:
        """Seconds from the start until all is computed, and all gradients are at home."""
        now = asked = 0.0  # asked: when the rows of the next step could start
        inside = across = 0
        returned = (0, 0)
        for section in sections:
            if section.fetched and gathers:
                inside, across = inside + section.inside, across + section.across
                now = max(now, self._travel(inside, across))
            elif section.fetched:
                # Gradients of the step before are on their way together with the next rows.
                more = section.inside + returned[0], section.across + returned[1]
                now = asked = max(now, asked + self._travel(*more))
                returned = section.home_inside, section.home_across
            now += section.compute
        if gathers:
            returned = sum(x.home_inside for x in sections), sum(x.home_across for x in sections)
        # Half of the own tiles, of one round, is computed while the last gradients return.
        late = sections[0].compute / 2 if self._backward else 0.0
        return now + max(0.0, self._travel(*returned) - late)


def efficiency(plan: AttentionPlan, size: TensorSize, rates: Rates, seconds: float) -> float:
    """A rank's share of the speed of one rank that has only a sequence as long as a shard.

    Useful operations per second, forward and backward together, of a rank in a call of `plan` over
    those of that rank.

    Args:
        plan: of all ranks.
        size: what turns rows into bytes and pairs into operations.
        rates: how fast ranks compute.
        seconds: that forward and backward of `plan` take.
    """
    length = plan.layout.max_local_length
    layout = SequenceLayout.contiguous(length, 1)
    alone = replace(plan, layout=layout, documents=(0, length)).rank(0)
    one = sum(predict(alone, size, rates, backward=way).seconds for way in (False, True))
    work = sum(flops_by_rank(plan, size)) / plan.layout.world_size
    return work / seconds / (flops(alone, size) / one)


@dataclass(frozen=True, kw_only=True)
class BranchUse:
    """What a cache has of one branch after a text of some length.

    Attributes:
        index: of the branch in the pattern.
        heads: how many KV heads run the branch.
        kept: rows that a later position can still be shown, of all these heads.
        steps: over how many of the newest positions `shown` is counted: a segment, if the branch
            has ended one; else as many as the dilation rate.
        shown: rows that the queries of these positions are shown, of all these heads; the query's
            own row is one of them.
    """

    index: int
    heads: int
    kept: int
    steps: int
    shown: int

    @property
    def mean_kept(self) -> float:
        """Rows that a later position can still be shown, of a head on average."""
        return self.kept / max(self.heads, 1)

    @property
    def mean_shown(self) -> float:
        """Rows that a query of a head is shown, averaged over heads and positions."""
        return self.shown / (max(self.heads, 1) * self.steps)


def plan_any_length(pattern: DilatedPattern, num_kv_heads: int, length: int) -> CachePlan:
    """A cache whose text goes on beyond `length` positions, and beyond every segment that ends.

    Of a text that ends with the first segment of a branch, no row is ever dropped.

    Args:
        pattern: which keys each head sees.
        num_kv_heads: key and value heads, at least one.
        length: positions so far.
    """
    ends = [segment for segment in pattern.segment_lengths if segment is not None]
    return plan_cache(pattern, num_kv_heads, max([length, *ends]) + 1)


def cache_use(pattern: DilatedPattern, num_kv_heads: int, length: int) -> list[BranchUse]:
    """What each branch keeps after `length` positions, and what a step reads.

    Args:
        pattern: which keys each head sees.
        num_kv_heads: key and value heads, at least one.
        length: positions so far, at least 1.
    """
    plan = plan_any_length(pattern, num_kv_heads, length)
    planned = {branch.index: branch for branch in plan.branches}
    return [
        _use(pattern, num_kv_heads, length, index, planned.get(index))
        for index in range(len(pattern.branches))
    ]


def _use(
    pattern: DilatedPattern,
    num_kv_heads: int,
    length: int,
    index: int,
    planned: CachedBranch | None,
) -> BranchUse:
    """Of one branch; `planned` None: no head of it sees anything."""
    segment, rate = pattern.branches[index]
    has_ended = segment is not None and segment <= length
    steps = segment if has_ended and segment is not None else min(rate, length)
    kept = shown = 0
    for _, offset in planned.heads if planned else ():
        assert planned
        before = planned.members_before(offset, length)
        new = before - planned.members_before(offset, length - steps)
        kept += len(planned.kept(offset, length))
        # Of a whole segment the members are shown 1, 2, ... rows. In the first segment, as many
        # positions as the rate have one member at most, the newest.
        shown += new * (new + 1) // 2 if has_ended else new * before
    heads = len(pattern.heads(index, num_kv_heads))
    return BranchUse(index=index, heads=heads, kept=kept, steps=steps, shown=shown)
