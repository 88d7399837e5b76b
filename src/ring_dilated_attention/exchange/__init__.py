"""How rows travel between ranks, and how ranks agree.

`ProcessGroupExchange` is one rank's end of a group of processes, `SoloExchange` of a world of one
rank, and `run_loopback` runs ranks as threads. `Exchange` is what all ends have in common,
`Pending` a transfer under way, and `Group` what a `group` argument may be; `one_group` is what
callers mean by `group` and `mesh`. `group_name`, `exchange_named`, `own_exchange` and
`resolve_exchange` lead from one to the other, `place_in` tells the rank, and `all_gather` is a
collective out of transfers.

`settle` and `agree` make sure that all ranks are in the same call, with arguments (`Shared`) that
are equal; if not, an error is raised on every rank. `together` does so
for a block of code in which a rank may fail.
`refuse_capture` keeps calls on several ranks out of CUDA graphs, and `untraced` keeps torch.compile
out of a function.
"""

from .agreement import Shared, agree, refuse_capture, settle, together
from .groups import (
    Group,
    ProcessGroupExchange,
    exchange_named,
    group_name,
    one_group,
    own_exchange,
    place_in,
    resolve_exchange,
)
from .interface import Exchange, ExchangeError, Pending, SoloExchange, all_gather, untraced
from .loopback import run_loopback

__all__ = [
    "Exchange",
    "ExchangeError",
    "Group",
    "Pending",
    "ProcessGroupExchange",
    "Shared",
    "SoloExchange",
    "agree",
    "all_gather",
    "exchange_named",
    "group_name",
    "one_group",
    "own_exchange",
    "place_in",
    "refuse_capture",
    "resolve_exchange",
    "run_loopback",
    "settle",
    "together",
    "untraced",
]
