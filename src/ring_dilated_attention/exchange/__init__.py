"""How rows travel between ranks, and how ranks agree.

Of what computes attention, this is the only room that knows torch.distributed.

`ProcessGroupExchange` is one rank's end of a group of processes, `LoopbackExchange` of one whose
ranks are threads, `SoloExchange` of a world of one rank; `Exchange` is what they have in common,
`Pending` a transfer under way, and `Group` what a `group` argument may be. `group_name`,
`exchange_named`, `own_exchange` and `resolve_exchange` lead from one to the other, `place_in` tells
the rank, `run_loopback` runs ranks as threads, and `all_gather` is a collective out of transfers.
`shard` and `unshard` lead from whole tensors to shards and back.

`one_group` is what callers mean by `group` and `mesh`. `Placed` says how DTensors (`is_dtensor`)
are placed on a mesh, and makes DTensors of results; `fill` sets a parameter that may be one, and
`of_own_part` computes row by row.

A `Call` has an identity, and a `Scope` is one under way. `settle`, `settle_later` and `agree` make
sure that all ranks are in it, with arguments (`Shared`) that are equal; if not, an `ExchangeError`
is raised on every rank. `refuse_capture` keeps calls on several ranks out of CUDA graphs.
`check_padding_mask` and `lengths_of_mask` turn a sharded padding mask into lengths, which
`KNOWN_LENGTHS` keeps. `Presence` tells whether the processes of other ranks still run.

`check_same_batch` compares the batches of ranks, and `agree_on_batch` does so inside of another
call. `labels_per_rank` is what a loss is divided by where gradients are averaged, and
`refuse_beside_wrapper` refuses calls whose gradients are not.
`is_fully_sharded` and `gather_weights_in` are for modules under FSDP2. `own_part` is what a rank
has of a dimension of a DTensor, `torch_cuts` what each has. `untraced` keeps torch.compile out of a
function.
"""

from .agreement import Shared, agree, refuse_capture, settle, settle_later
from .calls import Call, ExchangeError, Scope
from .data_parallel import labels_per_rank
from .ddp import refuse_beside_wrapper
from .dtensors import (
    Placed,
    fill,
    group_of_dtensors,
    is_dtensor,
    of_own_part,
    one_group,
    own_part,
    torch_cuts,
)
from .fully_sharded import gather_weights_in, is_fully_sharded
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
from .padding import KNOWN_LENGTHS, check_padding_mask, lengths_of_mask
from .presence import Presence, make_presence
from .same_batch import agree_on_batch, check_same_batch
from .sharding import shard, unshard
from .untraced import untraced

__all__ = [
    "KNOWN_LENGTHS",
    "Call",
    "Exchange",
    "ExchangeError",
    "Group",
    "LoopbackExchange",
    "Pending",
    "Placed",
    "Presence",
    "ProcessGroupExchange",
    "Scope",
    "Shared",
    "SoloExchange",
    "agree",
    "agree_on_batch",
    "all_gather",
    "check_padding_mask",
    "check_same_batch",
    "exchange_named",
    "fill",
    "gather_weights_in",
    "group_name",
    "group_of_dtensors",
    "is_dtensor",
    "is_fully_sharded",
    "labels_per_rank",
    "lengths_of_mask",
    "make_presence",
    "of_own_part",
    "one_group",
    "own_exchange",
    "own_part",
    "place_in",
    "refuse_beside_wrapper",
    "refuse_capture",
    "resolve_exchange",
    "run_loopback",
    "settle",
    "settle_later",
    "shard",
    "torch_cuts",
    "unshard",
    "untraced",
]
