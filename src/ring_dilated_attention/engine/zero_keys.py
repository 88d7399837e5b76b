"""Merge zero keys into the out and lse of the queries that see them.

A key of score 0 and value 0 adds exp(0) to the denominator of a softmax and 0 to its numerator. So
m of them are a tile whose out is 0 and whose lse is log m, merged like any other tile. Nothing is
done for them in backward: they have no gradient, and the merged lse and out, which every tile of
backward uses, already count them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from weakref import WeakKeyDictionary

import torch

from ..caches import keep_few
from ..plan import TileGroup
from .accumulate import merge
from .blocks import Block, families


def merge_zero_keys(
    groups: Sequence[TileGroup], out: torch.Tensor, lse: torch.Tensor, heads_per_kv: int
) -> None:
    """Merge the zero keys of `plan.zero_keys.zero_key_groups` into `out` and `lse`, in place.

    One pass over the rows that see any; temporaries are at most of the size of `lse`.

    Args:
        groups: which queries see how many.
        out: (batch, local_sequence, heads, head_dim), any floating dtype.
        lse: (batch, local_sequence, heads), float32 or float64; may be a transposed view.
        heads_per_kv: query heads of a KV head.
    """
    if not groups:
        return
    zero = torch.zeros(out.shape[-1], dtype=lse.dtype, device=out.device)
    for group in groups:
        for block in _blocks(group, out.shape[0], heads_per_kv):
            out_rows, lse_rows = block.view_queries(out), block.view_queries(lse)
            log_count = torch.full(
                (1,), math.log(block.keys.length), dtype=lse.dtype, device=out.device
            )
            merge(
                out_rows,
                lse_rows,
                zero.expand(out_rows.shape),
                log_count.expand(lse_rows.shape),
                store=False,
            )


KEPT_BLOCKS: WeakKeyDictionary[TileGroup, dict[Hashable, tuple[Block, ...]]] = WeakKeyDictionary()
"""Blocks live as long as the plan of their group, whose size bounds theirs: at most as many blocks
as it has tiles, for each of the last few batch sizes."""
_BATCH_SIZES = 4


def _blocks(group: TileGroup, batch: int, heads_per_kv: int) -> tuple[Block, ...]:
    def make() -> tuple[Block, ...]:
        return tuple(
            block
            for family in families(group.tiles)
            for block in family.blocks(batch, heads_per_kv)
        )

    return keep_few(KEPT_BLOCKS.setdefault(group, {}), (batch, heads_per_kv), make, _BATCH_SIZES)
