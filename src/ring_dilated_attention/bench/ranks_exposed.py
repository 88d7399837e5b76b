"""What a call of ours sends, and how long its compute waits, on every rank of a team."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..exchange import resolve_exchange
from ..plan import RankPlan, TensorSize, traffic
from . import measure
from .case import Case
from .exposed import TimedExchange
from .peers import OURS
from .ranks_entry import Entry
from .ranks_options import RanksOptions
from .ranks_result import Communication
from .ranks_team import Team
from .ranks_turns import sample
from .ring_peers import ring_contender

SAMPLES = 3
"""Samples in which the waits are timed."""


def measure_communication(
    entry: Entry,
    case: Case,
    team: Team,
    plan: RankPlan,
    size: TensorSize,
    *,
    backward: bool,
    calls: int,
    options: RanksOptions,
) -> Communication:
    """What this rank waits and sends, in samples of their own: the clocks may cost time.

    Args:
        entry: ours, with its inputs.
        case: what it computes.
        team: the ranks; every one makes this call.
        plan: what this rank exchanges.
        size: of its rows.
        backward: whether the calls compute gradients.
        calls: of a sample.
        options: how to measure.
    """
    timed = TimedExchange(resolve_exchange(team.groups[OURS]), team.device)
    contender = ring_contender(
        OURS,
        case,
        timed,
        team.size,
        team.device,
        layout=options.layout,
        exchange=options.exchange,
    )
    turn = Entry(OURS, contender, entry.sets).turn(backward)
    turn.call(0)
    measure.synchronize(team.device)
    timed.take()
    before = timed.sent_bytes
    steps, waits = [], []
    for _ in range(SAMPLES):
        steps.append(sample(turn, team, calls))
        waits.append(timed.take())
    planned = traffic(plan, size)
    expected = planned.forward_sent + planned.backward_sent * backward
    sent, rest = divmod(timed.sent_bytes - before, calls * SAMPLES)
    return Communication(
        exposed_ms=(statistics.median(wait.transfers / calls for wait in waits),),
        shares=(
            statistics.median(
                wait.transfers / calls / step for wait, step in zip(waits, steps, strict=True)
            ),
        ),
        agreement_ms=statistics.median(wait.agreement / calls for wait in waits),
        sent_bytes=(sent,),
        planned_bytes=(expected,),
        bytes_match=sent == expected and rest == 0,
    )


def combined(by_rank: Sequence[Communication]) -> Communication:
    """That of all ranks, from each rank's."""
    return Communication(
        exposed_ms=tuple(found.exposed_ms[0] for found in by_rank),
        shares=tuple(found.shares[0] for found in by_rank),
        agreement_ms=max(found.agreement_ms for found in by_rank),
        sent_bytes=tuple(found.sent_bytes[0] for found in by_rank),
        planned_bytes=tuple(found.planned_bytes[0] for found in by_rank),
        bytes_match=all(found.bytes_match for found in by_rank),
    )
