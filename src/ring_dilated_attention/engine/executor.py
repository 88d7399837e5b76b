"""Run the program of a rank on tensors: dilated attention of its shard, forward and backward.

`plan.lower` says what is done and in which order; a method here does each kind of action.

Shape legend: B batch, n local rows, H query heads, K KV heads, D head_dim, R rows of a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch

from ..exchange import Exchange, Pending
from ..plan import Action, Message, RankPlan, TileGroup, lower
from ..tiles import Selection, accumulate_dtype
from . import compute, transfer
from .accumulate import Accumulator, kernels_on, sum_dtype
from .blocks import by_slot, readable, readable_in_backward
from .compute import Gradients, Inputs, Merged, Result, TileCall, merge_zero_keys
from .device_tables import TABLES
from .own_rows import OwnSchedule, backward_own, forward_own, own_schedule


@dataclass(frozen=True)
class RingCall:
    """What calls of one kind are on one rank: everything but their tensors and the exchange."""

    plan: RankPlan  # what the rank does
    batch: int
    head_dim: int
    backend: Selection  # what computes tiles
    scale: float  # factor on the scores
    gathers: bool  # whether all messages are in flight behind the running compute, or one
    workspace: float | None = None  # the most that slices allocate; see `dilated_attention`
    detached: bool = False  # whether backward takes the weights of branches for constants
    softcap: float | None = None  # see `TileCall`

    @cached_property
    def prepared(self) -> Prepared:
        """Its schedules."""
        return Prepared(self)

    @cached_property
    def branches(self) -> list[RingCall]:
        """A call of each branch by itself."""
        ranks = (plan.rank(self.plan.index) for plan in self.plan.plan.single_branches)
        return [replace(self, plan=rank, detached=False) for rank in ranks]


class Prepared:
    """Schedules, shared by all calls of one kind.

    Attributes:
        covers: whether nothing is there to add to: groups that come first store their results.
        additions: a bound on how many tiles add to a row.
        tile_call: what tiles need to know of the call.
        own: how the rank's own rows are computed, in each round: all heads, or some at a
            time.
        forward: the actions of forward.
    """

    def __init__(self, call: RingCall) -> None:
        batch, head_dim = call.batch, call.head_dim
        plan, rounds = call.plan.plan, call.plan.rounds(gathers=call.gathers)
        self._lower = partial(lower, call.plan, gathers=call.gathers)
        self.forward = self._lower(backward=False)
        self.covers = all(each.covers for each in rounds)
        self.additions = max(each.mean_additions for each in rounds)
        heads_per_kv, flops = plan.num_heads // plan.num_kv_heads, 0.0
        # Packed documents have the limits of short calls: they are rarely seen twice, and a kernel
        # call of each takes the CPU longer than it saves the GPU.
        if len(plan.documents) <= 2:
            flops = 4.0 * head_dim * batch * heads_per_kv * call.plan.own_pairs
        options = call.backend, call.scale, batch, heads_per_kv, call.workspace
        self.tile_call = TileCall(*options, own_flops=flops, softcap=call.softcap)
        # By heads: threads that plan at the same time may have equal rounds of their own.
        self.own = {x.plan.narrowed_to: own_schedule(x, self.tile_call, head_dim) for x in rounds}

    @cached_property
    def backward(self) -> Sequence[Action]:
        """The actions of backward, written down by the first one."""
        return self._lower(backward=True)


def ring_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: RingCall, ends: Exchange
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out (B, n, H, D), contiguous, and lse (B, H, n) of this rank: see the operator's docstring.

    Of query (B, n, H, D), key and value (B, n, K, D); `ends` is the rank's end of the group.
    """
    run = Forward(call, ends, Inputs(*(readable(x, call.backend) for x in (query, key, value))))
    run.all(backward=False)
    return run.out.to(query.dtype), run.lse


