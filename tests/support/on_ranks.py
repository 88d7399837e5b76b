"""Calls of whole tensors on ranks that are threads of this process."""

from typing import Any

import torch

from ring_dilated_attention import dilated_attention
from ring_dilated_attention.checks import combine, run_case
from ring_dilated_attention.exchange import run_loopback


def outcome(case):
    """What all ranks find in a case, added up."""
    wanted, ranks = case.references(), case.layout.world_size
    (found,) = combine(run_loopback(ranks, lambda ends: [run_case(case, ends, wanted)]))
    return found


def on_ranks(layout, pattern, tensors, dout, attend: Any = dilated_attention, **options: Any):
    """Whole out, gradients and lse (batch, sequence, heads) of a call on the ranks of a layout."""

    def rank(ends):
        leaves = [layout.shard(x, ends.rank, 1).clone().requires_grad_() for x in tensors]
        where = {"group": ends if layout.world_size > 1 else None, "layout": layout}
        out, lse = attend(*leaves, pattern, return_lse=True, **where, **options)
        gradients = torch.autograd.grad(out, leaves, layout.shard(dout, ends.rank, 1))
        return [out.detach(), *gradients, lse.detach().transpose(1, 2)]

    by_rank = run_loopback(layout.world_size, rank)
    return [layout.unshard(shards, 1) for shards in zip(*by_rank, strict=True)]


def out_and_gradients(tensors, dout, attend):
    """Out, gradients and lse of one call on this process, as `on_ranks` returns them."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    return [out.detach(), *gradients, lse.detach().transpose(1, 2)]
