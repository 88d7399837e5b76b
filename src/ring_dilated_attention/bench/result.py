"""What a benchmark found: plain numbers that JSON can hold, and what follows from them."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from ..pattern import DilatedPattern
from .case import Case

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
class Timing:
    """How long a call took, and what it held.

    Attributes:
        flops: useful operations of the call.
        times_ms: of every repeat: between events on the device, on the CPU by the clock.
        wall_ms: by the clock from before the call until the device has finished it.
        peak_bytes: most memory held above what was held before the call; None: not known (CPU).
        matmul_tflops: median rate of the matrix product of `Ceilings` where it took turns with the
            calls; None: it did not. A GPU that has worked for some 50 ms lowers its clocks, so a
            burst is no measure for longer work.
        graph_ms: of replays of the call captured in a CUDA graph; empty: not captured.
        graph_reason: why it was not captured although that was asked for; else empty.
    """

    flops: int
    times_ms: tuple[float, ...]
    wall_ms: tuple[float, ...]
    peak_bytes: int | None = None
    matmul_tflops: float | None = None
    graph_ms: tuple[float, ...] = ()
    graph_reason: str = ""

    @property
    def median_ms(self) -> float:
        """Median of `times_ms`."""
        return statistics.median(self.times_ms)

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s at the median."""
        return self.flops / self.median_ms / 1e9


@dataclass(frozen=True, kw_only=True)
class Errors:
    """||got - expected|| / ||expected|| on a small twin, expected in float64.

    Attributes:
        twin: the case that was compared.
        out: error of out.
        gradients: the largest of those of dquery, dkey and dvalue.
    """

    twin: Case
    out: float
    gradients: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one contender did in one case.

    Attributes:
        case: what was computed.
        contender: ``"ours"``, or the name of a peer.
        kernel: which kernel computed; for ours the requested back end.
        status: `OK`, or why there are no timings, with the `reason` in words.
        reason: empty, or what the error said.
        forward: a call outside of autograd.
        forward_backward: a call and the gradients of query, key and value.
        errors: on a small twin; None: not compared, `errors_reason` says why.
        errors_reason: empty, or why there are no errors.
        ceilings: of the device in the case's dtype.
        ratios: our useful TFLOP/s over this peer's, forward and forward+backward; None for ours,
            and where either has no timings.
        time_ratios: this peer's time over ours, forward and forward+backward; None for ours, and
            where either has no timings.
    """

    case: Case
    contender: str
    ceilings: Ceilings
    kernel: str = ""
    status: str = OK
    reason: str = ""
    forward: Timing | None = None
    forward_backward: Timing | None = None
    errors: Errors | None = None
    errors_reason: str = ""
    ratios: tuple[float | None, float | None] = (None, None)
    time_ratios: tuple[float | None, float | None] = (None, None)

    @property
    def backward_tflops(self) -> float | None:
        """Useful TFLOP/s of backward alone: its operations over the difference of the medians."""
        if self.forward is None or self.forward_backward is None:
            return None
        backward_ms = self.forward_backward.median_ms - self.forward.median_ms
        flops = self.forward_backward.flops - self.forward.flops
        return flops / backward_ms / 1e9 if backward_ms > 0 else None

    def fraction(self, timing: Timing) -> float:
        """Useful TFLOP/s over the matmul rate of the same turns."""
        return timing.tflops / (timing.matmul_tflops or self.ceilings.matmul_tflops)

    def to_dict(self) -> dict[str, Any]:
        """All fields, and what follows from them under ``"derived"``, for JSON."""
        derived: dict[str, Any] = {
            "useful_flops_forward": self.case.flops(),
            "backward_tflops": self.backward_tflops,
            "query_bytes": self.case.query_bytes,
        }
        for name in ("forward", "forward_backward"):
            timing: Timing | None = getattr(self, name)
            if timing is None:
                continue
            peak, graph = timing.peak_bytes, timing.graph_ms
            derived[name] = {
                "median_ms": timing.median_ms,
                "min_ms": min(timing.times_ms),
                "max_ms": max(timing.times_ms),
                "wall_median_ms": statistics.median(timing.wall_ms),
                "tflops": timing.tflops,
                "fraction_of_matmul": self.fraction(timing),
                "peak_in_queries": None if peak is None else peak / self.case.query_bytes,
                "graph_median_ms": statistics.median(graph) if graph else None,
            }
        return {**asdict(self), "derived": derived}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """The result of which `to_dict` made `data`; what was derived is derived anew."""
        fields = {name: value for name, value in data.items() if name != "derived"}
        fields["case"] = _case(fields["case"])
        fields["ceilings"] = Ceilings(**fields["ceilings"])
        for name in ("forward", "forward_backward"):
            if fields[name] is not None:
                lists = ("times_ms", "wall_ms", "graph_ms")
                fields[name] = Timing(
                    **{**fields[name], **{key: tuple(fields[name][key]) for key in lists}}
                )
        if fields["errors"] is not None:
            twin = _case(fields["errors"]["twin"])
            fields["errors"] = Errors(**{**fields["errors"], "twin": twin})
        for name in ("ratios", "time_ratios"):
            fields[name] = tuple(fields[name])
        return cls(**fields)


def _case(data: dict[str, Any]) -> Case:
    return Case(**{**data, "pattern": DilatedPattern(**data["pattern"])})
