"""What a rank's call holds, by what it is."""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import ProcessGroupExchange
from ..plan import costs
from . import measure
from .contenders import OURS
from .entry import Entry
from .result import RankMemory
from .team import Team
from .workload import Workload


def measure_memory(
    entry: Entry, workload: Workload, team: Team, *, backward: bool, exchange: str
) -> RankMemory:
    """Make one call, and say what this rank held.

    Args:
        entry: what to call, with its inputs.
        workload: what it computes.
        team: the ranks; every one makes this call.
        backward: whether the call computes gradients.
        exchange: of `dilated_attention`, for ours.
    """
    turn = entry.turn(backward)
    with turn.inside():
        measure.synchronize(team.device)
        team.barrier()
        peak = measure.peak_bytes(team.device, lambda: turn.call(0))
    query, key = (sum(inputs[index].nbytes for inputs in entry.sets[0]) for index in (0, 1))
    lse = buffers = outbox = None
    if entry.name == OURS:
        assert entry.contender is not None
        plan = workload.plan(entry.contender.layout).rank(team.rank)
        gathers = None if exchange == "auto" else exchange == "gather"
        planned = costs.memory(plan, workload.size, gathers=gathers)
        lse, buffers, outbox = planned.lse, planned.buffers, 0
        if team.size > 1:
            outbox = ProcessGroupExchange(team.groups[OURS]).outbox_bytes(team.device)
    return RankMemory(
        rank=team.rank,
        query=query,
        key=key,
        value=key,
        dout=query * backward,
        out=query,
        lse=lse,
        buffers=buffers,
        gradients=(query + 2 * key) * backward,
        peak=peak,
        outbox=outbox,
    )


def heaviest(by_rank: Sequence[RankMemory]) -> RankMemory:
    """The rank that holds most: inputs and peak, or what is expected where no peak is known."""
    return max(by_rank, key=lambda m: m.inputs + (m.expected if m.peak is None else m.peak))
