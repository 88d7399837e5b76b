"""The first p ranks of a run: how they wait for each other, and how one's failure is everyone's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..checks import RankError
from .result import FAILED, OK, OUT_OF_MEMORY, REFUSED

T = TypeVar("T")

PATIENCE = timedelta(hours=3)
"""How long ranks wait for others that are measuring."""

GRACE = timedelta(seconds=60)
"""How long a rank that failed waits for the others to come to the same point before it gives up."""


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
    """The first `size` ranks, of which this process is one. A rank alone needs no process group.

    Attributes:
        size: number of ranks.
        rank: this one.
        device: where it computes.
        control: gloo, for waiting and for small Python objects: it leaves the GPUs alone.
        verdict: gloo, for `attempt` alone: a rank that failed meets no barrier of others there.
        groups: per contender a group of its own, which moves its tensors; none for one rank.
    """

    size: int
    rank: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    verdict: dist.ProcessGroup | None = None
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    def barrier(self) -> None:
        """Return when all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self.control)

    def share(self, value: T) -> list[T]:
        """Every rank's value, by rank."""
        return self._share(value, self.control)

    def _share(self, value: T, group: dist.ProcessGroup | None) -> list[T]:
        values: list[Any] = [value] * self.size
        if self.size > 1:
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
        if self.size > 1:
            self._meet(PATIENCE if status == OK else GRACE, reason, caught)
        caught.clear()  # its frames hold tensors
        found = self._share((status, reason), self.verdict)
        failed = [(rank, *how) for rank, how in enumerate(found) if how[0] != OK]
        if failed:
            rank, status, reason = failed[0]
            raise Failure(status, reason if len(failed) == self.size else f"rank {rank}: {reason}")
        return values[0]

    def _meet(self, patience: timedelta, reason: str, caught: list[Exception]) -> None:
        try:
            arrived = dist.barrier(group=self.verdict, async_op=True)
            assert arrived is not None
            arrived.wait(patience)
        except RuntimeError as error:
            if caught:
                raise RankError(reason) from caught[0]
            raise RankError(f"the other ranks are gone: {error}") from None


def status_of(function: Callable[[], None]) -> tuple[str, str]:
    """Run a function and say how it went: any error is a finding here, and kept in words."""
    try:
        function()
    except (ValueError, TypeError, NotImplementedError) as error:
        return REFUSED, str(error)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return OUT_OF_MEMORY, str(error)
    except Exception as error:  # baselines are other people's code
        if "can't allocate memory" in str(error):  # what torch's CPU allocator raises
            return OUT_OF_MEMORY, str(error)
        return FAILED, f"{type(error).__name__}: {error}"
    return OK, ""


def form_teams(
    sizes: Sequence[int], contenders: Sequence[str], device: torch.device
) -> dict[int, Team | None]:
    """The team of every size; None where this rank is not in it.

    Every rank of the default process group, if there is one, calls this with the same arguments.

    Args:
        sizes: numbers of ranks.
        contenders: names, each of which gets a group of its own in teams of several ranks.
        device: where this rank computes.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    teams = dict[int, Team | None]()
    for size in sizes:
        team = Team(size=size, rank=rank, device=device)
        if size > 1:
            ranks = list(range(size))
            control, verdict = (
                dist.new_group(ranks, backend="gloo", timeout=PATIENCE) for _ in range(2)
            )
            groups = {name: dist.new_group(ranks) for name in contenders}
            team = Team(
                size=size, rank=rank, device=device, control=control, verdict=verdict, groups=groups
            )
        teams[size] = team if rank < size else None
    return teams
