"""Walk a plan: dilated attention of one rank's shard, forward and backward.

Shape legend: B batch, n local rows, H query heads, K KV heads, D head_dim, R rows of a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain

import torch

from . import compute
from .accumulate import Accumulator
from .exchange import Exchange
from .lanes import LANES, side_by_side
from .plan import FEW_ADDITIONS, LocalHalves, RankPlan, TileGroup
from .tiles import Selection, accumulate_dtype
from .transfer import Fetched, Fetches, GradientReturn
from .views import by_slot
from .zero_keys import merge_zero_keys

_RETURNING_BYTES = 64 << 20
"""Of gradients on their way home behind a gather: so many are not waited for before the end."""


@dataclass(frozen=True)
class RingCall:
    """Everything but the tensors of one call on one rank."""

    plan: RankPlan
    exchange: Exchange
    backend: Selection
    scale: float
    gathers: bool  # whether all messages are in flight behind the running compute, or one
    workspace: float | None = None  # see `dilated_attention`

    def parts(self, *, backward: bool) -> tuple[RankPlan, ...]:
        """What is run one after the other."""
        return self.plan.parts(gathers=self.gathers, backward=backward)

    def fetch(self, parts: Iterable[RankPlan], key: torch.Tensor, value: torch.Tensor) -> Fetches:
        """Start fetching the rows of all steps of all parts, in order."""
        steps = chain.from_iterable(part.steps() for part in parts)
        depth = self.plan.world_size - 1 if self.gathers else 1
        return Fetches(steps, self.exchange, key, value, depth=depth)

    def sums(self, query: torch.Tensor, lanes: int = 1) -> Accumulator:
        """Through which results are added up, in one of so many lanes."""
        # The other lane computes while the results of this one are added.
        most_held = 2 if lanes == 1 else 1
        return Accumulator(query.device, getattr(self.exchange, "stopwatch", None), most_held)

    def tiles(self, query: torch.Tensor, lanes: int = 1) -> compute.TileCall:
        """What tiles in one of so many lanes need to know of the call."""
        group, batch = self.plan.plan.num_heads // self.plan.plan.num_kv_heads, query.shape[0]
        return compute.TileCall(self.backend, self.scale, batch, group, self.workspace, lanes)


def attention_forward(
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
    query, key, value = (unit_last_stride(x) for x in (query, key, value))
    batch, length, num_heads, _ = query.shape
    parts = call.parts(backward=False)
    tiles, sums = call.tiles(query), call.sums(query)
    covers = all(part.covers for part in parts)
    create = torch.empty if covers else torch.zeros
    dtype = _sum_dtype(query, max(part.mean_additions for part in parts))
    out = create(query.shape, dtype=dtype, device=query.device)
    lse = torch.empty(
        batch, num_heads, length, dtype=accumulate_dtype(query.dtype), device=query.device
    )
    if not covers:
        lse.fill_(-torch.inf)
    with autocast_off(query.device):
        fetches = call.fetch(parts, key, value)
        for part in parts:
            for number, group in enumerate(part.local_groups):
                store = covers and number == 0
                compute.forward(group, tiles, query, key, value, out, lse, sums, store=store)
            for _ in range(part.num_steps):
                fetched = fetches.arrive()
                if fetched.slots is not None:
                    keys, values = map(by_slot, fetched.slots)
                    for group in fetched.step.groups:
                        compute.forward(
                            group, tiles, query, keys, values, out, lse, sums, store=False
                        )
                    del keys, values
                del fetched
        sums.join()
        merge_zero_keys(call.plan.zero_keys, out, lse.transpose(1, 2), tiles.group)
    return out.to(query.dtype), lse


def attention_backward(
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
        out: (B, n, H, D), as `attention_forward` returned it.
        lse: (B, H, n), likewise.
        call: everything else.

    Returns:
        dquery, dkey, dvalue: contiguous, in the dtypes of query, key and value.
    """
    query, key, value = (unit_last_stride(x) for x in (query, key, value))
    parts = call.parts(backward=True)
    create = torch.empty if all(part.covers for part in parts) else torch.zeros
    additions = max(part.mean_additions for part in parts)
    group = call.plan.plan.num_heads // call.plan.plan.num_kv_heads
    dquery, dkey, dvalue = (
        create(x.shape, dtype=_sum_dtype(query, additions * members), device=x.device)
        for x, members in ((query, 1), (key, group), (value, group))
    )
    merged = dout.contiguous(), out, lse
    lanes = min(LANES, len(parts))
    work = _Backward(call, lanes, query, key, value, merged, dquery, dkey, dvalue)
    with autocast_off(query.device):
        side_by_side([work.run(parts[lane::lanes]) for lane in range(lanes)], query.device)
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


