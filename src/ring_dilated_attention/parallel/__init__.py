"""Users of torch.distributed that move no rows of attention: DTensors, batches, DDP and FSDP2.

`Placed` says how DTensors (`is_dtensor`) are placed on a mesh, and makes DTensors of results.
`fill` sets a parameter that may be a DTensor, and `of_own_part` computes row by row; `own_part` is
what a rank has of a dimension of one, `torch_cuts` what each has.

`shard` and `unshard` lead from whole tensors to shards and back. `check_same_batch` compares the
batches of ranks, and `comparing` does so in a function of another name.

`labels_per_rank` is what a loss is divided by where DDP and FSDP2 average gradients, and
`refuse_beside_wrapper` refuses calls whose gradients they do not. `is_fully_sharded` is for modules
under FSDP2.
"""

from .averaging import is_fully_sharded, labels_per_rank, refuse_beside_wrapper
from .dtensors import (
    Placed,
    dtensor_of,
    fill,
    group_of_dtensors,
    is_dtensor,
    of_own_part,
    own_part,
    torch_cuts,
)
from .shards import check_same_batch, comparing, shard, unshard

__all__ = [
    "Placed",
    "check_same_batch",
    "comparing",
    "dtensor_of",
    "fill",
    "group_of_dtensors",
    "is_dtensor",
    "is_fully_sharded",
    "labels_per_rank",
    "of_own_part",
    "own_part",
    "refuse_beside_wrapper",
    "shard",
    "torch_cuts",
    "unshard",
]
