"""Walk a plan: dilated attention of one rank's shard, forward and backward.

Shape legend: B batch, n local rows, H query heads, K KV heads, D head_dim, R rows of a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice

import torch

from ..exchange import Exchange
from ..plan import Joined, RankPlan, TileGroup
from ..tiles import Selection, accumulate_dtype
from . import compute
from .accumulate import Accumulator, kernels_on, sum_dtype
from .blocks import by_slot, readable, readable_in_backward
from .compute import Inputs, merge_zero_keys
from .joined import JoinedRows
from .own import OwnSchedule, backward_own, forward_own, own_schedule
from .parts import TileCall
from .transfer import Fetched, GradientReturn, Home, Packer, fetch


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


RETURNING_BYTES = 64 << 20
"""Bytes of returned gradients that may be in flight behind a gather before they are waited for."""


def ring_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: RingCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of this rank's queries: see the docstring of the operator.

    Args:
        query: (B, n, H, D).
        key: (B, n, K, D).
        value: (B, n, K, D).
        call: everything else.

    Returns:
        out (B, n, H, D), of query's dtype, and lse (B, H, n), float32 or float64; contiguous.
    """
    inputs = compute.Inputs(*(readable(x, call.backend) for x in (query, key, value)))
    query = inputs.query
    batch, length, num_heads, _ = query.shape
    rounds, tiles, sums = call.rounds, call.tiles(query), call.sums(query)
    covers = all(one.covers for one in rounds)
    create = torch.empty if covers else torch.zeros
    dtype = sum_dtype(query, max(one.mean_additions for one in rounds))
    out = create(query.shape, dtype=dtype, device=query.device)
    lse = torch.empty(
        batch, num_heads, length, dtype=accumulate_dtype(query.dtype), device=query.device
    )
    if not covers:
        lse.fill_(-torch.inf)
    with kernels_on(query.device), sums:
        rows = call.joined_rows(inputs, sums)
        arrivals = call.fetch(*inputs[1:]) if rows is None else iter(())
        zero_keys: list[TileGroup] = []
        for one in rounds:
            own = own_schedule(one, tiles, query.shape[3], call.joined)
            zero_keys.extend(own.zero_keys)
            for group in own.covering:
                compute.forward(group, tiles, inputs, compute.Result(out, lse, stores=True), sums)
            if rows is not None:
                rows.begin()
            for launch in own.launches:
                forward_own(launch, tiles, inputs, compute.Result(out, lse), sums)
            for group in own.others:
                compute.forward(group, tiles, inputs, compute.Result(out, lse), sums)
            for work in call.arrived(one, rows, arrivals):
                if work.slots is not None:
                    remote = compute.Inputs(query, *map(by_slot, work.slots))
                    for group in compute.launches_first(work.groups, tiles, query.shape[3]):
                        compute.forward(group, tiles, remote, compute.Result(out, lse), sums)
                    sums.join(work.slots)  # a ring frees its buffers before the next are made
                    del remote
                del work
        sums.join()
        merge_zero_keys(zero_keys, out, lse.transpose(1, 2), tiles.heads_per_kv)
    return out.to(query.dtype), lse


def ring_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's query, key and value: see the docstring of the operator.

    Args:
        dout: (B, n, H, D).
        query: (B, n, H, D).
        key: (B, n, K, D).
        value: (B, n, K, D).
        out: (B, n, H, D), as `ring_forward` returned it.
        lse: (B, H, n), as `ring_forward` returned it.
        call: everything else.

    Returns:
        dquery, dkey, dvalue: contiguous, in the dtypes of query, key and value.
    """
    if call.detached and not call.plan.is_alone:
        return _branch_by_branch(dout, query, key, value, lse, call)
    dout, query, key, value, out = readable_in_backward(dout, query, key, value, out, call.backend)
    run = _Backward(
        call, compute.Inputs(query, key, value), compute.Merged(dout, out, lse.contiguous())
    )
    with kernels_on(query.device), run.sums:
        rows = call.joined_rows(run.inputs, run.sums)
        arrivals = call.fetch(key, value) if rows is None else iter(())
        for one in run.rounds:
            run.compute_round(one, rows, arrivals)
        run.finish()
    return run.dquery.to(query.dtype), run.dkey.to(key.dtype), run.dvalue.to(value.dtype)


def _branch_by_branch(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ring_backward` where a branch's own out takes the place of the merged one.

    ``delta = rowsum(dout * out)`` is all that tells the two apart. The branch's out is worked out
    again: to keep it would take as many tensors as there are branches.
    """
    total: tuple[torch.Tensor, ...] = ()
    for branch in call.branches:
        out, _ = ring_forward(query, key, value, branch)
        found = ring_backward(dout, query, key, value, out, lse, branch)
        total = tuple(a.add_(b) for a, b in zip(total, found, strict=True)) if total else found
    dquery, dkey, dvalue = total
    return dquery, dkey, dvalue


