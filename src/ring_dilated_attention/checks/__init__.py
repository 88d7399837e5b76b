"""Whether results are right: a reference, comparisons with it, and ranks to run them on.

`reference_attention` is the method by brute force, which sees no plan; `visible_counts` and
`zero_key_counts` say which keys a query sees there. A `Case` is one comparison with it on some
ranks, of inputs that lie in memory as a `ViewKind` says (such as one of `KINDS`), over a layout of
`make_layout`. `run_case` compares one rank with `references`, within `TOLERANCE`; `combine` adds up
the `Outcome` of all ranks, one for each of `TENSORS`. `run_cases` and `sweep` are `rda verify`.

`simulate` runs every rank of a world on one device, in `simulated_flops` operations, and returns a
`Simulation` with a `RankReport` for each. `spot_check` compares rows (`positions_to_check`) of a
result that is too long for a reference, given the `Shard` of this rank.

`run_ranks` runs a function in several processes, one of which may end it by a `RankError`;
`forked_context` starts such processes, and `world_exchange` is a rank's end there.
`nan_in_uninitialized_memory` shows what is read before it is written, and `relative_error` compares
two tensors.
"""

from .ranks import RankError, forked_context, run_ranks, world_exchange
from .reference import (
    nan_in_uninitialized_memory,
    reference_attention,
    relative_error,
    visible_counts,
    zero_key_counts,
)
from .simulation import RankReport, Simulation, simulate, simulated_flops
from .spot_checks import Shard, positions_to_check, spot_check
from .verify import (
    KINDS,
    TENSORS,
    TOLERANCE,
    Case,
    Outcome,
    ViewKind,
    combine,
    make_layout,
    references,
    run_case,
    run_cases,
    sweep,
)

__all__ = [
    "KINDS",
    "TENSORS",
    "TOLERANCE",
    "Case",
    "Outcome",
    "RankError",
    "RankReport",
    "Shard",
    "Simulation",
    "ViewKind",
    "combine",
    "doctor",  # a module: not imported here, since ``python -m`` runs it
    "forked_context",
    "make_layout",
    "nan_in_uninitialized_memory",
    "positions_to_check",
    "reference_attention",
    "references",
    "relative_error",
    "run_case",
    "run_cases",
    "run_ranks",
    "simulate",
    "simulated_flops",
    "spot_check",
    "sweep",
    "visible_counts",
    "world_exchange",
    "zero_key_counts",
]
