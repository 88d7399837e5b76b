"""What a benchmark of several ranks found: plain numbers, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .case import Case
from .peers import OURS
from .result import OK, Errors
from .ring_peers import MESSAGES


@dataclass(frozen=True, kw_only=True)
class Communication:
    """What a rank's call sends, and how long its compute waits: of one call.

    Attributes:
        exposed_ms: time that compute waits for rows of other ranks, by rank. Among ranks with equal
            work the one that waits least is the slowest: what others wait more, they wait for it.
        shares: these over the time of the call.
        agreement_ms: time in which ranks compare their arguments while the device has nothing to
            do; of the rank that takes longest.
        sent_bytes: bytes sent, by rank.
        planned_bytes: bytes that the plan says are sent, by rank.
        bytes_match: whether these are equal.
    """

    exposed_ms: tuple[float, ...]
    shares: tuple[float, ...]
    agreement_ms: float
    sent_bytes: tuple[int, ...]
    planned_bytes: tuple[int, ...]
    bytes_match: bool


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes that one rank holds during a call: the rank that holds most.

    Attributes:
        rank: which one.
        query: bytes of its shard of query.
        key: bytes of its shard of key.
        value: bytes of its shard of value.
        dout: the gradient of out, with backward; else 0.
        out: the result.
        lse: of ours, as planned; None: not known.
        buffers: rows received in forward, of ours, as planned; None: not known.
        gradients: of query, key and value, with backward; else 0.
        peak: most bytes allocated above what was before the call; None: not known (CPU).
        outbox: what copies between GPUs take all the time, of which torch's allocator knows
            nothing: not in `peak`; of ours; None: not known.
    """

    rank: int
    query: int
    key: int
    value: int
    dout: int
    out: int
    lse: int | None
    buffers: int | None
    gradients: int
    peak: int | None
    outbox: int | None

    @property
    def inputs(self) -> int:
        """Bytes that are there before the call: query, key, value and dout."""
        return self.query + self.key + self.value + self.dout

    @property
    def expected(self) -> int:
        """Bytes that are known to be made by the call."""
        return self.out + (self.lse or 0) + (self.buffers or 0) + self.gradients

    @property
    def temporaries(self) -> int | None:
        """What is left of the peak; below 0 where not all that is expected is held at one time."""
        return None if self.peak is None else self.peak - self.expected

    @property
    def total(self) -> int | None:
        """Inputs and peak."""
        return None if self.peak is None else self.inputs + self.peak