def ring_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
    ends: Exchange,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's query, key and value, contiguous: see the operator's docstring.

    Of dout (B, n, H, D) and what `ring_forward` took and returned.
    """
    if call.detached and not call.plan.is_alone:
        return _branch_by_branch(dout, Inputs(query, key, value), lse, call, ends)
    dtypes = query.dtype, key.dtype, value.dtype
    dout, query, key, value, out = readable_in_backward(dout, query, key, value, out, call.backend)
    run = Backward(call, ends, Inputs(query, key, value), Merged(dout, out, lse.contiguous()))
    run.all(backward=True)
    dquery, dkey, dvalue = (x.to(dtype) for x, dtype in zip(run.totals[:3], dtypes, strict=True))
    return dquery, dkey, dvalue


def ring_received(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
    ends: Exchange,
) -> tuple[torch.Tensor]:
    """The gradient P^T dout of this rank's values (B, n, K, D), in float32 or float64.

    That of `ring_backward` for any value and out: the key and the query stand in for these, and the
    other gradients mean nothing.
    """
    tensors = readable_in_backward(dout, query, key, key, query, call.backend)
    dout, query, key, value, out = tensors
    inputs, merged = Inputs(query, key, value), Merged(dout, out, lse.contiguous())
    run = Backward(call, ends, inputs, merged, wide=True)
    run.all(backward=True)
    return (run.totals.values,)


def _branch_by_branch(
    dout: torch.Tensor, inputs: Inputs, lse: torch.Tensor, call: RingCall, ends: Exchange
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ring_backward` where a branch's own out takes the place of the merged one.

    ``delta = rowsum(dout * out)`` is all that tells the two apart. The branch's out is worked out
    again: to keep it would take as many tensors as there are branches.
    """
    total: tuple[torch.Tensor, ...] = ()
    for branch in call.branches:
        out, _ = ring_forward(*inputs, branch, ends)
        found = ring_backward(dout, *inputs, out, lse, branch, ends)
        total = tuple(a.add_(b) for a, b in zip(total, found, strict=True)) if total else found
    dquery, dkey, dvalue = total
    return dquery, dkey, dvalue


class _InFlight(NamedTuple):
    """A message on its way: rows that are sent live until then, others (2, B, R, D) are received.

    None: nothing is sent, or received.
    """

    pending: Pending
    sent: torch.Tensor | None
    into: torch.Tensor | None


class Run:
    """A program that is run on tensors: what both directions have in common."""

    def __init__(self, call: RingCall, ends: Exchange, inputs: Inputs) -> None:
        self.call, self.ends, self.inputs = call, ends, inputs
        self.prepared = call.prepared
        self.tile_call, self.own = self.prepared.tile_call, self.prepared.own
        self.sums = Accumulator(inputs.query.device)
        self._fetching: deque[_InFlight] = deque()
        self._packed: torch.Tensor | None = None  # which the next message sends, too
        self._arrived: torch.Tensor | None = None  # (2, B, R, D)

    def all(self, *, backward: bool) -> None:
        """Run the program of a direction."""
        TABLES.calls += 1
        program = self.prepared.backward if backward else self.prepared.forward
        with kernels_on(self.inputs.query.device), self.sums:
            for action in program:
                getattr(self, f"do_{action.kind}")(action)
            self.sums.finish()
            self.sums.join()

    def do_fetch(self, action: Action) -> None:
        """Send rows to one rank, and receive rows of another."""
        assert action.step is not None
        _, key, value = self.inputs
        send, packed = action.step.send, None
        if send is not None:
            packed = transfer.pack(key, value, send) if self._packed is None else self._packed
            self._packed = packed if action.keeps else None
        self._fetching.append(self.start(action, packed, key.dtype))

    def start(self, action: Action, rows: torch.Tensor | None, dtype: torch.dtype) -> _InFlight:
        """Start the transfer of an action: send `rows`, and receive others of `dtype`."""
        send = receive = into = None
        if action.sends is not None and rows is not None:
            send = action.sends[0], rows
        if action.receives is not None:
            source, count = action.receives
            key = self.inputs.keys
            into = key.new_empty(2, key.shape[0], count, key.shape[3], dtype=dtype)
            receive = source, into
        return _InFlight(self.ends.start(send, receive), rows, into)

    def do_wait(self, action: Action) -> None:
        """Wait for the rows of a step."""
        pending, _, self._arrived = self._fetching.popleft()
        pending.wait()

    def do_tiles(self, action: Action) -> None:
        """Compute own rows, or those that have arrived."""
        if action.step is None:
            self.compute_own(action)
        elif self._arrived is not None and action.step.receive is not None:
            slots, self._arrived = transfer.spread(self._arrived, action.step.receive), None
            self.compute_slots(action, slots)

    def compute_own(self, action: Action) -> None:
        """Tiles of the rank's own rows, or some of them."""
        raise NotImplementedError

    def compute_slots(self, action: Action, slots: torch.Tensor) -> None:
        """Tiles whose keys have arrived; lets go of these."""
        raise NotImplementedError


