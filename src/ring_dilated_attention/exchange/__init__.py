"""How rows travel between ranks, and how ranks agree.

`ProcessGroupExchange` is one rank's end of a group of processes, `LoopbackExchange` of one whose
ranks are threads, `SoloExchange` of a world of one rank; `Exchange` is what they have in common,
`Pending` a transfer under way, and `Group` what a `group` argument may be. `group_name`,
`exchange_named`, `own_exchange` and `resolve_exchange` lead from one to the other, `place_in` tells
the rank, `run_loopback` runs ranks as threads, and `all_gather` is a collective out of transfers.

A `Call` has an identity, and a `Scope` is one under way. `settle`, `settle_later` and `agree` make
sure that all ranks are in it, with arguments (`Shared`) that are equal; if not, an `ExchangeError`
is raised on every rank. `refuse_capture` keeps calls on several ranks out of CUDA graphs.
`Presence` tells whether the processes of other ranks still run. `untraced` keeps torch.compile out
of a function.
"""

from .agreement import Shared, agree, refuse_capture, settle, settle_later
from .calls import Call, ExchangeError, Scope
from .groups import ProcessGroupExchange
from .interface import Exchange, Pending, SoloExchange, all_gather
from .loopback import LoopbackExchange, run_loopback
from .names import (
    Group,
    exchange_named,
    group_name,
    own_exchange,
    place_in,
    resolve_exchange,
)
from .presence import Presence, make_presence
from .untraced import untraced

__all__ = [
    "Call",
    "Exchange",
    "ExchangeError",
    "Group",
    "LoopbackExchange",
    "Pending",
    "Presence",
    "ProcessGroupExchange",
    "Scope",
    "Shared",
    "SoloExchange",
    "agree",
    "all_gather",
    "exchange_named",
    "group_name",
    "make_presence",
    "own_exchange",
    "place_in",
    "refuse_capture",
    "resolve_exchange",
    "run_loopback",
    "settle",
    "settle_later",
    "untraced",
]
