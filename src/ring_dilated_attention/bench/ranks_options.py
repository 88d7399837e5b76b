"""How a benchmark of several ranks measures."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import RANK_TIMEOUT, check_seconds, check_size
from ..functional import EXCHANGES, Schedule
from ..pattern import check_choice
from . import measure
from .ring_peers import LAYOUTS, PEERS

SCALINGS = ("strong", "weak")

SAMPLE_MS = {"cpu": 0.0, "cuda": 300.0}
"""Milliseconds of a sample: on CUDA ranks leave a barrier some 0.1 ms apart, launching the first
call takes about 2 ms in which the GPU waits, and it slows down after 50 ms."""

MOST_SAMPLE_MS = 600_000.0


@dataclass(frozen=True, kw_only=True)
class RanksOptions:
    """How to measure.

    Attributes:
        scaling: ``"strong"``: a case's length is that of the whole sequence; ``"weak"``: of the
            shard of each rank.
        peers: what else computes the cases, of `ring_peers.PEERS`.
        layout: of ours, one of `ring_peers.LAYOUTS`.
        exchange: of ours: ``"ring"`` keeps one message in flight during compute and holds the rows
            of at most two remote shards; ``"gather"`` starts all transfers at once and holds them
            all; ``"auto"``, the default, gathers where all of them are at most the size of a
            shard.
        device: one of `measure.DEVICES`.
        repeats: samples of each kind.
        seconds: time for the samples of one contender of each kind; at least three are taken.
        sample_ms: a sample is as many back-to-back calls as take so long; None: `SAMPLE_MS`.
        errors: whether to compare small twins with float64.
        timeout: seconds that a rank waits for another.
        seed: of the inputs.

    Raises:
        TypeError, ValueError: a value is not allowed.
    """

    scaling: str = "strong"
    peers: tuple[str, ...] = ()
    layout: str = "auto"
    exchange: Schedule = "auto"
    device: str = "auto"
    repeats: int = 10
    seconds: float = 10.0
    sample_ms: float | None = None
    errors: bool = True
    timeout: float = RANK_TIMEOUT
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("scaling", self.scaling, SCALINGS)
        for peer in self.peers:
            check_choice("peer", peer, PEERS)
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_choice("device", self.device, measure.DEVICES)
        check_size("repeats", self.repeats)
        check_seconds("seconds", self.seconds)
        check_seconds("timeout", self.timeout)
        if self.sample_ms is not None and not 0 <= self.sample_ms <= MOST_SAMPLE_MS:
            raise ValueError(
                f"sample_ms must be from 0 to {MOST_SAMPLE_MS:,.0f}, got {self.sample_ms}"
            )

    def sample_ms_on(self, kind: str) -> float:
        """Milliseconds of a sample on a device of this type."""
        return SAMPLE_MS[kind] if self.sample_ms is None else self.sample_ms