class Forward(Run):
    """Forward of one rank.

    Attributes:
        out: (B, n, H, D), perhaps in a wider dtype than the query.
        lse: (B, H, n).
    """

    def __init__(self, call: RingCall, ends: Exchange, inputs: Inputs) -> None:
        super().__init__(call, ends, inputs)
        query = inputs.query
        batch, length, heads, _ = query.shape
        create = query.new_empty if self.prepared.covers else query.new_zeros
        self.out = create(query.shape, dtype=sum_dtype(query, self.prepared.additions))
        self.lse = query.new_empty((batch, heads, length), dtype=accumulate_dtype(query.dtype))
        if not self.prepared.covers:
            self.lse.fill_(-torch.inf)

    def compute_own(self, action: Action) -> None:
        """Groups that cover all queries are stored, all others merged into what is stored."""
        own, result = self.own[action.rank.plan.narrowed_to], Result(self.out, self.lse)
        self._compute(own.covering, self.inputs, result._replace(stores=True))
        for launch in own.launches:
            add_all = partial(forward_own, launch, self.tile_call, self.inputs, result)
            self.sums.run(add_all, *self.inputs, into=result[:2], holds=False)
        self._compute(own.others, self.inputs, result)

    def compute_slots(self, action: Action, slots: torch.Tensor) -> None:
        """See `Run.compute_slots`."""
        inputs = Inputs(self.inputs.query, *map(by_slot, slots))
        self._compute(action.groups, inputs, Result(self.out, self.lse))
        self.sums.join(slots)  # a ring frees its buffers before the next are made

    def _compute(self, groups: Sequence[TileGroup], inputs: Inputs, result: Result) -> None:
        for group in groups:
            compute.forward(group, self.tile_call, inputs, result, self.sums)

    def do_zero(self, action: Action) -> None:
        """Merge zero keys, except those that row-by-row launches have counted."""
        self.sums.join()
        own, heads_per_kv = self.own[action.rank.plan.narrowed_to], self.tile_call.heads_per_kv
        merge_zero_keys(own.zero_keys, self.out, self.lse.transpose(1, 2), heads_per_kv)


