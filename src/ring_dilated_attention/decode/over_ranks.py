"""Results over the keys of each rank become one over the keys of all."""

from __future__ import annotations

import torch

from ..engine import merge_
from ..exchange import Exchange, all_gather


def merged_over_ranks(
    ends: Exchange, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over the keys of all ranks, the same bits on each, inside of a call.

    Args:
        ends: this rank's end of the group.
        out: over this rank's keys, (batch, m, heads, head_dim), float32 or float64.
        lse: (batch, m, heads), of the same dtype.

    Returns:
        out and lse over all keys.
    """
    total, *others = all_gather(ends, torch.cat([out, lse.unsqueeze(-1)], -1))
    out, lse = total[..., :-1], total[..., -1]
    for other in others:
        merge_(out, lse, other[..., :-1], other[..., -1])
    return out, lse
