"""What a benchmark found: plain numbers that JSON can hold, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .contenders import MESSAGES, OURS
from .workload import Workload

BACKWARD = 2.5
"""Useful operations of a backward call over those of a forward call."""

OK, REFUSED, OUT_OF_MEMORY, FAILED = "ok", "refused", "out of memory", "failed"
"""Values of `Result.status`."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reached in the same run on plain work in one dtype, in short bursts.

    Attributes:
        matmul_tflops: rate of a large square matrix product.
        matmul_size: its side.
        copy_gb_s: rate of a large copy, bytes read plus bytes written, in GB/s.
    """

    matmul_tflops: float
    matmul_size: int
    copy_gb_s: float


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
    def peak_in_queries(self) -> float | None:
        """The peak over the rank's query."""
        return None if self.peak is None else self.peak / self.query

    @property
    def total(self) -> int | None:
        """Inputs and peak."""
        return None if self.peak is None else self.inputs + self.peak


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long a call took, and what it held.

    Attributes:
        flops_by_rank: useful operations of the call.
        calls: back-to-back calls of a sample.
        times_ms: time of one call in every sample, on the rank that took longest.
        matmul_tflops: rate of the matrix product that took turns with the calls, by rank: how much
            slower one GPU is than another. A GPU that has worked for some 50 ms lowers its clocks,
            so `Ceilings` are no measure for longer work.
        matmul_size: its side.
        memory: of the rank that holds most.
        communication: of ours on several ranks; None: not measured.
        wall_ms: of one rank, by the clock from before a call until the device has finished it; of
            several ranks empty.
        graph_ms: of replays of the call captured in a CUDA graph; empty: not captured.
        graph_reason: why it was not captured although that was asked for; otherwise empty.
    """

    flops_by_rank: tuple[int, ...]
    calls: int
    times_ms: tuple[float, ...]
    matmul_tflops: tuple[float, ...]
    matmul_size: int
    memory: RankMemory
    communication: Communication | None = None
    wall_ms: tuple[float, ...] = ()
    graph_ms: tuple[float, ...] = ()
    graph_reason: str = ""

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
class Errors:
    """||got - expected|| / ||expected|| on a small twin, expected in float64.

    Attributes:
        twin: the workload that was compared.
        out: error of out.
        gradients: the largest of those of dquery, dkey and dvalue.
    """

    twin: Workload
    out: float
    gradients: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one contender did with one workload on the first `ranks` ranks.

    Attributes:
        base: the workload as it was asked for: those of one scaling row share it.
        workload: what was computed; with weak scaling `ranks` times as long.
        ranks: number of ranks.
        scaling: ``"strong"`` or ``"weak"``.
        contender: ``"ours"``, or the name of a baseline.
        layout: that was asked for.
        exchange: the schedule of transfers that was asked for.
        ceilings: of the device of rank 0 in the workload's dtype.
        kernel: which kernel computed; for ours the requested back end; empty: not known.
        status: `OK`, or why there are no timings, with the `reason` in words.
        reason: empty, or what the error said.
        forward: a call outside of autograd.
        forward_backward: a call and the gradients of query, key and value.
        errors: on a small twin on as many ranks; None: not compared, `errors_reason` says why.
        errors_reason: empty, or why there are no errors.
    """

    base: Workload
    workload: Workload
    ranks: int
    scaling: str
    contender: str
    layout: str
    exchange: str
    ceilings: Ceilings
    kernel: str = ""
    status: str = OK
    reason: str = ""
    forward: Timing | None = None
    forward_backward: Timing | None = None
    errors: Errors | None = None
    errors_reason: str = ""

    def timing(self, backward: bool) -> Timing | None:
        """Of forward, or of forward and backward."""
        return self.forward_backward if backward else self.forward

    @property
    def backward_tflops(self) -> float | None:
        """Useful TFLOP/s of backward alone: its operations over the difference of the medians."""
        if self.forward is None or self.forward_backward is None:
            return None
        backward_ms = self.forward_backward.median_ms - self.forward.median_ms
        flops = sum(self.forward_backward.flops_by_rank) - sum(self.forward.flops_by_rank)
        return flops / backward_ms / 1e9 if backward_ms > 0 else None


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
        time_to_ours: this time over ours on as many ranks; None for ours.
    """

    speed_up: float | None
    rate_to_one: float | None
    memory_to_one: float | None
    ours_to_this: float | None
    time_to_ours: float | None


def compare(result: Result, results: Sequence[Result], backward: bool) -> Comparison:
    """A result beside the others of its run.

    Args:
        result: one of `results`, with such a timing.
        results: all of them.
        backward: which timing.
    """
    timing = result.timing(backward)
    assert timing is not None

    def other(ranks: int, contender: str) -> Timing | None:
        for found in results:
            if (found.base, found.ranks, found.contender) == (result.base, ranks, contender):
                return found.timing(backward)
        return None

    alone = OURS if result.contender == MESSAGES else result.contender
    one, ours = other(1, alone), other(result.ranks, OURS)
    total, total_of_one = timing.memory.total, None if one is None else one.memory.total
    beside = None if result.contender == OURS else ours
    return Comparison(
        speed_up=None if one is None else one.median_ms / timing.median_ms,
        rate_to_one=None if one is None else timing.tflops_per_rank / one.tflops_per_rank,
        memory_to_one=None if total is None or total_of_one is None else total / total_of_one,
        ours_to_this=None if beside is None else beside.tflops / timing.tflops,
        time_to_ours=None if beside is None else timing.median_ms / beside.median_ms,
    )


def to_dict(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """All fields, and what follows from them under ``"derived"``, for JSON."""
    derived: dict[str, Any] = {
        "useful_flops_forward": result.workload.flops(),
        "backward_tflops": result.backward_tflops,
        "query_bytes": result.workload.query_bytes,
    }
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
                "peak_in_queries": memory.peak_in_queries,
                "wall_median_ms": _median(timing.wall_ms),
                "graph_median_ms": _median(timing.graph_ms),
                **asdict(compare(result, results, bool(backward))),
            }
    return {**asdict(result), "derived": derived}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
