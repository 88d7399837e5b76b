"""Walk a plan: dilated attention of one rank's shard, forward and backward.

Shape legend: B batch, n local rows, H query heads, K KV heads, D head_dim, R rows of a message.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .exchange import Exchange
from .merge import merge_
from .plan import RankPlan, Tile
from .tiles import TileBackend, TileGradients, TileInputs, accumulate_dtype
from .transfer import GradientReturn, fetch
from .views import Block, blocks, by_slot


@dataclass(frozen=True)
class RingCall:
    """Everything but the tensors of one call on one rank."""

    plan: RankPlan
    exchange: Exchange
    backend: TileBackend
    scale: float
    depth: int  # messages in flight behind the running compute

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.plan.plan.num_heads // self.plan.plan.num_kv_heads


class RingDilatedAttention(torch.autograd.Function):
    """Dilated attention with every tensor sharded over the sequence.

    Rank i holds Q_i, O_i (B, n_i, H, D) and K_i, V_i (B, n_i, K, D). K_ij, V_ij are the rows of
    rank j that queries of rank i need: (2, B, R_ij, D), R_ij counted by the plan, each row once.
    The tiles t of rank i cover, once, every (query, visible key) of its queries: those of step 0
    read K_i, V_i, those of step s read K_ij, V_ij with j = i - s (mod p).

    Forward, for s = 0 .. p-1:
        start   receive K_ij, V_ij from j = i-s-1; send K_ki, V_ki to k = i+s+1   [P2P, input dtype]
        tile    O_t, L_t = softmax(scale Q_t K_t^T) V_t, and its lse
        merge   L_i = logaddexp(L_i, L_t); O_i = O_i e^(L_old-L_i) + O_t e^(L_t-L_i)    [float32]
    Saved: Q_i, K_i, V_i, O_i, L_i.

    Backward, given dO_i, with delta_i = rowsum(dO_i * O_i), for s = 0 .. p-1:
        start   as in forward: K_ij, V_ij are exchanged again                     [P2P, input dtype]
        tile    P = exp(scale Q_t K_t^T - L_i);  dS = scale P * (dO_t V_t^T - delta_i)
                dQ_i += dS K_t;  dK_t = dS^T Q_t;  dV_t = P^T dO_t
        home    s = 0: dK_i += dK_t, dV_i += dV_t
                s > 0: send dK_ij, dV_ij to their owner j = i-s; receive dK_ki, dV_ki from
                k = i+s and add them to dK_i, dV_i                                  [P2P, float32]

    Since the merged softmax is one softmax, every tile uses the same L_i and delta_i, and gradients
    only add up. Transfers of step s+1 (ring), or of all steps (gather), run behind the tiles of
    step s; the way home of step s runs behind the tiles of step s+1. float32 is float64 for float64
    inputs. The lse is returned for use outside of autograd: it is marked non-differentiable.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: RingCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (_unit_last_stride(x) for x in (query, key, value))
        with _autocast_off(query.device):
            out, lse = _forward(query, key, value, call)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(  # noqa: D102
        ctx: Any, dout: torch.Tensor, dlse: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of dilated_attention cannot be differentiated again; "
                "backward was called with create_graph=True"
            )
        query, key, value, out, lse = ctx.saved_tensors
        with _autocast_off(query.device):
            return *_backward(dout, query, key, value, out, lse, ctx.call), None


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: RingCall
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = accumulate_dtype(query.dtype)
    batch, length, num_heads, _ = query.shape
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    lse = torch.full((batch, num_heads, length), -torch.inf, dtype=dtype, device=query.device)

    def run(tile: Tile, keys: torch.Tensor, values: torch.Tensor) -> None:
        for block in blocks(tile, batch, call.group_size):
            inputs = _tile_inputs(block, call, query, keys, values)
            tile_out, tile_lse = call.backend.forward(inputs)
            merge_(block.queries(out), block.queries(lse.transpose(1, 2)), tile_out, tile_lse)

    arrivals = fetch(call.plan, call.exchange, key, value, depth=call.depth)
    for tile in call.plan.local:
        run(tile, key, value)
    for fetched in arrivals:
        if fetched.slots is not None:
            for tile in fetched.step.tiles:
                run(tile, *map(by_slot, fetched.slots))
        del fetched
    return out.to(query.dtype), lse


def _backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dout = dout.contiguous()
    dtype = lse.dtype
    delta = (dout.to(dtype) * out).sum(-1)
    dquery, dkey, dvalue = (
        torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (query, key, value)
    )

    def run(
        tile: Tile,
        keys: torch.Tensor,
        values: torch.Tensor,
        dkeys: torch.Tensor,
        dvalues: torch.Tensor,
    ) -> None:
        for block in blocks(tile, query.shape[0], call.group_size):
            inputs = _tile_inputs(block, call, query, keys, values)
            gradients = TileGradients(
                block.queries(dout),
                block.queries(out),
                block.queries(lse.transpose(1, 2)),
                block.queries(delta),
            )
            tile_dq, tile_dk, tile_dv = call.backend.backward(inputs, gradients)
            block.queries(dquery).add_(tile_dq)
            block.keys(dkeys).add_(tile_dk)
            block.keys(dvalues).add_(tile_dv)

    arrivals = fetch(call.plan, call.exchange, key, value, depth=call.depth)
    for tile in call.plan.local:
        run(tile, key, value, dkey, dvalue)
    returning: GradientReturn | None = None
    for fetched in arrivals:
        dslots = None
        if fetched.slots is not None:
            dslots = torch.zeros(fetched.slots.shape, dtype=dtype, device=key.device)
            for tile in fetched.step.tiles:
                run(tile, *map(by_slot, (*fetched.slots, *dslots)))
        if returning is not None:
            returning.finish()
            returning = None  # frees its buffers before the next are made
        returning = GradientReturn(call.exchange, fetched, dslots, dkey, dvalue)
        del fetched, dslots
    if returning is not None:
        returning.finish()
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


def _tile_inputs(
    block: Block, call: RingCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> TileInputs:
    return TileInputs(
        block.queries(query),
        block.keys(keys),
        block.keys(values),
        block.tile.is_causal,
        call.scale,
    )


def _autocast_off(device: torch.device) -> AbstractContextManager[None]:
    """Kernels are given the dtypes they are meant to compute in."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _unit_last_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where the kernels can read it: head_dim contiguous; else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
