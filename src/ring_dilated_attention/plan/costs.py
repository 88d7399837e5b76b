"""The costs of a plan: bytes exchanged, bytes held, operations; and seconds, by a model.

Seconds (`predict`) are those of a rank's program. Other ranks are taken to be as fast as this one,
and the rates are arguments.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise

from ..layout import SequenceLayout
from ..pattern import Window, band_pairs
from .attention import AttentionPlan, RankPlan
from .heads import head_split
from .program import lower
from .rows import TensorSize as TensorSize  # which goes with every function here
from .rows import TileGroup


@dataclass(frozen=True)
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
        largest_rank: the rank with the most operations, the first of several.
        imbalance: its operations over the mean of all ranks; 1.0 is even, p is all on one rank.
    """

    largest_rank: int
    imbalance: float


def traffic(rank: RankPlan, size: TensorSize) -> Traffic:
    """Bytes that a rank exchanges: K and V of each needed row; in backward its gradients too."""
    sent, received = rank.total_sent_rows, rank.total_received_rows
    element_size = size.accumulate_size if rank.plan.returns_wide else size.element_size
    rows, gradients = size.key_value_bytes, partial(size.key_value_bytes, element_size=element_size)
    # Not from the programs, which are long where there are thousands of ranks.
    return Traffic(
        forward_sent=rows(sent),
        forward_received=rows(received),
        backward_sent=rows(sent) + gradients(received),
        backward_received=rows(received) + gradients(sent),
    )


def memory(rank: RankPlan, size: TensorSize, *, gathers: bool | None = None) -> Memory:
    """Bytes that a rank holds in forward; `gathers` None: what the plan decides."""
    plan = rank.plan
    local = plan.layout.local_length(rank.index) * size.batch
    queries = local * plan.num_heads * size.head_dim * size.element_size
    keys = local * plan.num_kv_heads * size.head_dim * size.element_size
    held = most = 0
    gathers = plan.gathers if gathers is None else gathers
    for action in lower(rank, gathers=gathers, backward=False):
        held += action.nbytes(size)[1]
        most = max(most, held)
        if action.kind == "tiles" and action.step is not None and action.step.receive is not None:
            held -= size.key_value_bytes(action.step.receive.rows)
    return Memory(
        query=queries,
        key=keys,
        value=keys,
        out=queries,
        lse=local * plan.num_heads * size.accumulate_size,
        buffers=most,
    )


def flops(rank: RankPlan, size: TensorSize) -> int:
    """Useful floating-point operations of a forward call; a backward call takes 2.5 times these."""
    return 4 * size.batch * size.head_dim * rank.pairs