@dataclass(frozen=True, kw_only=True)
class RanksTiming:
    """How long a call took on several ranks.

    Attributes:
        flops_by_rank: useful operations of the call.
        calls: back-to-back calls of a sample.
        times_ms: time of one call in every sample, on the rank that took longest.
        matmul_tflops: rate of the matrix product that took turns with the calls, by rank: how much
            slower one GPU is than another.
        matmul_size: its side.
        memory: of the rank that holds most.
        communication: of ours on several ranks; None: not measured.
    """

    flops_by_rank: tuple[int, ...]
    calls: int
    times_ms: tuple[float, ...]
    matmul_tflops: tuple[float, ...]
    matmul_size: int
    memory: RankMemory
    communication: Communication | None = None

    @property
    def median_ms(self) -> float:
        """Median of `times_ms`."""
        return statistics.median(self.times_ms)

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s of all ranks at the median."""
        return sum(self.flops_by_rank) / self.median_ms / 1e9

    @property
    def tflops_per_rank(self) -> float:
        """Useful TFLOP/s of a rank, on average."""
        return self.tflops / len(self.flops_by_rank)

    @property
    def fraction(self) -> float:
        """Useful TFLOP/s of a rank over the matmul rate of the same turns, both on average."""
        return self.tflops_per_rank / statistics.mean(self.matmul_tflops)


@dataclass(frozen=True, kw_only=True)
class RanksResult:
    """What one contender did in one case on the first `ranks` ranks.

    Attributes:
        base: the case as it was asked for: those of one scaling row share it.
        case: what was computed; with weak scaling `ranks` times as long.
        ranks: number of ranks.
        scaling: ``"strong"`` or ``"weak"``.
        contender: ``"ours"``, or the name of a peer.
        layout: that was asked for.
        exchange: the schedule of transfers that was asked for.
        status: `OK`, or why there are no timings, with the `reason` in words.
        reason: empty, or what the error said.
        forward: a call outside of autograd.
        forward_backward: a call and the gradients of query, key and value.
        errors: on a small twin on as many ranks; None: not compared, `errors_reason` says why.
        errors_reason: empty, or why there are no errors.
    """

    base: Case
    case: Case
    ranks: int
    scaling: str
    contender: str
    layout: str
    exchange: str
    status: str = OK
    reason: str = ""
    forward: RanksTiming | None = None
    forward_backward: RanksTiming | None = None
    errors: Errors | None = None
    errors_reason: str = ""

    def timing(self, backward: bool) -> RanksTiming | None:
        """Of forward, or of forward and backward."""
        return self.forward_backward if backward else self.forward


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A timing beside others of the same run; None: there is no such other.

    Attributes:
        speed_up: time of the same contender on one rank (ours, for `MESSAGES`) over this time. With
            strong scaling p is ideal; with weak scaling it is the efficiency, and 1 is ideal where
            work is linear.
        rate_to_one: useful TFLOP/s per rank over those of the same contender on one rank.
        memory_to_one: `RankMemory.total` over that of the same contender on one rank.
        ours_to_this: our useful TFLOP/s on as many ranks over these; None for ours.
    """

    speed_up: float | None
    rate_to_one: float | None
    memory_to_one: float | None
    ours_to_this: float | None


def compare(result: RanksResult, results: Sequence[RanksResult], backward: bool) -> Comparison:
    """A result beside the others of its run.

    Args:
        result: one of `results`, with such a timing.
        results: all of them.
        backward: which timing.
    """
    timing = result.timing(backward)
    assert timing is not None

    def other(ranks: int, contender: str) -> RanksTiming | None:
        for found in results:
            if (found.base, found.ranks, found.contender) == (result.base, ranks, contender):
                return found.timing(backward)
        return None

    alone = OURS if result.contender == MESSAGES else result.contender
    one, ours = other(1, alone), other(result.ranks, OURS)
    total, total_of_one = timing.memory.total, None if one is None else one.memory.total
    return Comparison(
        speed_up=None if one is None else one.median_ms / timing.median_ms,
        rate_to_one=None if one is None else timing.tflops_per_rank / one.tflops_per_rank,
        memory_to_one=None if total is None or total_of_one is None else total / total_of_one,
        ours_to_this=None
        if ours is None or result.contender == OURS
        else ours.tflops / timing.tflops,
    )


def to_dict(result: RanksResult, results: Sequence[RanksResult]) -> dict[str, Any]:
    """All fields, and what follows from them under ``"derived"``, for JSON."""
    derived: dict[str, Any] = {}
    for backward, name in enumerate(("forward", "forward_backward")):
        timing = result.timing(bool(backward))
        if timing is not None:
            memory = timing.memory
            derived[name] = {
                "median_ms": timing.median_ms,
                "min_ms": min(timing.times_ms),
                "max_ms": max(timing.times_ms),
                "tflops": timing.tflops,
                "tflops_per_rank": timing.tflops_per_rank,
                "fraction_of_matmul": timing.fraction,
                "memory_inputs": memory.inputs,
                "memory_temporaries": memory.temporaries,
                "memory_total": memory.total,
                "peak_in_queries": None if memory.peak is None else memory.peak / memory.query,
                **asdict(compare(result, results, bool(backward))),
            }
    return {**asdict(result), "derived": derived}
