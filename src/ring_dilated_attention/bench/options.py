"""How a benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import RANK_TIMEOUT, check_seconds, check_size
from ..functional import EXCHANGES, Schedule
from ..layout import LAYOUTS
from ..pattern import check_choice, check_positive_int
from .contenders import BASELINES
from .measure import DEVICES

SCALINGS = ("strong", "weak")

SAMPLE_MS = {"cpu": 0.0, "cuda": 300.0}
"""Milliseconds of a sample of several ranks: on CUDA ranks leave a barrier some 0.1 ms apart,
launching the first call takes about 2 ms in which the GPU waits, and it slows down after 50 ms."""

MOST_SAMPLE_MS = 600_000.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to measure.

    Attributes:
        ranks: numbers of ranks to measure on; for each number p the first p ranks take part.
        scaling: ``"strong"``: a workload's length is that of the whole sequence; ``"weak"``: of
            the shard of each rank.
        baselines: what else computes the workloads, of `BASELINES`.
        layout: of ours, one of `layout.LAYOUTS`.
        exchange: of ours: ``"ring"`` keeps one message in flight during compute and holds the rows
            of at most two remote shards; ``"gather"`` starts all transfers at once and holds them
            all; ``"auto"``, the default, gathers where all of them are at most the size of a
            shard.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``: CUDA where there is a device.
        repeats: samples of forward, and of forward+backward.
        seconds: time for the samples of one contender of each kind; at least three are taken.
        sample_ms: duration in milliseconds of a sample, which is back-to-back calls; None: one call
            where one rank is measured, `SAMPLE_MS` where several are.
        cuda_graph: whether to time replays of CUDA graphs too; one rank only.
        errors: whether to compare small twins with float64.
        timeout: seconds that a rank waits for another.
        seed: of the inputs.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """

    ranks: tuple[int, ...] = (1,)
    scaling: str = "strong"
    baselines: tuple[str, ...] = ()
    layout: str = "auto"
    exchange: Schedule = "auto"
    device: str = "auto"
    repeats: int = 20
    seconds: float = 10.0
    sample_ms: float | None = None
    cuda_graph: bool = False
    errors: bool = True
    timeout: float = RANK_TIMEOUT
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("ranks must not be empty")
        for size in self.ranks:
            check_positive_int("ranks", size)
        check_choice("scaling", self.scaling, SCALINGS)
        for baseline in self.baselines:
            check_choice("baseline", baseline, BASELINES)
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_choice("device", self.device, DEVICES)
        check_size("repeats", self.repeats)
        check_seconds("seconds", self.seconds)
        check_seconds("timeout", self.timeout)
        if self.sample_ms is not None and not 0 <= self.sample_ms <= MOST_SAMPLE_MS:
            raise ValueError(
                f"sample_ms must be from 0 to {MOST_SAMPLE_MS:,.0f}, got {self.sample_ms}"
            )
        if self.cuda_graph and self.has_several_ranks:
            raise ValueError(
                f"cuda_graph needs one rank: calls on several cannot be captured; got {self.ranks}"
            )

    @property
    def has_several_ranks(self) -> bool:
        """Whether something is measured on more than one rank."""
        return max(self.ranks) > 1

    def sample_ms_on(self, device_type: str) -> float:
        """Milliseconds of a sample on such a device."""
        if self.sample_ms is not None:
            return self.sample_ms
        return SAMPLE_MS[device_type] if self.has_several_ranks else 0.0