def flops_by_rank(plan: AttentionPlan, size: TensorSize) -> list[int]:
    """`flops` of every rank, counted without planning them: quick for thousands of ranks.

    How many keys a query sees is a matter of the pattern, whoever holds them.
    """
    offsets = [Counter(offset for _, offset in heads) for heads in plan.tiling.heads]
    borders, pairs = plan.documents, partial(_pairs_in_document, plan, offsets)
    whole = [*accumulate((pairs(b - a, b - a) for a, b in pairwise(borders)), initial=0)]

    @cache
    def before(position: int) -> int:
        position = min(position, borders[-1])  # behind them are positions of no document
        document = bisect_right(borders, position) - 1
        if (queries := position - borders[document]) == 0:
            return whole[document]
        return whole[document] + pairs(borders[document + 1] - borders[document], queries)

    per_pair = 4 * size.batch * size.head_dim * (plan.num_heads // plan.num_kv_heads)
    ranks = plan.layout.ranges
    return [per_pair * sum(before(b) - before(a) for a, b in ranges) for ranges in ranks]


def balance(flops: Sequence[int]) -> Balance:
    """How evenly `flops`, one figure per rank, are dealt; even if they are all 0."""
    largest = max(flops)
    return Balance(
        largest_rank=flops.index(largest),
        imbalance=largest * len(flops) / sum(flops) if largest else 1.0,
    )


def _pairs_in_document(
    plan: AttentionPlan, offsets: Sequence[Counter[int]], length: int, queries: int
) -> int:
    """(query, key) pairs of a document's first queries, over all KV heads."""
    pairs = 0
    for branch, counts in enumerate(offsets):
        segment_length, rate = plan.pattern.branches[branch]
        if window := plan.tiling.window(branch):
            low, high = (side // rate for side in window)
            for first in range(min(rate, queries)):
                own, every = (len(range(first, each, rate)) for each in (queries, length))
                pairs += counts.total() * band_pairs(own, every, -low, high)
            continue
        assert not isinstance(segment_length, Window)
        w = length if segment_length is None else min(segment_length, length)
        if not w:
            continue
        full, rest = divmod(queries, w)  # full segments, and queries of the one after them
        last = min(w, length - full * w)
        for offset, heads in counts.items():
            for count, rows, of in ((full, w, w), (1, rest, last)):
                q, k = len(range(offset, rows, rate)), len(range(offset, of, rate))
                pairs += heads * count * (q * (q + 1) // 2 if plan.is_causal else q * k)
    return pairs


def enumerated(plan: AttentionPlan) -> int:
    """Bound on the things that `check_plan` looks at; its time and memory grow with it.

    They are (branch, KV head, query, key) quadruples, the positions of every branch and KV head,
    and the steps of every rank.
    """
    size = TensorSize(batch=1, head_dim=1, element_size=1)
    pairs = sum(flops_by_rank(plan, size)) // (4 * (plan.num_heads // plan.num_kv_heads))
    rows = plan.layout.length * len(plan.pattern.branches) * plan.num_kv_heads
    return pairs + rows + plan.layout.world_size**2


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
    """Rates of the cost model, by which a plan takes seconds.

    Attributes:
        forward: of compute.
        backward: of compute; it has 2.5 times the operations.
        inside: between ranks of one host.
        across: between ranks of different hosts.
        beside_transfers: how many times as long compute takes in calls in which rows travel.
        host_call: seconds that the host takes for a call without steps, in each direction.
        host_empty_step: seconds that the host takes for a step without rows.
        host_message: seconds that the host takes to start a message of an all-to-all.
    """

    forward: ComputeRates
    backward: ComputeRates
    inside: Link
    across: Link
    beside_transfers: float
    host_call: float
    host_empty_step: float
    host_message: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A call of one rank, in one direction.

    Attributes:
        seconds: until it is done.
        compute: seconds of compute.
        exposed: seconds that compute waits for rows.
        host: seconds that the host takes; where that is more than the device needs, it decides.
        steps: steps in which rows are received.
        inside_bytes: rows received from ranks of the own host.
        across_bytes: rows received from other hosts.
    """

    seconds: float
    compute: float
    exposed: float
    host: float
    steps: int
    inside_bytes: int
    across_bytes: int


def predict(
    rank: RankPlan,
    size: TensorSize,
    rates: Rates,
    *,
    backward: bool,
    hosts: int = 1,
    exchange: str = "auto",
) -> Prediction:
    """Predict forward, or backward alone, of one rank: run its program by the clock of the rates.

    Messages that are received on one link come one after the other.

    Args:
        rank: which rank of which plan.
        size: what turns rows into bytes and pairs into operations.
        rates: how fast ranks compute, and how fast rows travel.
        backward: which direction.
        hosts: how many hosts, on which the ranks are numbered one after the other. A rank receives
            all rows of other hosts across the network, also those that its neighbours receive too.
        exchange: as in `dilated_attention`, but ``"auto"`` is a ring or gather.
    """
    per_host, plan = rank.world_size // hosts, rank.plan
    split = head_split(exchange, plan.pattern, plan.layout, plan.num_heads, plan.num_kv_heads)
    if split is not None:
        link = rates.inside if per_host % split.ranks == 0 else rates.across
        swap = split.traffic(rank.index, size)[backward] / link.bytes_per_second + 2 * link.latency
        groups = rank.world_size // split.ranks
        own, hosts = split.plan_of(plan, rank.index), hosts if groups % hosts == 0 else groups
        found = predict(own, size, rates, backward=backward, hosts=hosts)
        # Each all-to-all packs, sends and unpacks: inputs, out and lse; or dout, and gradients.
        starts = split.messages(rank.index) * rates.host_message + rates.host_call / 2
        host = found.host + (2 if backward else 3) * starts
        seconds = max(found.seconds + swap, host)
        return replace(found, seconds=seconds, exposed=found.exposed + swap, host=host)
    gathers = plan.gathers if exchange == "auto" else exchange == "gather"
    program = lower(rank, gathers=gathers, backward=backward)
    compute_rates = rates.backward if backward else rates.forward
    slower = rates.beside_transfers if any(x.receives for x in program) else 1.0
    per_pair = 4 * size.batch * size.head_dim * (2.5 if backward else 1) / compute_rates.flops
    per_pair *= plan.num_heads // plan.num_kv_heads
    known: dict[int, tuple[float, object]] = {}  # by the identity of groups, kept here

    def seconds_of(groups: tuple[TileGroup, ...]) -> float:
        if id(groups) not in known:
            found = len(groups) * compute_rates.group_seconds
            for tile in (tile for group in groups for tile in group.tiles):
                keys = tile.pairs / (tile.segments * len(tile.heads) * tile.queries.length)
                found += tile.pairs * per_pair * (1 + compute_rates.half_keys / keys)
            known[id(groups)] = found * slower, groups
        return known[id(groups)][0]

    now = compute = 0.0
    received, free, rows_from = [0, 0], [0.0, 0.0], 0  # of the two links: inside, and across
    arrivals: dict[str, deque[float]] = {"wait": deque(), "add": deque()}
    for action in program:
        if action.kind in ("fetch", "return"):
            arrival = now
            if action.receives is not None:
                across = action.receives[0] // per_host != rank.index // per_host
                link, nbytes = (rates.inside, rates.across)[across], action.nbytes(size)[1]
                free[across] = max(now, free[across]) + nbytes / link.bytes_per_second
                arrival = free[across] + link.latency
                if action.kind == "fetch":
                    received[across] += nbytes
                    rows_from += 1
            arrivals["wait" if action.kind == "fetch" else "add"].append(arrival)
        elif action.kind in arrivals:
            # Gradients that are added behind tiles are waited for at the end of these.
            arrival = arrivals[action.kind].popleft()
            now = now if action.kind == "add" and action.behind else max(now, arrival)
        elif action.kind == "tiles":
            seconds = seconds_of(action.groups)
            now, compute = now + seconds, compute + seconds
    empty = rank.world_size - 1 - rows_from
    host = rates.host_call + rows_from * compute_rates.host_step
    host += max(empty, 0) * rates.host_empty_step
    return Prediction(
        seconds=max(now, host),
        compute=compute,
        exposed=now - compute,
        host=host,
        steps=rows_from,
        inside_bytes=received[0],
        across_bytes=received[1],
    )


def efficiency(plan: AttentionPlan, size: TensorSize, rates: Rates, seconds: float) -> float:
    """A rank's share of the speed of one rank that has only a sequence as long as a shard.

    Useful operations per second of a rank in a call of `plan`, whose forward and backward take
    `seconds`, over those of that rank.
    """
    length = plan.layout.max_local_length
    layout = SequenceLayout.contiguous(length, 1)
    alone = replace(plan, layout=layout, documents=(0, length)).rank(0)
    one = sum(predict(alone, size, rates, backward=way).seconds for way in (False, True))
    work = sum(flops_by_rank(plan, size)) / plan.layout.world_size
    return work / seconds / (flops(alone, size) / one)
