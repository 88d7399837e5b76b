"""A contender on its way through a workload."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from .contender import Contender, Shapes
from .result import OK, OUT_OF_MEMORY, Timing
from .team import Failure, Team
from .turns import Turn

T = TypeVar("T")

ROTATED_BYTES, MOST_SETS = 128 * 2**20, 64
"""Bytes of all input sets that successive calls on CUDA rotate through, more than caches hold; and
the most sets."""


class Inputs(NamedTuple):
    """Leaves of autograd, and the gradient of out: this rank's shards."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dout: torch.Tensor


def draw_sets(
    shapes: tuple[Shapes, ...], dtype: torch.dtype, generator: torch.Generator
) -> list[list[Inputs]]:
    """Random input sets that take turns, on the generator's device.

    Args:
        shapes: of query and of key, one for each call of a set.
        dtype: of all tensors.
        generator: draws them.

    Returns:
        The sets, each with inputs for every one of `shapes`.
    """

    def draw(shape: tuple[int, ...], leaf: bool) -> torch.Tensor:
        return torch.randn(
            shape, generator=generator, device=generator.device, dtype=dtype, requires_grad=leaf
        )

    count = 1
    if generator.device.type == "cuda":
        elements = sum(2 * math.prod(query) + 2 * math.prod(key) for query, key in shapes)
        count = min(MOST_SETS, -(-ROTATED_BYTES // max(elements * dtype.itemsize, 1)))
    return [
        [
            Inputs(draw(query, True), draw(key, True), draw(key, True), draw(query, False))
            for query, key in shapes
        ]
        for _ in range(count)
    ]


@dataclass
class Entry:
    """A contender on its way through a workload; it drops out with a status and a reason."""

    name: str
    contender: Contender | None = None
    sets: list[list[Inputs]] = field(default_factory=list)
    kernel: str = ""
    status: str = OK
    reason: str = ""
    timings: dict[bool, Timing] = field(default_factory=dict)  # by whether backward is in it

    def turn(self, backward: bool) -> Turn:
        """Forward, or forward and backward, on input sets in turn."""
        contender, sets = self.contender, self.sets
        assert contender is not None

        def call(number: int) -> tuple[torch.Tensor, ...]:
            found: tuple[torch.Tensor, ...] = ()
            for query, key, value, dout in sets[number % len(sets)]:
                with torch.set_grad_enabled(backward):
                    out = contender.attend(query, key, value)
                found = (out,)
                if backward:
                    found = (out, *torch.autograd.grad(out, (query, key, value), dout))
            return found  # of the last shape only: a user would not hold more

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
