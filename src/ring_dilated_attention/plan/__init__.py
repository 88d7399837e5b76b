"""The plan: from (pattern, layout) to what each rank computes and exchanges. Integers only.

`documents` says where documents begin and end, `parts` what ranks hold and who shares a segment
with whom, `tiling` turns that into tiles and messages, `zero_keys` counts keys that no rank holds,
`attention` puts the plan of a rank together, `replicated` plans queries that every rank holds,
`check` proves a plan, `costs` counts its bytes and operations.
"""

from .attention import FEW_ADDITIONS, AttentionPlan, LocalHalves, RankPlan, Step, plan_attention
from .check import check_plan, enumerated
from .costs import (
    Balance,
    Memory,
    TensorSize,
    balance,
    flops,
    flops_by_rank,
    flops_of_rank,
    memory,
    returned_bytes,
    step_imbalance,
    traffic,
)
from .replicated import replicated_groups, replicated_zero_keys
from .tiling import Message, PackedTiles, Rows, Run, Tile, TileGroup

__all__ = [
    "FEW_ADDITIONS",
    "AttentionPlan",
    "Balance",
    "LocalHalves",
    "Memory",
    "Message",
    "PackedTiles",
    "RankPlan",
    "Rows",
    "Run",
    "Step",
    "TensorSize",
    "Tile",
    "TileGroup",
    "balance",
    "check_plan",
    "enumerated",
    "flops",
    "flops_by_rank",
    "flops_of_rank",
    "memory",
    "plan_attention",
    "replicated_groups",
    "replicated_zero_keys",
    "returned_bytes",
    "step_imbalance",
    "traffic",
]
