"""Whether results are right: a reference, comparisons with it, and ranks to run them on.

`reference_attention` is the method by brute force, which sees no plan; `visible_counts` and
`zero_key_counts` say which keys a query sees there. A `Case` is one comparison with it on some
ranks, of `INPUTS` that lie in memory as a `ViewKind` says (one of `KINDS`, or `any_kind`), over a
layout of `make_layout`. `run_case` compares one rank with `references`, within `TOLERANCE`;
`combine` adds up the `Outcome` of all ranks, one for each of `TENSORS`. `run_cases` and `sweep` are
`rda verify`.

`simulate` runs every rank of a world on one device, in `simulated_flops` operations, and returns a
`Simulation` with a `RankReport` for each and its `Transfers`. `spot_check` compares rows
(`positions_to_check`) of a result that is too long for a reference, given the `Shard` of this rank.

`run_ranks` runs a function in several processes, one of which may end it by a `RankError`; each
takes `threads_of_a_rank`; `forked_context` starts such processes, and `world_exchange` is a rank's
end there. `launched` is this process's place where it is a rank already, `Launched`, `local_rank`
its number on its host; `check_meeting_point` and `check_one_process` refuse what does not fit that,
and `not_met` says that others did not come.

`nan_in_uninitialized_memory` shows what is read before it is written, `relative_error` compares two
tensors, and the `check_...` functions refuse work beyond any machine, by the limits beside them.
"""

from .limits import (
    MOST_PLANNED_RANKS,
    MOST_PROCESSES,
    MOST_SEED,
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
    Launched,
    RankError,
    check_meeting_point,
    check_one_process,
    forked_context,
    launched,
    local_rank,
    not_met,
    run_ranks,
    threads_of_a_rank,
    world_exchange,
)
from .reference import (
    nan_in_uninitialized_memory,
    reference_attention,
    relative_error,
    visible_counts,
    zero_key_counts,
)
from .simulation import RankReport, Simulation, Transfers, simulate, simulated_flops
from .spot_checks import Shard, positions_to_check, spot_check
from .verify import (
    INPUTS,
    KINDS,
    TENSORS,
    TOLERANCE,
    Case,
    Outcome,
    ViewKind,
    any_kind,
    combine,
    make_layout,
    references,
    run_case,
    run_cases,
    sweep,
)

__all__ = [
    "INPUTS",
    "KINDS",
    "MOST_PLANNED_RANKS",
    "MOST_PROCESSES",
    "MOST_SEED",
    "MOST_SIMULATED_RANKS",
    "RANK_TIMEOUT",
    "TENSORS",
    "TOLERANCE",
    "Case",
    "Launched",
    "Outcome",
    "RankError",
    "RankReport",
    "Shard",
    "Simulation",
    "Transfers",
    "ViewKind",
    "any_kind",
    "check_meeting_point",
    "check_memory",
    "check_one_process",
    "check_output",
    "check_pattern",
    "check_seconds",
    "check_seed",
    "check_size",
    "combine",
    "forked_context",
    "host_memory",
    "launched",
    "local_rank",
    "make_layout",
    "nan_in_uninitialized_memory",
    "not_met",
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
    "threads_of_a_rank",
    "visible_counts",
    "world_exchange",
    "zero_key_counts",
]
