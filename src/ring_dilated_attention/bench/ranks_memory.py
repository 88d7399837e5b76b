"""What a rank's call holds, by what it is."""

from __future__ import annotations

from collections.abc import Callable

from ..exchange import ProcessGroupExchange
from ..plan import RankPlan, TensorSize, memory
from . import measure
from .peers import OURS
from .ranks_result import RankMemory
from .ranks_team import Team
from .ranks_turns import Turn


def measure_memory(
    turn: Turn, team: Team, plan: RankPlan, size: TensorSize, *, backward: bool, exchange: str
) -> Callable[[], RankMemory]:
    """A function that calls a turn once and says what this rank held.

    Args:
        turn: what to call.
        team: the ranks.
        plan: what this rank holds.
        size: of its rows.
        backward: whether the call computes gradients.
        exchange: of `dilated_attention`, for ours.
    """

    def held() -> RankMemory:
        with turn.inside():
            measure.synchronize(team.device)
            team.barrier()
            peak = measure.peak_bytes(team.device, lambda: turn.call(0))
        ours = turn.name == OURS
        planned = memory(plan, size, gathers=None if exchange == "auto" else exchange == "gather")
        return RankMemory(
            rank=team.rank,
            query=planned.query,
            key=planned.key,
            value=planned.value,
            dout=planned.out * backward,
            out=planned.out,
            lse=planned.lse if ours else None,
            buffers=planned.buffers if ours else None,
            gradients=(planned.query + planned.key + planned.value) * backward,
            peak=peak,
            outbox=_outbox(team) if ours else None,
        )

    return held


def _outbox(team: Team) -> int:
    """Bytes that our copies between GPUs take of this rank's."""
    group = team.groups[OURS]
    return 0 if group is None else ProcessGroupExchange(group).outbox_bytes(team.device)


def heaviest(by_rank: list[RankMemory]) -> RankMemory:
    """The rank that holds most: inputs and peak, or what is expected where no peak is known."""
    return max(by_rank, key=lambda m: m.inputs + (m.expected if m.peak is None else m.peak))
