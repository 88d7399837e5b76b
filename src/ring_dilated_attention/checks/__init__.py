"""Whether results are right: a reference, comparisons with it, and ranks to run them on.

`reference_attention` is the method by brute force, which sees no plan; `visible_counts` says which
keys a query sees there. A `Case` is one comparison with it on some ranks, of inputs that lie in
memory as a `ViewKind` says, over a layout of `make_layout`. `run_case` compares one rank with
`Case.references`; `combine` adds up the `Outcome` of all ranks. `run_cases` and `sweep` are
`rda verify`, and `doctor` is `rda doctor`.

`simulate` runs every rank of a world on one device and returns a `Simulation`. `spot_check`
compares rows (`positions_to_check`) of a result that is too long for a reference, given the `Shard`
of this rank.

`run_ranks` runs a function in several processes, and raises a `RankError` where one of them fails.
`nan_in_uninitialized_memory` shows what is read before it is written, and `relative_error` compares
two tensors.
"""

from .ranks import RankError, run_ranks
from .reference import (
    nan_in_uninitialized_memory,
    reference_attention,
    relative_error,
    visible_counts,
)
from .simulation import Simulation, simulate
from .verify import (
    Case,
    Outcome,
    Shard,
    ViewKind,
    combine,
    make_layout,
    run_case,
    run_cases,
    spot_check,
    sweep,
)

__all__ = [
    "Case",
    "Outcome",
    "RankError",
    "Shard",
    "Simulation",
    "ViewKind",
    "combine",
    "doctor",  # a module: not imported here, since ``python -m`` runs it
    "make_layout",
    "nan_in_uninitialized_memory",
    "reference_attention",
    "relative_error",
    "run_case",
    "run_cases",
    "run_ranks",
    "simulate",
    "spot_check",
    "sweep",
    "visible_counts",
]