class _Backward:
    """Backward of one rank: its gradients, and those of remote rows, returned to their owners.

    Args:
        call: everything but the tensors.
        inputs: this rank's query, key and value.
        merged: what forward found, and the gradient of its out.
    """

    def __init__(self, call: RingCall, inputs: compute.Inputs, merged: compute.Merged) -> None:
        self.inputs, self._call, self._merged = inputs, call, merged
        query = inputs.query
        self._tiles, self.sums = call.tiles(query), call.sums(query)
        self.rounds = call.rounds
        self._covers = all(one.covers for one in self.rounds)
        create = torch.empty if self._covers else torch.zeros
        additions = max(one.mean_additions for one in self.rounds)
        heads_per_kv = self._tiles.heads_per_kv
        self.dquery, self.dkey, self.dvalue = (
            create(x.shape, dtype=sum_dtype(query, additions * count), device=x.device)
            for x, count in zip(inputs, (1, heads_per_kv, heads_per_kv), strict=True)
        )
        wide = call.plan.plan.returns_wide
        self._returned = accumulate_dtype(query.dtype) if wide else query.dtype
        self._home = Home(call.exchange, self.dkey, self.dvalue, self._returned)
        self._returning: deque[GradientReturn] = deque()

    def compute_round(
        self, one: RankPlan, rows: JoinedRows | None, arrivals: Iterator[Fetched]
    ) -> None:
        """Compute the local tiles of a round, and those of the rows that arrive for it."""
        is_last = one is self.rounds[-1]
        own = own_schedule(one, self._tiles, self.inputs.query.shape[3], self._call.joined)
        late: Sequence[TileGroup] = ()
        if one.is_alone or own.launches or rows is not None:
            late = self._compute_own(own, rows, all_now=one.is_alone or not is_last)
        elif is_last:  # something must be left to do while its gradients are returned
            late = self._compute_early_half(one)
        else:
            self._compute_local(one.local_groups, stores_first=self._covers)
        steps_left = one.num_steps
        for work in self._call.arrived(one, rows, arrivals):
            dslots = None
            steps_left -= len(work.steps)
            # The last step waits for none: nothing is fetched after it, so there is room.
            if steps_left or not is_last:
                self._add_returned()
            if work.slots is not None:
                dslots = self._compute_arrived(work)
            self.sums.finish()  # a ring frees its buffers before the next are made
            self._return(work, dslots)
            del work, dslots
        if rows is not None and len(late) > 1:  # the last one hides what has come back meanwhile
            *late, last = late
            self._compute_local(late, stores_first=False)
            self._add_returned(all_of_them=True)
            late = (last,)
        self._compute_local(late, stores_first=False)

    def _return(self, work: Arrived, dslots: torch.Tensor | None) -> None:
        """Return gradients of others' rows, and add those of this rank's own, if there are any."""
        if work.joined is None or dslots is None:
            self._start_returns(work, dslots)
        else:  # beside what is computed next
            add_all = partial(self._add_joined, work, work.joined, dslots)
            into, is_long = (self.dkey, self.dvalue), work.joined.is_long
            self.sums.run(add_all, dslots, into=into, is_long=is_long, holds=False)

    def _add_joined(self, work: Arrived, rows: JoinedRows, dslots: torch.Tensor) -> None:
        self._start_returns(work, dslots)
        rows.add_own(dslots, self.dkey, self.dvalue)

    def _start_returns(self, work: Arrived, dslots: torch.Tensor | None) -> None:
        for fetched, found in work.returned(dslots):
            while work.joined is not None and self._returning_bytes > RETURNING_BYTES:
                self._returning.popleft().finish()
            self._returning.append(self._home.start(fetched, found))
            del fetched, found

    def finish(self) -> None:
        """Add returned gradients that are still in flight: there is nothing left to compute."""
        if self._call.joined is not None:  # by the stream that has the memory that they come to
            self._add_returned(all_of_them=True)
        self.sums.finish()
        self.sums.join()
        for last in self._returning:
            last.finish()

    def _compute_own(
        self, own: OwnSchedule, rows: JoinedRows | None, *, all_now: bool
    ) -> Sequence[TileGroup]:
        """Compute a schedule: all of it, or all but the groups that are returned for later."""
        gradients = compute.Gradients(self.dquery, self.dkey, self.dvalue)
        first = gradients._replace(stores_query=True, stores_keys=True)
        self._compute_groups(own.covering, own, first)
        if rows is not None:
            rows.begin()
        given = self._tiles, self.inputs, self._merged, gradients, self.sums
        for launch in own.launches:
            backward_own(launch, *given, detached=self._call.detached)
        # Some are left to do while gradients are returned, but not all while rows are fetched.
        early = 0 if own.covering or own.launches else 1
        now = own.others if all_now else own.others[:early]
        self._compute_groups(now, own, gradients)
        return own.others[len(now) :]

    def _compute_early_half(self, one: RankPlan) -> Sequence[TileGroup]:
        """Compute half of a rank's own tiles; return the other half."""
        early, late, late_heads = one.local_halves
        self._compute_local(early, stores_first=self._covers)
        if self._covers and late_heads is not None:
            heads_per_kv = self._tiles.heads_per_kv
            for x, heads in ((self.dquery, heads_per_kv), (self.dkey, 1), (self.dvalue, 1)):
                x[:, :, late_heads.start * heads : late_heads.stop * heads].zero_()
        return late

    def _compute_groups(
        self, groups: Iterable[TileGroup], own: OwnSchedule, gradients: compute.Gradients
    ) -> None:
        for group in groups:
            merged = self._merged_of(group, own) if self._call.detached else self._merged
            compute.backward(group, self._tiles, self.inputs, merged, gradients, self.sums)

    def _merged_of(self, group: TileGroup, own: OwnSchedule) -> compute.Merged:
        """What backward of a group starts from where branch weights are constants.

        Delta is of the branch's own out, which is computed again; all else is of the merged one.
        """
        out = torch.empty_like(self._merged.out)
        lse = torch.empty_like(self._merged.lse)
        result = compute.Result(out, lse, stores=True)
        compute.forward(group, self._tiles, self.inputs, result, self.sums)
        self.sums.join()
        zero_keys = [each for each in own.zero_keys if each.branch == group.branch]
        merge_zero_keys(zero_keys, out, lse.transpose(1, 2), self._tiles.heads_per_kv)
        return replace(self._merged, out=out)

    def _compute_local(self, groups: Iterable[TileGroup], *, stores_first: bool) -> None:
        for number, group in enumerate(groups):
            stores = stores_first and number == 0
            gradients = compute.Gradients(self.dquery, self.dkey, self.dvalue, stores, stores)
            compute.backward(group, self._tiles, self.inputs, self._merged, gradients, self.sums)

    def _add_returned(self, *, all_of_them: bool = False) -> None:
        """Have returned gradients added behind the next compute, but for the most recent."""
        most_bytes = RETURNING_BYTES if self._call.gathers and not all_of_them else -1
        while self._returning and self._returning_bytes > most_bytes:
            one = self._returning.popleft()
            self.sums.start(one.finish, *one.tensors, into=(self.dkey, self.dvalue))

    def _compute_arrived(self, work: Arrived) -> torch.Tensor:
        """Add gradients of what has arrived to those of the query; return those of its slots."""
        assert work.slots is not None
        query = self.inputs.query
        create = torch.empty if work.storing else torch.zeros
        dslots = create(work.slots.shape, dtype=self._returned, device=query.device)
        keys, values, dkeys, dvalues = map(by_slot, (*work.slots, *dslots))
        inputs = compute.Inputs(query, keys, values)
        for number, group in enumerate(work.groups):
            gradients = compute.Gradients(
                self.dquery, dkeys, dvalues, stores_keys=number < work.storing
            )
            compute.backward(group, self._tiles, inputs, self._merged, gradients, self.sums)
        if work.joined is None:
            self.sums.join(dslots)
        return dslots

    @property
    def _returning_bytes(self) -> int:
        return sum(one.nbytes for one in self._returning)
