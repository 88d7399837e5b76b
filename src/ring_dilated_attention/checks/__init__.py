"""Whether results are right: a reference, comparisons with it, and ranks to run them on.

`reference_attention` is the method by brute force, which sees no plan. A `Case` is one comparison
with it on some ranks, whose results (`Outcome`, one for each of `TENSORS`) `combine` adds up;
`run_cases` runs cases on a rank, `sweep` makes those of `rda verify`. `simulate` runs every rank
of a world on one device, and returns a `Simulation` with a `RankReport` for each and its
`Transfers`. `spot_check` compares rows of a result too long for a reference.

`run_ranks` runs a function in several processes, one of which may end it by a `RankError`; each
takes `threads_of_a_rank`. `under_torchrun` tells whether this process is such a rank already,
`world_exchange` is a rank's end there, and `forked_context` starts such processes.

`nan_in_uninitialized_memory` shows what is read before it is written, `relative_error` compares two
tensors, and the `check_...` functions refuse work beyond any machine, by the limits beside them.
"""

from .limits import (
    MOST_PLANNED_RANKS,
    MOST_PROCESSES,
    MOST_SIMULATED_RANKS,
    RANK_TIMEOUT,
    check_memory,
    check_output,
    check_pattern,
    check_seconds,
    check_seed,
    check_size,
    host_memory,
)
from .ranks import (
    RankError,
    forked_context,
    run_ranks,
    threads_of_a_rank,
    under_torchrun,
    world_exchange,
)
from .reference import reference_attention
from .simulation import RankReport, Simulation, simulate
from .spot_checks import spot_check
from .testing import nan_in_uninitialized_memory, relative_error
from .turns import Transfers
from .verify import TENSORS, Case, Outcome, combine, run_cases, sweep

__all__ = [
    "MOST_PLANNED_RANKS",
    "MOST_PROCESSES",
    "MOST_SIMULATED_RANKS",
    "RANK_TIMEOUT",
    "TENSORS",
    "Case",
    "Outcome",
    "RankError",
    "RankReport",
    "Simulation",
    "Transfers",
    "check_memory",
    "check_output",
    "check_pattern",
    "check_seconds",
    "check_seed",
    "check_size",
    "combine",
    "forked_context",
    "host_memory",
    "nan_in_uninitialized_memory",
    "reference_attention",
    "relative_error",
    "run_cases",
    "run_ranks",
    "simulate",
    "spot_check",
    "sweep",
    "threads_of_a_rank",
    "under_torchrun",
    "world_exchange",
]
