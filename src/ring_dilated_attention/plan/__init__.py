"""The plan: from (pattern, layout) to what each rank computes and exchanges. Integers only.

`parts` says what ranks hold and who shares a segment with whom, `tiling` turns that into tiles and
messages, `attention` puts the plan of a rank together, `replicated` plans queries that every rank
holds, `check` proves a plan, `costs` counts its bytes and operations.
"""

from .attention import AttentionPlan, RankPlan, Step, plan_attention
from .replicated import replicated_groups
from .tiling import Message, Rows, Run, Tile, TileGroup

__all__ = [
    "AttentionPlan",
    "Message",
    "RankPlan",
    "Rows",
    "Run",
    "Step",
    "Tile",
    "TileGroup",
    "plan_attention",
    "replicated_groups",
]
