"""When ranks compute, transfer and wait, by a simple cost model of a plan's steps.

The order is the engine's: a rank computes its local tiles, then those of each step when their rows
have arrived. A ring has one message in flight: that of step s + 1 starts when step s begins. A
gather starts all of them at once. What the model leaves out is what a picture must say: launches,
latency, packing, and that small tiles run below the device's rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..pattern import check_positive_float
from ..plan import AttentionPlan, Step, Tile, costs
from ..terminal import in_seconds
from .words import time_unit

TFLOPS = 600.0
"""TFLOP/s: about what one H200 reaches in forward of dense causal attention in bfloat16."""
LINK_GB_S = 350.0
"""GB/s (10**9): about what one H200 reads from another of its host over NVLink."""
MOST_STEPS = 20_000
"""Steps of all ranks, over all parts of the heads: planning these takes about 20 seconds."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """How long compute and transfers take.

    Attributes:
        tflops: 10**12 useful floating-point operations per second of one rank.
        link_gb_s: 10**9 bytes per second that a rank sends, and as many that it receives.
    """

    tflops: float = TFLOPS
    link_gb_s: float = LINK_GB_S

    def __post_init__(self) -> None:
        check_positive_float("tflops", self.tflops)
        check_positive_float("link_gb_s", self.link_gb_s)

    def in_words(self) -> str:
        """What is assumed, for a caption."""
        return (
            f"Model, not a measurement: {self.tflops:g} TFLOP/s per rank, {self.link_gb_s:g} GB/s "
            "per link and direction; no launch, packing or latency cost"
        )


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a rank does for some time.

    Attributes:
        rank: the rank.
        kind: ``"compute"``; ``"receive"``, which goes on beside computing; ``"wait"``, which is
            exposed communication.
        start: seconds from the start of the call.
        stop: seconds from the start of the call.
        peer: whose keys are computed with, received or waited for; the rank itself if its own.
        nbytes: received; 0 for others.
    """

    rank: int
    kind: str
    start: float
    stop: float
    peer: int
    nbytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """The activities of all ranks in a forward call.

    Attributes:
        model: what is assumed.
        world_size: number of ranks.
        activities: those of each rank in order of their starts; none is empty.
    """

    model: CostModel
    world_size: int
    activities: tuple[Activity, ...]

    @property
    def total(self) -> float:
        """Seconds until the last rank is done."""
        return max((x.stop for x in self.activities), default=0.0)

    @property
    def unit(self) -> tuple[str, float]:
        """The unit that suits `total`, and how many of it a second has."""
        return time_unit(self.total)

    def in_words(self) -> str:
        """How long it takes, and how long the rank waits that waits longest."""
        wait = self.seconds("wait")
        share = wait / self.total if self.total else 0.0
        if not wait:
            return f"{in_seconds(self.total)}; no rank waits"
        return (
            f"{in_seconds(self.total)}; the rank that waits longest waits {in_seconds(wait)}, "
            f"{share:.0%} of that"
        )

    def seconds(self, kind: str, rank: int | None = None) -> float:
        """Seconds of a kind of activity: of a rank, or None: of the rank with the most of it."""
        ranks = range(self.world_size) if rank is None else (rank,)
        return max(
            sum(x.stop - x.start for x in self.activities if x.rank == r and x.kind == kind)
            for r in ranks
        )


class _Clock:
    """The times at which one rank and its links are next free, in seconds."""

    def __init__(self) -> None:
        self.compute = self.asked = self.incoming = self.outgoing = 0.0


class _Run:
    """A forward call as it goes on.

    Args:
        plan: of all ranks.
        size: what turns rows into bytes and pairs into operations.
        model: how long they take.
        gathers: whether all transfers start at once.
    """

    def __init__(
        self, plan: AttentionPlan, size: costs.TensorSize, model: CostModel, gathers: bool
    ) -> None:
        operations = 4 * size.batch * size.head_dim * (plan.num_heads // plan.num_kv_heads)
        self._per_pair = operations / (model.tflops * 1e12)
        self._size, self._model, self._gathers = size, model, gathers
        self._clocks = [_Clock() for _ in range(plan.layout.world_size)]
        self.done: list[Activity] = []

    def go(self, part: AttentionPlan) -> None:
        """All steps of some heads."""
        ranks = [part.rank(rank) for rank in range(part.layout.world_size)]
        for one in ranks:
            self._compute(one.index, one.local, one.index)
        for piece in range(part.pieces):
            for number in range(1, len(ranks)):
                steps = [one.step(number, piece) for one in ranks]
                for rank, arrived in enumerate(self._transfer(steps)):
                    peer = (rank - number) % len(ranks)
                    self._wait(rank, arrived, peer)
                    self._compute(rank, steps[rank].tiles, peer)

    def _compute(self, rank: int, tiles: Sequence[Tile], peer: int) -> None:
        seconds = self._per_pair * sum(tile.pairs for tile in tiles)
        self._go_on(rank, "compute", self._clocks[rank].compute + seconds, peer)

    def _wait(self, rank: int, arrived: float, peer: int) -> None:
        self._go_on(rank, "wait", arrived, peer)
        clock = self._clocks[rank]
        if not self._gathers:
            clock.asked = clock.compute  # the next message starts when this one is taken

    def _go_on(self, rank: int, kind: str, stop: float, peer: int) -> None:
        clock = self._clocks[rank]
        if stop > clock.compute:
            start, clock.compute = clock.compute, stop
            self.done.append(Activity(rank=rank, kind=kind, start=start, stop=stop, peer=peer))

    def _transfer(self, steps: Sequence[Step]) -> list[float]:
        """Send the messages of a step; when each rank's has arrived, 0 if it receives none."""
        arrived = [0.0] * len(steps)
        for rank, step in enumerate(steps):
            if step.receive is None:
                continue
            peer = step.receive.sender
            own, other = self._clocks[rank], self._clocks[peer]
            start = max(own.asked, other.asked, own.incoming, other.outgoing)
            nbytes = self._size.key_value_bytes(step.receive.rows)
            stop = start + nbytes / (self._model.link_gb_s * 1e9)
            own.incoming = other.outgoing = arrived[rank] = stop
            self.done.append(
                Activity(
                    rank=rank, kind="receive", start=start, stop=stop, peer=peer, nbytes=nbytes
                )
            )
        return arrived


def timeline(
    plan: AttentionPlan, size: costs.TensorSize, model: CostModel, *, gathers: bool | None = None
) -> Timeline:
    """Work out when each rank computes, receives and waits in a forward call.

    Args:
        plan: of all ranks.
        size: what turns rows into bytes and pairs into operations.
        model: how long they take.
        gathers: whether all transfers start at once; None: what the plan decides.

    Raises:
        ValueError: there are more than `MOST_STEPS` steps.
    """
    world_size = plan.layout.world_size
    gathers = plan.gathers if gathers is None else gathers
    parts = (plan,) if gathers or world_size == 1 else plan.rounds
    steps = world_size * (world_size - 1) * sum(part.pieces for part in parts)
    if steps > MOST_STEPS:
        raise ValueError(
            f"the timeline has {steps:,} steps over all ranks and parts of the heads; at most "
            f"{MOST_STEPS:,} can be drawn: choose fewer ranks or heads"
        )
    run = _Run(plan, size, model, gathers)
    for part in parts:
        run.go(part)
    return Timeline(model, world_size, tuple(sorted(run.done, key=lambda x: (x.rank, x.start))))
