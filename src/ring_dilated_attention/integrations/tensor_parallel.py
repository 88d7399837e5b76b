"""Tensor parallelism: the modules of this package under torch's ``parallelize_module``.

Every rank of the mesh computes some heads of each layer and some columns of each MLP. It goes with
sequences that are sharded over the other dimension of a 2-D mesh:

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("sp", "tp"))
    parallelize_module(model, mesh["tp"], {"blocks.*": HeadParallel()})
    model.loss(tokens, labels, group=mesh["sp"], layout=layout)
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ..nn import MultiheadDilatedAttention
from ..pattern import HeadSlice

__all__ = ["HeadParallel"]


class HeadParallel(ParallelStyle):
    """Splits attention by heads, and the MLP of its block by columns, over the ranks of a mesh.

    For `MultiheadDilatedAttention`, and for the blocks of `LongNet` and `SlideEncoder`. Rank i of t
    computes the i-th of t equal parts of the KV heads with their query heads, and of the columns of
    the MLP: projections of query, key and value and the first one of the MLP are cut by columns,
    the other two by rows, behind which one all-reduce each brings the parts together. Norms are
    whole on every rank; those on the concatenated heads and on the columns of the MLP (MAGNETO's
    sub-LN) gather their input. Inputs and outputs are the same on all ranks of the mesh.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(
                "HeadParallel is for one dimension of a mesh, as mesh['tp']; got "
                f"{device_mesh.ndim} dimensions"
            )
        if isinstance(module, MultiheadDilatedAttention):
            return _split_heads(module, device_mesh)
        attention = getattr(module, "attention", None)
        if not isinstance(attention, MultiheadDilatedAttention):
            raise TypeError(
                "HeadParallel is for a MultiheadDilatedAttention, or a block of LongNet or "
                f"SlideEncoder; got {type(module).__name__}"
            )
        _split_heads(attention, device_mesh)
        expand: Any = module.expand
        _check_divides(device_mesh.size(), "ffn_dim", expand.out_features)
        plan = {"expand": ColwiseParallel(), **_back("contract", module, "inner_norm")}
        return parallelize_module(module, device_mesh, plan)


def _split_heads(attention: MultiheadDilatedAttention, mesh: DeviceMesh) -> nn.Module:
    ranks, heads = mesh.size(), attention.num_kv_heads
    _check_divides(ranks, "num_kv_heads", heads)
    each, rank = heads // ranks, mesh.get_local_rank()
    attention.head_slice = HeadSlice(rank * each, (rank + 1) * each, heads)
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    return parallelize_module(attention, mesh, {**plan, **_back("out_proj", attention, "norm")})


def _back(name: str, module: nn.Module, norm: str) -> dict[str, ParallelStyle]:
    """The styles of a projection by rows, and of a norm in front of it."""
    if getattr(module, norm, None) is None:
        return {name: RowwiseParallel()}
    gathered = PrepareModuleInput(
        input_layouts=Shard(-1), desired_input_layouts=Replicate(), use_local_output=True
    )
    return {norm: gathered, name: RowwiseParallel(input_layouts=Replicate())}


def _check_divides(ranks: int, name: str, size: int) -> None:
    if size % ranks:
        raise ValueError(
            f"the ranks of the mesh must divide {name} {size}; got {ranks} ranks: use fewer "
            "for tensor parallelism, and more for the sequence"
        )
