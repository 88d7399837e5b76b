"""Walk a plan: dilated attention of one rank's shard, forward and backward.

Shape legend: B batch, n local rows, H query heads, K KV heads, D head_dim, R rows of a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from . import compute
from .accumulate import Accumulator
from .exchange import Exchange
from .plan import RankPlan, TileGroup
from .tiles import Selection, accumulate_dtype
from .transfer import GradientReturn, fetch
from .views import by_slot

_FEW_ADDITIONS = 8.0
"""Additions to a row, on average, that may round to half precision each: errors of out and of the
gradients stay below those of the kernels (benchmarks/results)."""


@dataclass(frozen=True)
class RingCall:
    """Everything but the tensors of one call on one rank."""

    plan: RankPlan
    exchange: Exchange
    backend: Selection
    scale: float
    depth: int  # messages in flight behind the running compute
    workspace: float | None = None  # see `dilated_attention`

    def tiles(self, query: torch.Tensor) -> compute.TileCall:
        """What tiles need to know of the call."""
        group = self.plan.plan.num_heads // self.plan.plan.num_kv_heads
        return compute.TileCall(self.backend, self.scale, query.shape[0], group, self.workspace)


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
    covers, tiles, sums = call.plan.covers, call.tiles(query), Accumulator(query.device)
    create = torch.empty if covers else torch.zeros
    dtype = _sum_dtype(query, call.plan)
    out = create(query.shape, dtype=dtype, device=query.device)
    lse = torch.empty(
        batch, num_heads, length, dtype=accumulate_dtype(query.dtype), device=query.device
    )
    if not covers:
        lse.fill_(-torch.inf)
    with autocast_off(query.device):
        arrivals = fetch(call.plan, call.exchange, key, value, depth=call.depth)
        for number, group in enumerate(call.plan.local_groups):
            store = covers and number == 0
            compute.forward(group, tiles, query, key, value, out, lse, sums, store=store)
        for fetched in arrivals:
            if fetched.slots is not None:
                keys, values = map(by_slot, fetched.slots)
                for group in fetched.step.groups:
                    compute.forward(group, tiles, query, keys, values, out, lse, sums, store=False)
                del keys, values
            del fetched
        sums.join()
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
    merged = compute.Merged(dout.contiguous(), out, lse)
    covers, tiles, sums = call.plan.covers, call.tiles(query), Accumulator(query.device)
    create = torch.empty if covers else torch.zeros
    # Gradients that come home are added too.
    dtype = _sum_dtype(query, call.plan)
    dquery, dkey, dvalue = (
        create(x.shape, dtype=dtype, device=x.device) for x in (query, key, value)
    )

    def compute_local(groups: Iterable[tuple[int, TileGroup]]) -> None:
        for number, group in groups:
            compute.backward(
                group, tiles, query, key, value, merged, dquery, dkey, dvalue, sums,
                store=covers and number == 0,
            )  # fmt: skip

    with autocast_off(query.device):
        arrivals = fetch(call.plan, call.exchange, key, value, depth=call.depth)
        local = list(enumerate(call.plan.local_groups))
        # The first of them hides the first fetch, the others the last way home.
        compute_local(local[:1])
        returning: GradientReturn | None = None
        for fetched in arrivals:
            dslots = None
            if fetched.slots is not None:
                fills = fetched.step.covers
                create = torch.empty if fills else torch.zeros
                dslots = create(fetched.slots.shape, dtype=lse.dtype, device=key.device)
                keys, values, dkeys, dvalues = map(by_slot, (*fetched.slots, *dslots))
                for number, group in enumerate(fetched.step.groups):
                    compute.backward(
                        group, tiles, query, keys, values, merged, dquery, dkeys, dvalues, sums,
                        store=False, store_keys=fills and number == 0,
                    )  # fmt: skip
                sums.join()
                del keys, values, dkeys, dvalues
            if returning is not None:
                sums.join()
                returning.finish()
                returning = None  # frees its buffers before the next are made
            returning = GradientReturn(call.exchange, fetched, dslots, dkey, dvalue, lse.dtype)
            del fetched, dslots
        compute_local(local[1:])
        sums.join()
        if returning is not None:
            returning.finish()
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


def _sum_dtype(query: torch.Tensor, plan: RankPlan) -> torch.dtype:
    """The dtype in which results of tiles are summed up.

    On CUDA that of the inputs, which needs no second tensor: each addition is made in float32 and
    rounds once. With more than a few additions to most rows rounding would show: then float32, as
    on other devices. float64 for float64 inputs.
    """
    if query.is_cuda and plan.mean_additions <= _FEW_ADDITIONS:
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
