"""Whether results are right: a reference, comparisons with it, and ranks to run them on.

`reference_attention` is the method by brute force, which sees no plan; `key_counts` says which
keys a query sees there. A `Case` is one comparison with it on some ranks, of inputs that lie in
memory as a `ViewKind` says, over a layout of `make_layout`. `run_case` compares one rank with
`Case.references`; `combine` adds up the `Outcome` of all ranks. `run_cases` and `sweep` are
`rda verify`, `doctor` is `rda doctor`, and `simulate`, which runs every rank of a world on one
device and returns a `Simulation`, is `rda simulate`.

`run_ranks` runs a function in several processes, and raises a `RankError` where one of them fails.
`nan_in_uninitialized_memory` shows what is read before it is written, and `relative_error` compares
two tensors.
"""

from .ranks import RankError, run_ranks
from .reference import (
    key_counts,
    nan_in_uninitialized_memory,
    reference_attention,
    relative_error,
)
from .simulation import Simulation, simulate
from .verify import (
    Case,
    Outcome,
    ViewKind,
    combine,
    make_layout,
    run_case,
    run_cases,
    sweep,
)

__all__ = [
    "Case",
    "Outcome",
    "RankError",
    "Simulation",
    "ViewKind",
    "combine",
    "doctor",  # a module: not imported here, since ``python -m`` runs it
    "key_counts",
    "make_layout",
    "nan_in_uninitialized_memory",
    "reference_attention",
    "relative_error",
    "run_case",
    "run_cases",
    "run_ranks",
    "simulate",
    "sweep",
]
