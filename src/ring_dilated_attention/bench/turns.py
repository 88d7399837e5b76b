"""Time calls, taking turns sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from . import measure
from .options import Options
from .team import Failure, Team

T = TypeVar("T")

FEWEST_SAMPLES = 3

WARM_UP_SHARE = 0.2
"""Roughly which fraction of the time of `take_turns` warming up takes."""

WARM_UPS = {"cpu": 1, "cuda": 2}
"""Calls before the one whose time decides how many calls make a sample: CUDA compiles in the first
call and allocates in the second."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Something that takes turns.

    Attributes:
        name: of it.
        call: is given the number of the call; returns what it computed.
        inside: the context in which it runs.
        is_reference: whether it is timed beside others alone: not where all of them fail.
    """

    name: str
    call: Callable[[int], tuple[torch.Tensor, ...]]
    inside: Callable[[], AbstractContextManager[None]] = nullcontext
    is_reference: bool = False


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
    options: Options,
    failed: Callable[[str, Failure], None],
    told: Callable[[float], None],
) -> dict[str, Samples]:
    """Warm all up, then take samples of each in turn; who comes first changes.

    Args:
        turns: what to time.
        team: the ranks; every one makes this call.
        options: how many samples, and how long.
        failed: told of a turn that fails, which is then out.
        told: called with how much of the work is done, about, from 0 to 1.

    Returns:
        The samples of those that did not fail, by name; the same on all ranks.

    Raises:
        RankError: a rank failed where others went on.
    """
    numbers: dict[str, tuple[int, int]] = {}  # calls of a sample, samples
    taken: dict[str, list[Callable[[], float]]] = {}

    def attempt(turn: Turn, function: Callable[[], T]) -> T | None:
        try:
            return team.attempt(function)
        except Failure as failure:
            numbers.pop(turn.name, None)
            failed(turn.name, failure)
            return None

    for index, turn in enumerate(turns):
        told(WARM_UP_SHARE * index / len(turns))
        ms = attempt(turn, partial(_warm_up, turn, team))
        if ms is not None:
            slowest = max(team.share(ms))
            calls = max(1, math.ceil(options.sample_ms_on(team.device.type) / slowest))
            affordable = int(options.seconds * 1e3 / (calls * slowest))
            count = min(options.repeats, max(FEWEST_SAMPLES, affordable))
            numbers[turn.name], taken[turn.name] = (calls, count), []
    queued = not options.has_several_ranks  # which begin idle, as one does that is compared
    left = [numbers[turn.name][1] for turn in turns if turn.name in numbers]
    others = any(turn.name in numbers and not turn.is_reference for turn in turns)
    rounds = max(left) if others else 0
    for index in range(rounds):
        told(WARM_UP_SHARE + (1 - WARM_UP_SHARE) * index / rounds)
        first = index % len(turns)
        for turn in (*turns[first:], *turns[:first]):
            calls, count = numbers.get(turn.name, (0, 0))
            if index < count:
                elapsed = attempt(turn, partial(sample, turn, team, calls, queued=queued))
                if elapsed is not None:
                    taken[turn.name].append(elapsed)
    found = {}
    for turn in turns:
        if turn.name in numbers:
            times = attempt(turn, lambda name=turn.name: tuple(ms() for ms in taken[name]))  # type: ignore[misc]
            if times is not None:
                found[turn.name] = Samples(numbers[turn.name][0], tuple(team.share(times)))
    return found


def sample(turn: Turn, team: Team, calls: int, *, queued: bool = False) -> Callable[[], float]:
    """Make `calls` calls back to back; the result tells milliseconds of a call on this rank.

    On CUDA it is the time between two events around the calls, on the CPU the clock's. Ranks begin
    at once, on devices that are idle, and have ended when this returns.

    Args:
        turn: what to call.
        team: the ranks; every one makes this call.
        calls: how many.
        queued: of one rank: whether a GPU may still be busy, and this returns before it has ended.
            The time is then that of the GPU alone, unless the CPU falls behind.
    """
    with turn.inside():
        if not queued:
            measure.synchronize(team.device)
            team.barrier()

        def call() -> None:
            for number in range(calls):
                turn.call(number)

        elapsed = measure.start_timing(team.device, call)
        if not queued:
            elapsed()
    return lambda: elapsed() / calls


def _warm_up(turn: Turn, team: Team) -> float:
    """Milliseconds of a call.

    Raises:
        ArithmeticError: what the call computed is not finite.
    """
    with turn.inside():
        for number in range(WARM_UPS[team.device.type]):
            finite = [x.isfinite().all() for x in turn.call(number)]
    measure.synchronize(team.device)
    ms = sample(turn, team, 1)()
    if not all(finite):  # not before: a rank that failed would leave the others waiting
        raise ArithmeticError(f"{turn.name} computed what is not finite")
    return ms
