"""Time calls on several ranks, taking turns sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from . import measure
from .ranks_team import Failure, Team
from .run import FEWEST_REPEATS

WARM_UPS = {"cpu": 2, "cuda": 3}
"""Calls before the first sample, of which the last one is timed: CUDA compiles in the first one and
allocates in the second one."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Something that takes turns.

    Attributes:
        name: of it.
        call: is given the number of the call; returns what it computed.
        inside: the context in which it runs.
    """

    name: str
    call: Callable[[int], tuple[torch.Tensor, ...]]
    inside: Callable[[], AbstractContextManager[None]] = nullcontext


class Samples(NamedTuple):
    """What was measured of a turn.

    Attributes:
        calls: of a sample.
        by_rank: per rank, milliseconds of a call in every sample.
    """

    calls: int
    by_rank: tuple[tuple[float, ...], ...]

    @property
    def slowest(self) -> tuple[float, ...]:
        """Milliseconds of a call in every sample, on the rank that took longest."""
        return tuple(max(times) for times in zip(*self.by_rank, strict=True))


def take_turns(
    turns: Sequence[Turn],
    team: Team,
    repeats: int,
    seconds: float,
    sample_ms: float,
    failed: Callable[[str, Failure], None],
) -> dict[str, Samples]:
    """Warm all up, then take samples of each in turn; who comes first changes.

    Args:
        turns: what to time.
        team: the ranks; every one makes this call.
        repeats: samples of each.
        seconds: time for the samples of one; there are fewer where it would not do, but not fewer
            than three for that.
        sample_ms: see `RanksOptions`.
        failed: told of a turn that fails, which is then out.

    Returns:
        The samples of those that did not fail, by name; the same on all ranks.

    Raises:
        RankError: a rank failed where others went on.
    """
    numbers: dict[str, tuple[int, int]] = {}  # calls of a sample, samples
    taken: dict[str, list[float]] = {}

    def attempt(turn: Turn, function: Callable[[], float]) -> float | None:
        try:
            return team.attempt(function)
        except Failure as failure:
            numbers.pop(turn.name, None)
            failed(turn.name, failure)
            return None

    for turn in turns:
        ms = attempt(turn, partial(_warm_up, turn, team))
        if ms is not None:
            slowest = max(team.share(ms))
            calls = max(1, math.ceil(sample_ms / slowest))
            count = min(repeats, max(FEWEST_REPEATS, int(seconds * 1e3 / (calls * slowest))))
            numbers[turn.name], taken[turn.name] = (calls, count), []
    for index in range(max((count for _, count in numbers.values()), default=0)):
        first = index % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            calls, count = numbers.get(turn.name, (0, 0))
            if index < count:
                ms = attempt(turn, partial(sample, turn, team, calls))
                if ms is not None:
                    taken[turn.name].append(ms)
    return {
        name: Samples(calls, tuple(map(tuple, team.share(taken[name]))))
        for name, (calls, _) in numbers.items()
    }


def sample(turn: Turn, team: Team, calls: int) -> float:
    """Milliseconds of a call on this rank: of so many, back to back, that all ranks begin at once.

    On CUDA it is the time between two events around the calls, on the CPU the clock's.
    """
    with turn.inside():
        measure.synchronize(team.device)
        team.barrier()

        def call() -> None:
            for number in range(calls):
                turn.call(number)

        return measure.start_timing(team.device, call)() / calls


def _warm_up(turn: Turn, team: Team) -> float:
    """Milliseconds of the last warm-up.

    Raises:
        ArithmeticError: what the call computed is not finite.
    """
    with turn.inside():
        for number in range(WARM_UPS[team.device.type] - 1):
            finite = [x.isfinite().all() for x in turn.call(number)]
    ms = sample(turn, team, 1)  # a rank that failed before it would leave the others waiting
    if not all(finite):
        raise ArithmeticError(f"{turn.name} computed what is not finite")
    return ms
