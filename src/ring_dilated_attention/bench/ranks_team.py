"""The first p ranks of a run: how they wait for each other, and how one's failure is everyone's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .result import OK
from .run import status_of

T = TypeVar("T")

PATIENCE = timedelta(hours=3)
"""How long ranks wait for others that are measuring."""

GRACE = timedelta(seconds=60)
"""How long a rank that failed waits for the others to come to the same point before it gives up."""


class RankError(RuntimeError):
    """A rank failed where others went on: the run is over."""


class Failure(Exception):  # noqa: N818  # a finding, not an error of the run
    """What failed on every rank, or where every rank came to know of it.

    Args:
        status: one of those of `Result`.
        reason: in words.
    """

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


@dataclass(frozen=True, kw_only=True)
class Team:
    """The first `size` ranks, of which this process is one.

    Attributes:
        size: number of ranks.
        rank: this one.
        device: where it computes.
        control: gloo, for waiting and for small Python objects: it leaves the GPUs alone.
        verdict: gloo, for `attempt` alone: a rank that failed meets no barrier of others there.
        groups: per contender a group of its own, which moves its tensors; None for one rank.
    """

    size: int
    rank: int
    device: torch.device
    control: dist.ProcessGroup
    verdict: dist.ProcessGroup
    groups: Mapping[str, dist.ProcessGroup | None]

    def barrier(self) -> None:
        """Return when all ranks are here."""
        dist.barrier(group=self.control)

    def share(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return self._share(value, self.control)

    def _share(self, value: Any, group: dist.ProcessGroup) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group)
        return values

    def attempt(self, function: Callable[[], T]) -> T:
        """Call a function on every rank; where it fails on one, fail on all.

        Raises:
            Failure: it failed, and all ranks are here.
            RankError: it failed on this rank, and others did not come within `GRACE`: they wait
                for this one inside the function.
        """
        values: list[T] = []
        caught: list[Exception] = []

        def call() -> None:
            try:
                values.append(function())
            except Exception as error:
                caught.append(error)
                raise

        status, reason = status_of(call)
        try:
            arrived = dist.barrier(group=self.verdict, async_op=True)
            assert arrived is not None
            arrived.wait(PATIENCE if status == OK else GRACE)
        except RuntimeError as error:
            if caught:
                raise RankError(reason) from caught[0]
            raise RankError(f"the other ranks are gone: {error}") from None
        caught.clear()  # its frames hold tensors
        found = self._share((status, reason), self.verdict)
        failed = [(rank, *how) for rank, how in enumerate(found) if how[0] != OK]
        if failed:
            rank, status, reason = failed[0]
            raise Failure(status, reason if len(failed) == self.size else f"rank {rank}: {reason}")
        return values[0]


def form_teams(
    sizes: Sequence[int], contenders: Sequence[str], device: torch.device
) -> dict[int, Team | None]:
    """The team of every size; None where this rank is not in it.

    Every rank of the default process group calls this with the same arguments.

    Args:
        sizes: numbers of ranks.
        contenders: names, each of which gets a group of its own in teams of several ranks.
        device: where this rank computes.
    """
    rank, teams = dist.get_rank(), dict[int, Team | None]()
    for size in sizes:
        ranks = list(range(size))
        control, verdict = (
            dist.new_group(ranks, backend="gloo", timeout=PATIENCE) for _ in range(2)
        )
        groups: dict[str, dist.ProcessGroup | None] = {
            name: dist.new_group(ranks) if size > 1 else None for name in contenders
        }
        teams[size] = (
            Team(
                size=size,
                rank=rank,
                device=device,
                control=control,
                verdict=verdict,
                groups=groups,
            )
            if rank < size
            else None
        )
    return teams
