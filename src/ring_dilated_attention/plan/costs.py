"""What a plan costs a rank: bytes exchanged, bytes held, operations. Integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

from .attention import AttentionPlan
from .rank import RankPlan


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
