"""Rows of other ranks that have arrived, and what is computed with them: a step, or all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..plan import TileGroup
from .joined import JoinedRows
from .transfer import Fetched


@dataclass
class Arrived:
    """The rows of one step, or of all of them.

    Attributes:
        steps: whose rows they are; their gradients are to be returned.
        slots: the keys and values that tiles read, (2, batch, slots, head_dim); None: nothing came.
        groups: the tiles.
        storing: of how many groups, the first ones, gradients may be written over what the slots
            hold; 0: they must be 0 at first.
        joined: which of the slots are whose rows; None: all are rows of the one step.
    """

    steps: Sequence[Fetched]
    slots: torch.Tensor | None
    groups: tuple[TileGroup, ...]
    storing: int
    joined: JoinedRows | None = None

    def returned(
        self, dslots: torch.Tensor | None
    ) -> Iterator[tuple[Fetched, torch.Tensor | None]]:
        """Each step, and the gradients of the slots or rows of its message, for `Home.start`."""
        for fetched in self.steps:
            if self.joined is None or dslots is None or fetched.received is None:
                yield fetched, dslots
                continue
            yield fetched, self.joined.returned(dslots, fetched.received)


def of_step(fetched: Fetched) -> Arrived:
    """What a step computes with its rows."""
    slots, rest = fetched.spread()
    return Arrived((rest,), slots, rest.step.groups, rest.step.storing)


def of_all(rows: JoinedRows) -> Arrived:
    """What is computed when the rows of all steps have arrived, which it waits for."""
    steps, groups = rows.filled(), rows.joined.groups
    return Arrived(steps, rows.slots, groups, len(groups) * rows.joined.reads_once, rows)
