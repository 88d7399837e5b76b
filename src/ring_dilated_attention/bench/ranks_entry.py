"""A contender on its way through a case on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from .ranks_result import RanksTiming
from .ranks_team import Failure, Team
from .ranks_turns import Turn
from .result import OK, OUT_OF_MEMORY
from .ring_peers import RingContender

T = TypeVar("T")


class Inputs(NamedTuple):
    """Leaves of autograd, and the gradient of out: this rank's shards."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dout: torch.Tensor


@dataclass
class Entry:
    """A contender on its way through a case; it drops out with a status and a reason."""

    name: str
    contender: RingContender | None = None
    sets: list[Inputs] = field(default_factory=list)
    status: str = OK
    reason: str = ""
    timings: dict[bool, RanksTiming] = field(default_factory=dict)  # by whether backward is in it

    def turn(self, backward: bool) -> Turn:
        """Forward, or forward and backward, on input sets in turn."""
        contender, sets = self.contender, self.sets
        assert contender is not None

        def call(number: int) -> tuple[torch.Tensor, ...]:
            query, key, value, dout = sets[number % len(sets)]
            with torch.set_grad_enabled(backward):
                out = contender.attend(query, key, value)
            if backward:
                return out, *torch.autograd.grad(out, (query, key, value), dout)
            return (out,)

        return Turn(name=self.name, call=call, inside=contender.inside)

    def fail(self, failure: Failure) -> None:
        """Drop out."""
        self.status, self.reason = failure.status, failure.reason
        if failure.status == OUT_OF_MEMORY and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def attempt(self, team: Team, function: Callable[[], T]) -> T | None:
        """Call a function on all ranks, if still in; a failure takes the entry out."""
        if self.status == OK:
            try:
                return team.attempt(function)
            except Failure as failure:
                self.fail(failure)
        return None
