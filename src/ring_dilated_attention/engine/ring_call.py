"""What a rank's call is, but for its tensors: its plan, and how rows and results travel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice

import torch

from ..exchange import Exchange
from ..plan import Joined, RankPlan
from ..tiles import Selection
from .accumulate import Accumulator
from .arrived import Arrived, of_all, of_step
from .compute import Inputs
from .joined import JoinedRows
from .parts import TileCall
from .transfer import Fetched, Packer, fetch


@dataclass(frozen=True)
class RingCall:
    """Everything but the tensors of one call on one rank."""

    plan: RankPlan
    exchange: Exchange
    backend: Selection
    scale: float
    gathers: bool  # whether all messages are in flight behind the running compute, or one
    workspace: float | None = None  # see `dilated_attention`
    detached: bool = False  # whether backward takes the weights of branches for constants

    @property
    def branches(self) -> Iterator[RingCall]:
        """A call of each branch by itself."""
        for plan in self.plan.single_branches:
            yield replace(self, plan=plan, detached=False)

    @property
    def rounds(self) -> tuple[RankPlan, ...]:
        """What is run one after the other."""
        return self.plan.rounds(gathers=self.gathers)

    @cached_property
    def joined(self) -> Joined | None:
        """What its only round computes when the rows of all steps have arrived, if anything."""
        return self.plan.at_once(gathers=self.gathers)

    def fetch(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[Fetched]:
        """Start fetching the rows of all steps of all rounds, in order."""
        if self.plan.is_alone:
            return iter(())
        depth = self.plan.world_size - 1 if self.gathers else 1
        steps = chain.from_iterable(one.steps() for one in self.rounds)
        return fetch(steps, Packer(self.exchange, key, value, spreads=self.joined is None), depth)

    def joined_rows(self, inputs: Inputs, sums: Accumulator) -> JoinedRows | None:
        """Where the rows of `joined` are on their way to, if there is any."""
        if self.joined is None:
            return None
        (one,) = self.rounds
        return JoinedRows(self.joined, one, *inputs[1:], self.fetch, sums)

    def arrived(
        self, one: RankPlan, rows: JoinedRows | None, arrivals: Iterator[Fetched]
    ) -> Iterator[Arrived]:
        """What a round computes with rows of others, as soon as it has them."""
        if rows is not None:
            return iter((of_all(rows),))
        # Which does not hold what the caller drops.
        return map(of_step, islice(arrivals, one.num_steps))

    def sums(self, query: torch.Tensor) -> Accumulator:
        """Through which results are added up."""
        return Accumulator(query.device, getattr(self.exchange, "stopwatch", None))

    def tiles(self, query: torch.Tensor) -> TileCall:
        """What tiles need to know of the call."""
        plan, (batch, _, _, head_dim) = self.plan.plan, query.shape
        heads_per_kv, flops = plan.num_heads // plan.num_kv_heads, 0.0
        # Packed documents have the limits of short calls: they are rarely seen twice, and a kernel
        # call of each takes the CPU longer than it saves the GPU.
        if len(plan.documents) <= 2:
            flops = 4.0 * head_dim * batch * heads_per_kv * self.plan.own_pairs
        return TileCall(self.backend, self.scale, batch, heads_per_kv, self.workspace, flops)
