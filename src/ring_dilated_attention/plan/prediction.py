"""How long a call of one rank takes, by a model of its steps: the rates are arguments.

A rank computes its own tiles, then those of each step once their rows have arrived. In a ring the
rows of the next step travel meanwhile, in a gather those of all steps. Other ranks are taken to be
as fast as this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..layout import SequenceLayout
from .attention import AttentionPlan
from .costs import TensorSize, flops, flops_by_rank, returned_bytes
from .rank import RankPlan, Step
from .rows import Message, TileGroup


@dataclass(frozen=True, kw_only=True)
class ComputeRates:
    """How fast a rank computes in one direction.

    Attributes:
        flops: operations per second of long tiles.
        half_keys: keys per query with which a tile runs at half of `flops`.
        group_seconds: that a group of tiles takes besides: launches, and multiprocessors that are
            idle at its end.
        host_step: seconds that the host takes for a step with rows.
    """

    flops: float
    half_keys: float
    group_seconds: float
    host_step: float


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between ranks.

    Attributes:
        bytes_per_second: that a rank sends, and as many that it receives at the same time.
        latency: seconds from the start of a message to its first byte.
    """

    bytes_per_second: float
    latency: float


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What turns a plan into seconds.

    Attributes:
        forward: of compute.
        backward: of compute; it has 2.5 times the operations.
        inside: between ranks of one host.
        across: between ranks of different hosts.
        beside_transfers: how many times as long compute takes in calls in which rows travel.
        host_call: seconds that the host takes for a call without steps, in each direction.
        host_empty_step: seconds that the host takes for a step without rows.
    """

    forward: ComputeRates
    backward: ComputeRates
    inside: Link
    across: Link
    beside_transfers: float
    host_call: float
    host_empty_step: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A call of one rank, in one direction.

    Attributes:
        seconds: until it is done.
        compute: seconds of compute.
        exposed: seconds that compute waits for rows: `device` less `compute`.
        host: seconds that the host takes; where that is more than the device needs, it decides.
        steps: steps in which rows are received.
        inside_bytes: received from ranks of the own host.
        across_bytes: received from other hosts.
    """

    seconds: float
    compute: float
    exposed: float
    host: float
    steps: int
    inside_bytes: int
    across_bytes: int

    @property
    def device(self) -> float:
        """Seconds that the device takes, waits included."""
        return self.compute + self.exposed

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step with rows and of the compute of own rows."""
        return self.seconds / (self.steps + 1)


class _Section(NamedTuple):
    """Own tiles, or a step: seconds of compute; bytes that arrive before it, and return after."""

    compute: float
    inside: int
    across: int
    home_inside: int
    home_across: int
    is_own: bool

    @property
    def fetched(self) -> int:
        """Bytes of rows that it waits for."""
        return self.inside + self.across


def host_of_ranks(hosts: int, ranks_per_host: int) -> tuple[int, ...]:
    """The host of each rank, where ranks are numbered host by host."""
    return tuple(rank // ranks_per_host for rank in range(hosts * ranks_per_host))


def predict(
    rank: RankPlan,
    size: TensorSize,
    rates: Rates,
    *,
    backward: bool,
    hosts: Sequence[int] | None = None,
    gathers: bool | None = None,
) -> Prediction:
    """Predict forward, or backward alone, of one rank.

    Args:
        rank: which rank of which plan.
        size: what turns rows into bytes and pairs into operations.
        rates: how fast ranks compute, and how fast rows travel.
        backward: which direction.
        hosts: host of each rank; None: all are on one. A rank receives all rows of other hosts
            across the network, also those that its neighbours receive too.
        gathers: whether all rows travel at once; None: what the plan decides.
    """
    gathers = rank.plan.gathers if gathers is None else gathers
    model = _Model(rank, size, rates, backward, hosts)
    sections = list(model.sections(gathers))
    fetched = [section for section in sections if section.fetched]
    if fetched:
        slower = rates.beside_transfers
        sections = [s._replace(compute=s.compute * slower) for s in sections]
    compute = sum(section.compute for section in sections)
    device = max(model.device_seconds(sections, gathers), compute)
    empty = sum(not section.fetched for section in sections if not section.is_own)
    host_step = model.compute_rates.host_step
    host = rates.host_call + len(fetched) * host_step + empty * rates.host_empty_step
    return Prediction(
        seconds=max(device, host),
        compute=compute,
        exposed=device - compute,
        host=host,
        steps=len(fetched),
        inside_bytes=sum(section.inside for section in fetched),
        across_bytes=sum(section.across for section in fetched),
    )


class _Model:
    """What `predict` is told, and what follows from it."""

    def __init__(
        self,
        rank: RankPlan,
        size: TensorSize,
        rates: Rates,
        backward: bool,
        hosts: Sequence[int] | None,
    ) -> None:
        self._rank, self._size, self._rates, self._backward = rank, size, rates, backward
        self._hosts = [0] * rank.world_size if hosts is None else hosts
        self.compute_rates = rates.backward if backward else rates.forward
        plan = rank.plan
        heads_per_kv = plan.num_heads // plan.num_kv_heads
        self._per_pair = 4 * size.batch * size.head_dim * heads_per_kv * (2.5 if backward else 1)
        self._known: dict[int, float] = {}  # by the identity of groups, which plans keep

    def sections(self, gathers: bool) -> Iterator[_Section]:
        """What the rank does, in order."""
        for one in self._rank.rounds(gathers=gathers):
            yield _Section(self._seconds(one.local_groups), 0, 0, 0, 0, is_own=True)
            for step in one.steps() if self._rank.world_size > 1 else ():
                yield self._step(step)

    def _step(self, step: Step) -> _Section:
        inside, across = self._split(step.receive, self._size.key_value_bytes)
        home = (0, 0)
        if self._backward:
            home = self._split(step.receive, self._returned)
        return _Section(self._seconds(step.groups), inside, across, *home, is_own=False)

    def _returned(self, rows: int) -> int:
        return returned_bytes(self._rank, self._size, rows)

    def _split(self, message: Message | None, nbytes: Callable[[int], int]) -> tuple[int, int]:
        """Bytes of a message that travel inside the host, and those that come from outside."""
        if message is None:
            return 0, 0
        total = nbytes(message.rows)
        if self._hosts[message.sender] == self._hosts[self._rank.index]:
            return total, 0
        return 0, total

    def _seconds(self, groups: tuple[TileGroup, ...]) -> float:
        """How long these groups take to compute."""
        if id(groups) not in self._known:
            rates = self.compute_rates
            seconds = len(groups) * rates.group_seconds
            for tile in (tile for group in groups for tile in group.tiles):
                keys = (tile.keys.length + 1) / 2 if tile.is_causal else tile.keys.length
                seconds += tile.pairs * self._per_pair / rates.flops * (1 + rates.half_keys / keys)
            self._known[id(groups)] = seconds
        return self._known[id(groups)]

    def _travel(self, inside: int, across: int) -> float:
        """Seconds until bytes have arrived that travel at once, inside and from outside."""
        links = ((inside, self._rates.inside), (across, self._rates.across))
        return max(x.latency + nbytes / x.bytes_per_second if nbytes else 0 for nbytes, x in links)

    def device_seconds(self, sections: Sequence[_Section], gathers: bool) -> float:
        """Seconds from the start until all is computed, and all gradients are at home."""
        now = asked = 0.0  # asked: when the rows of the next step could start
        inside = across = 0
        returned = (0, 0)
        for section in sections:
            if section.fetched and gathers:
                inside, across = inside + section.inside, across + section.across
                now = max(now, self._travel(inside, across))
            elif section.fetched:
                # Gradients of the step before are on their way together with the next rows.
                more = section.inside + returned[0], section.across + returned[1]
                now = asked = max(now, asked + self._travel(*more))
                returned = section.home_inside, section.home_across
            now += section.compute
        if gathers:
            returned = sum(x.home_inside for x in sections), sum(x.home_across for x in sections)
        # Half of the own tiles, of one round, is computed while the last gradients return.
        late = sections[0].compute / 2 if self._backward else 0.0
        return now + max(0.0, self._travel(*returned) - late)


def efficiency(plan: AttentionPlan, size: TensorSize, rates: Rates, seconds: float) -> float:
    """A rank's share of the speed of one rank that has only a sequence as long as a shard.

    Useful operations per second, forward and backward together, of a rank in a call of `plan` over
    those of that rank.

    Args:
        plan: of all ranks.
        size: what turns rows into bytes and pairs into operations.
        rates: how fast ranks compute.
        seconds: that forward and backward of `plan` take.
    """
    length = plan.layout.max_local_length
    layout = SequenceLayout.contiguous(length, 1)
    alone = replace(plan, layout=layout, documents=(0, length)).rank(0)
    one = sum(predict(alone, size, rates, backward=way).seconds for way in (False, True))
    work = sum(flops_by_rank(plan, size)) / plan.layout.world_size
    return work / seconds / (flops(alone, size) / one)
