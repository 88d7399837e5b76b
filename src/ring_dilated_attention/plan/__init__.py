"""The plan: from (pattern, layout) to what each rank computes and exchanges. Integers only.

`plan_attention` makes an `AttentionPlan` of all ranks; its method `rank` gives the `RankPlan` of
one: tiles in groups, and steps with the messages that are sent and received. `lower` makes the
program of a rank: the actions that the engine runs. `check_plan` proves a plan by enumeration.
`head_split` is an all-to-all by heads. `plan_cache` lays out a KV cache, and `costs` counts bytes,
operations and seconds.

From the bottom up: `rows` (tiles and messages, parts of documents, the segments they share),
`tiling`, `attention`, `heads`, `cache` (decoding), `program` (what a rank does, action by
action), `check` and `costs`.
"""

from . import cache, costs
from .attention import AttentionPlan, RankPlan, plan_attention
from .cache import plan_cache
from .check import check_plan
from .heads import HeadShare, HeadSplit, head_split
from .program import Action, lower
from .rows import Message, OwnRuns, PackedTiles, Rows, Run, Tile, TileGroup
from .tiling import OwnRange

__all__ = [
    "Action",
    "AttentionPlan",
    "HeadShare",
    "HeadSplit",
    "Message",
    "OwnRange",
    "OwnRuns",
    "PackedTiles",
    "RankPlan",
    "Rows",
    "Run",
    "Tile",
    "TileGroup",
    "cache",
    "check_plan",
    "costs",
    "head_split",
    "lower",
    "plan_attention",
    "plan_cache",
]
