"""The plan: from (pattern, layout) to what each rank computes and exchanges. Integers only.

`plan_attention` makes an `AttentionPlan` of all ranks; its method `rank` gives the `RankPlan` of
one: tiles in groups, and steps with the messages that are sent and received. `check_plan` proves a
plan by enumeration. `plan_cache` lays out a KV cache, and `costs` counts bytes, operations and
seconds.

From the bottom up: `rows` (what tiles and messages are made of), `parts` (what ranks hold and which
segments they share), `tiling`, `own` (what a rank computes of its own rows), `spec` (what a plan is
made from), `crossings` (the segments that cross ranks), `attention`; beside it `replicated`
(queries that every rank holds) and `cache`.
"""

from . import costs
from .attention import AttentionPlan, RankPlan, Step, plan_attention
from .cache import CachedBranch, CachePlan, KeptRows, NewTile, plan_cache
from .check import check_plan
from .crossings import Joined
from .own import OwnRange
from .parts import OwnRuns
from .rows import Message, PackedTiles, Rows, Run, Tile, TileGroup

__all__ = [
    "AttentionPlan",
    "CachePlan",
    "CachedBranch",
    "Joined",
    "KeptRows",
    "Message",
    "NewTile",
    "OwnRange",
    "OwnRuns",
    "PackedTiles",
    "RankPlan",
    "Rows",
    "Run",
    "Step",
    "Tile",
    "TileGroup",
    "check_plan",
    "costs",
    "plan_attention",
    "plan_cache",
]