class Backward(Run):
    """Backward of one rank: its gradients, and those of remote rows, returned to their owners.

    With `wide` those of keys and values are summed up, and returned, in float32 or float64.

    Attributes:
        totals: gradients of query, key and value, perhaps in wider dtypes.
    """

    def __init__(
        self, call: RingCall, ends: Exchange, inputs: Inputs, merged: Merged, *, wide: bool = False
    ) -> None:
        super().__init__(call, ends, inputs)
        self._merged, query, additions = merged, inputs.query, self.prepared.additions
        create = query.new_empty if self.prepared.covers else query.new_zeros
        of_keys = sum_dtype(query, additions * self.tile_call.heads_per_kv)
        of_keys = accumulate_dtype(query.dtype) if wide else of_keys
        dquery = create(query.shape, dtype=sum_dtype(query, additions))
        dkey, dvalue = (create(x.shape, dtype=of_keys) for x in inputs[1:])
        self.totals = Gradients(dquery, dkey, dvalue)
        wide = wide or call.plan.plan.returns_wide
        self._returned_dtype = accumulate_dtype(query.dtype) if wide else query.dtype
        self._dslots: torch.Tensor | None = None
        self._returning: deque[_InFlight] = deque()

    def compute_own(self, action: Action) -> None:
        """Compute own tiles: part "first" before those of other ranks, "rest" after, or "all".

        First are the covering group and the launches, or where there are none one other group: the
        covering group has to be, since it stores its results where all others add to them.
        """
        own = self.own[action.rank.plan.narrowed_to]
        if action.part != "rest":
            storing = self.totals._replace(stores_query=True, stores_keys=True)
            self._compute(own.covering, own, storing)
            merged = self._merged
            given = self.tile_call, self.inputs, merged, self.totals
            reads = *self.inputs, merged.dout, merged.out, merged.lse
            for launch in own.launches:
                add_all = partial(backward_own, launch, *given, detached=self.call.detached)
                self.sums.run(add_all, *reads, into=self.totals[:3], holds=False)
        early = 0 if own.covering or own.launches else 1
        others = {"all": own.others, "first": own.others[:early], "rest": own.others[early:]}
        self._compute(others[action.part], own, self.totals)

    def _compute(self, groups: Sequence[TileGroup], own: OwnSchedule, gradients: Gradients) -> None:
        for group in groups:
            merged = self._merged_of(group, own) if self.call.detached else self._merged
            compute.backward(group, self.tile_call, self.inputs, merged, gradients, self.sums)

    def _merged_of(self, group: TileGroup, own: OwnSchedule) -> Merged:
        """Inputs of a group's backward where branch weights are constants ("detached").

        Out, of which delta is made, is the branch's own, computed again; lse is the merged one.
        """
        out, lse = torch.empty_like(self._merged.out), torch.empty_like(self._merged.lse)
        result = Result(out, lse, stores=True)
        compute.forward(group, self.tile_call, self.inputs, result, self.sums)
        self.sums.join()
        zero_keys = [each for each in own.zero_keys if each.branch == group.branch]
        merge_zero_keys(zero_keys, out, lse.transpose(1, 2), self.tile_call.heads_per_kv)
        return replace(self._merged, out=out)

    def compute_slots(self, action: Action, slots: torch.Tensor) -> None:
        """Add gradients of the query, and make those of the slots, which `return` sends."""
        assert action.step is not None
        query, storing = self.inputs.query, action.step.storing
        create = torch.empty if storing else torch.zeros
        dslots = create(slots.shape, dtype=self._returned_dtype, device=query.device)
        keys, values, dkeys, dvalues = map(by_slot, (*slots, *dslots))
        inputs = Inputs(query, keys, values)
        for number, group in enumerate(action.groups):
            gradients = Gradients(self.totals.query, dkeys, dvalues, stores_keys=number < storing)
            compute.backward(group, self.tile_call, inputs, self._merged, gradients, self.sums)
        self.sums.join(dslots)
        self._dslots = dslots

    def do_return(self, action: Action) -> None:
        """Send gradients of the rows that have arrived to their owner, and receive those of own."""
        assert action.step is not None
        self.sums.finish()  # a ring frees its buffers before the next are made
        gradients, arrived = None, action.step.receive
        if arrived is not None and self._dslots is not None:
            gradients = transfer.sum_slots(self._dslots, arrived)
            self._dslots = None
        self._returning.append(self.start(action, gradients, self._returned_dtype))

    def do_add(self, action: Action) -> None:
        """Add gradients of own rows that another rank has returned."""
        assert action.step is not None
        (pending, sent, returned), (_, dkey, dvalue) = self._returning.popleft(), self.totals[:3]
        add_all = partial(_add_returned, pending, returned, action.step.send, dkey, dvalue)
        if action.behind:
            held = [x for x in (sent, returned) if x is not None]
            self.sums.start(add_all, *held, into=(dkey, dvalue))
        else:
            self.sums.join()
            add_all()


def _add_returned(
    pending: Pending,
    returned: torch.Tensor | None,
    message: Message | None,
    dkey: torch.Tensor,
    dvalue: torch.Tensor,
) -> None:
    pending.wait()
    if returned is not None and message is not None:
        transfer.add_returned(dkey, dvalue, returned, message)
