"""A style for `torch.distributed.tensor.parallel.parallelize_module`: sequences over a mesh.

    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("sp",))
    plan = {"layers.*.attention": ContextParallel(layout=layout)}
    parallelize_module(model, mesh["sp"], plan)

The rest of the model treats every position alone, or has a style of torch's own
(`SequenceParallel`, `PrepareModuleInput`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..layout import SequenceLayout
from ..nn import Block, DilatedAttention, MultiheadDilatedAttention
from ..options import check_options
from ..parallel import dtensor_of, is_dtensor, torch_cuts
from ..torch_op import telling_ranks

__all__ = ["ContextParallel"]

_SHARDED = ("query", "key", "value", "key_padding_mask")
"""Arguments by keyword that are sharded over the sequence, as all tensors by position are."""


class ContextParallel(ParallelStyle):
    """A parallel style for attention that takes and returns DTensors sharded over the sequence.

    The module is a `MultiheadDilatedAttention`, a `DilatedAttention`, or one of your own with these
    inside. Its tensors by position, and ``query``, ``key``, ``value`` and ``key_padding_mask`` by
    keyword, have the sequence as dimension 1; they may be DTensors with Shard(1), or this rank's
    shards. Parameters become DTensors that are replicated over the mesh, as with
    `torch.distributed.tensor.parallel.SequenceParallel`. Their gradients are DTensors with Partial,
    which torch's optimizers and ``clip_grad_norm_`` sum: then they are those of the whole sequence.
    Read them by ``full_tensor()``; nothing else may average them over the mesh.

    Args:
        layout: which positions each rank holds, as many as torch gives it of a DTensor: of n
            positions on p ranks every rank has ceil(n / p), or what is left. None: contiguous.
        use_local_output: whether outputs are this rank's shards. Default False: DTensors.

    Raises:
        TypeError: `layout` is neither a `SequenceLayout` nor None.
        ValueError: from `parallelize_module`: the module has no attention of this library inside,
            or is a `LongNet`, a `SlideEncoder` or a part of one, which take a group and a layout
            themselves; or the layout is for another number of ranks, or its shards are not as long
            as those of a DTensor; from calls: a tensor does not have the shape that the layout
            says, or a DTensor is placed otherwise.
    """

    def __init__(
        self, *, layout: SequenceLayout | None = None, use_local_output: bool = False
    ) -> None:
        super().__init__()
        check_options(layout=layout)
        self.layout = layout
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """See `ParallelStyle`."""
        if self.layout is not None:
            self.layout.check_ranks(device_mesh.size())
            # Torch works with no other shards of a DTensor.
            cuts = torch_cuts(self.layout.length, device_mesh.size())
            wanted = [stop - start for start, stop in cuts]
            given = list(map(self.layout.local_length, range(device_mesh.size())))
            if given != wanted:
                raise ValueError(
                    f"of {self.layout.length} positions torch gives its ranks {wanted} in a "
                    f"DTensor; the layout gives them {given}: use layout=None, such shards, or, "
                    "without ContextParallel, group= and layout= of the layer's calls"
                )
        self._tell_layout(module)
        applied: nn.Module = distribute_module(module, device_mesh, _replicate)
        applied.register_forward_pre_hook(
            lambda _, args, kwargs: self._inputs(args, kwargs, device_mesh), with_kwargs=True
        )
        if self.use_local_output:
            applied.register_forward_hook(lambda _, args, output: _local(output))
        return applied

    def _tell_layout(self, module: nn.Module) -> None:
        """Have the attention inside go by the layout."""
        found = False
        for inner in module.modules():
            if isinstance(inner, Block):
                raise ValueError(
                    f"{type(inner).__name__} takes a group and a layout itself: leave LongNet and "
                    "SlideEncoder out of the plan, and give group= and layout= to their calls"
                )
            if isinstance(inner, DilatedAttention):
                inner.options, found = replace(inner.options, layout=self.layout), True
            elif isinstance(inner, MultiheadDilatedAttention):
                inner.register_forward_pre_hook(self._with_layout, with_kwargs=True)
                found = True
        if not found:
            raise ValueError(
                "ContextParallel is for DilatedAttention and MultiheadDilatedAttention, and for "
                f"modules with one of them inside; got {type(module).__name__}"
            )

    def _with_layout(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {"layout": self.layout, **kwargs}

    def _inputs(self, args: Any, kwargs: Any, mesh: DeviceMesh) -> tuple[Any, Any]:
        def placed(x: Any) -> Any:
            return self._whole(x, mesh) if isinstance(x, Tensor) else x

        def whole(_: Tensor | None) -> tuple[Any, Any]:
            named = {name: placed(kwargs[name]) for name in _SHARDED if name in kwargs}
            return tuple(map(placed, args)), {**kwargs, **named}

        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        return telling_ranks(mesh, whole, next(tensors, None))

    def _whole(self, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        """A DTensor, of which a local tensor is this rank's part."""
        if is_dtensor(tensor):
            if tuple(tensor.placements) != (Shard(1),):  # type: ignore[attr-defined]
                raise ValueError(
                    "ContextParallel takes DTensors with Shard(1), or this rank's shards; got "
                    f"{tensor.placements}"  # type: ignore[attr-defined]
                )
            return tensor
        shape = list(tensor.shape)
        if self.layout is None:
            shape[1] *= mesh.size()
        else:
            rank = mesh.get_local_rank()
            self.layout.check_shard(rank, mesh.size(), shape[1], f"and got {tuple(tensor.shape)}")
            shape[1] = self.layout.length
        return dtensor_of(tensor.contiguous(), mesh, [Shard(1)], shape)  # as its strides say


def _local(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(map(_local, output))
    return output.to_local() if isinstance(output, DTensor) else output


def _replicate(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Make DTensors of a module's own parameters; the first rank's are the ones that count."""
    for name, parameter in module.named_parameters(recurse=False):
        if not is_dtensor(parameter):
            whole = distribute_tensor(parameter, mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(whole, parameter.requires_grad))
