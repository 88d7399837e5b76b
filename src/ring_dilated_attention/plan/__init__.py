"""The plan: from (pattern, layout) to what each rank computes and exchanges. Integers only.

`parts` says what ranks hold and who shares a segment with whom, and `crossings` which ranks do so
alike. `rows` is what tiles and messages are made of, and `tiling` makes them. `attention` is the
plan of a world, `rank` that of one rank, `joined` what a rank computes at once when it has keys of
all others, `passing` how ranks of a host pass on what has crossed to it once, `replicated` that of
queries which every rank holds, `cache` what a KV cache keeps and new positions
read of it, and `cache_usage` how many rows are in use. `zero_keys` counts keys that no rank holds,
`check` proves a plan, `costs` counts its bytes and operations, and `prediction` turns it into
seconds by rates that it is given.
"""

from .attention import FEW_ADDITIONS, AttentionPlan, plan_attention
from .cache import CachedBranch, CachePlan, KeptRows, NewTile, plan_cache
from .cache_usage import BranchUse, cache_use, plan_any_length
from .check import PlanError, check_plan, enumerated, proof_steps
from .costs import (
    Balance,
    Memory,
    TensorSize,
    Traffic,
    balance,
    flops,
    flops_by_rank,
    flops_of_rank,
    memory,
    returned_bytes,
    sent_bytes,
    step_imbalance,
    traffic,
)
from .joined import Joined
from .own import OwnRange, OwnWork
from .parts import OwnRun, OwnRuns
from .passing import PassingStep
from .prediction import ComputeRates, Link, Prediction, Rates, efficiency, host_of_ranks, predict
from .rank import LocalHalves, RankPlan, Step
from .replicated import replicated_groups, replicated_strips, replicated_zero_keys
from .rows import Message, PackedTiles, Rows, Run, Tile, TileGroup, keys_read

__all__ = [
    "FEW_ADDITIONS",
    "AttentionPlan",
    "Balance",
    "BranchUse",
    "CachePlan",
    "CachedBranch",
    "ComputeRates",
    "Joined",
    "KeptRows",
    "Link",
    "LocalHalves",
    "Memory",
    "Message",
    "NewTile",
    "OwnRange",
    "OwnRun",
    "OwnRuns",
    "OwnWork",
    "PackedTiles",
    "PassingStep",
    "PlanError",
    "Prediction",
    "RankPlan",
    "Rates",
    "Rows",
    "Run",
    "Step",
    "TensorSize",
    "Tile",
    "TileGroup",
    "Traffic",
    "balance",
    "cache_use",
    "check_plan",
    "efficiency",
    "enumerated",
    "flops",
    "flops_by_rank",
    "flops_of_rank",
    "host_of_ranks",
    "keys_read",
    "memory",
    "plan_any_length",
    "plan_attention",
    "plan_cache",
    "predict",
    "proof_steps",
    "replicated_groups",
    "replicated_strips",
    "replicated_zero_keys",
    "returned_bytes",
    "sent_bytes",
    "step_imbalance",
    "traffic",
]