@dataclass(frozen=True, eq=False)
class _Backward:
    """What the lanes of a backward call share: see `attention_backward`.

    Heads of different parts have nothing to do with each other, nor have their rows of `dquery`,
    `dkey` and `dvalue`.
    """

    call: RingCall
    lanes: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    merged: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dout, out, lse
    dquery: torch.Tensor
    dkey: torch.Tensor
    dvalue: torch.Tensor

    def run(self, parts: Sequence[RankPlan]) -> Iterator[None]:
        """Compute parts one after the other.

        Others go on when the first rows are on their way, after each step, and before the last
        waits.
        """
        lane = _Lane(self, parts)
        yield
        covers = all(part.covers for part in parts)
        for part in parts:
            early, late, late_heads = LocalHalves(part.local_groups, (), None)
            if part is parts[-1]:  # something must be left to do while its gradients come home
                early, late, late_heads = part.local_halves
            lane.compute_local(early, stores_first=covers)
            if covers and late_heads is not None:
                group = lane.tiles.group
                for x, members in ((self.dquery, group), (self.dkey, 1), (self.dvalue, 1)):
                    x[:, :, late_heads.start * members : late_heads.stop * members].zero_()
            for number in range(1, part.num_steps + 1):
                is_last = number == part.num_steps and part is parts[-1]
                # The last step waits for none: nothing is fetched after it, so there is room.
                lane.run_step(adds_returned=not is_last)
                yield
        lane.compute_local(late, stores_first=False)
        yield
        lane.finish()


class _Lane:
    """Computes parts of a backward call, on the current stream; see `_Backward.run`."""

    def __init__(self, shared: _Backward, parts: Sequence[RankPlan]) -> None:
        self._shared = shared
        self._fetches = shared.call.fetch(parts, shared.key, shared.value)
        self.tiles = shared.call.tiles(shared.query, shared.lanes)
        self._sums = shared.call.sums(shared.query, shared.lanes)
        self._merged = compute.Merged(*shared.merged)
        wide = shared.call.plan.plan.returns_wide
        self._returned = accumulate_dtype(shared.query.dtype) if wide else shared.query.dtype
        self._returning: deque[GradientReturn] = deque()

    def compute_local(self, groups: Iterable[TileGroup], *, stores_first: bool) -> None:
        shared = self._shared
        for number, group in enumerate(groups):
            compute.backward(
                group, self.tiles, shared.query, shared.key, shared.value, self._merged,
                shared.dquery, shared.dkey, shared.dvalue, self._sums,
                store=stores_first and number == 0,
            )  # fmt: skip

    def run_step(self, *, adds_returned: bool) -> None:
        """Compute a step when its rows are there, and send their gradients home.

        Args:
            adds_returned: whether gradients that come home are added behind the compute, but for
                the most recent.
        """
        shared = self._shared
        # Alone, the next rows travel behind the compute; else behind that of the other lane.
        alone = shared.lanes == 1
        fetched = self._fetches.arrive(starts_next=alone)
        if adds_returned:
            self._add_returned()
        dslots = None if fetched.slots is None else self._compute_slots(fetched, fetched.slots)
        self._sums.finish()  # a ring frees its buffers before the next are made
        fetched = fetched._replace(slots=None)
        if not alone:
            self._fetches.start()
        self._returning.append(
            GradientReturn(
                shared.call.exchange, fetched, dslots, shared.dkey, shared.dvalue, self._returned
            )
        )

    def _add_returned(self) -> None:
        shared = self._shared
        most_bytes = _RETURNING_BYTES if shared.call.gathers else -1
        while self._returning and sum(x.nbytes for x in self._returning) > most_bytes:
            one = self._returning.popleft()
            self._sums.start(one.finish, *one.tensors, into=(shared.dkey, shared.dvalue))

    def _compute_slots(self, fetched: Fetched, slots: torch.Tensor) -> torch.Tensor:
        """Add a step's gradients to `dquery`; return those of its slots."""
        shared, covers = self._shared, fetched.step.covers
        create = torch.empty if covers else torch.zeros
        dslots = create(slots.shape, dtype=self._returned, device=slots.device)
        keys, values, dkeys, dvalues = map(by_slot, (*slots, *dslots))
        for number, group in enumerate(fetched.step.groups):
            compute.backward(
                group, self.tiles, shared.query, keys, values, self._merged,
                shared.dquery, dkeys, dvalues, self._sums,
                store=False, store_keys=covers and number == 0,
            )  # fmt: skip
        self._sums.join(dslots)
        return dslots

    def finish(self) -> None:
        """Wait for what is still to come, and add it: there is nothing to compute meanwhile."""
        self._sums.finish()
        self._sums.join()
        for last in self._returning:
            last.finish()


def _sum_dtype(query: torch.Tensor, additions: float) -> torch.dtype:
    """The dtype in which results of tiles are summed up.

    On CUDA that of the inputs, which needs no second tensor: each addition is made in float32 and
    rounds once. With more than a few additions to most rows rounding would show: then float32, as
    on other devices. float64 for float64 inputs.
    """
    if query.is_cuda and additions <= FEW_ADDITIONS:
        return query.dtype
    return accumulate_dtype(query.dtype)


def autocast_off(device: torch.device) -> AbstractContextManager[None]:
    """Kernels are given the dtypes they are meant to compute in."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def unit_last_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the kernels can read it: head_dim contiguous; else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
