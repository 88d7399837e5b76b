"""Gradients averaged by DDP and FSDP2: over which ranks, and what a loss is divided by for that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ..exchange import (
    Exchange,
    Group,
    ProcessGroupExchange,
    SoloExchange,
    group_name,
    resolve_exchange,
)
from ..pattern import in_brief
from .dtensors import is_dtensor

Averaging: TypeAlias = nn.Module | dist.ProcessGroup | DeviceMesh | Exchange
"""What says which ranks average gradients: a wrapped model, or the ranks themselves."""

_INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64

_WHERE = (
    "wrap the model over all ranks that train together: DistributedDataParallel(model), or "
    "fully_shard of each block and of the model with mesh=mesh[...]._flatten() or a mesh of two "
    "dimensions"
)


def labels_per_rank(
    labels: Tensor | Iterable[Tensor] | int,
    model: Averaging,
    group: Group,
    *,
    ignore_index: int = -100,
) -> Tensor:
    """The divisor of every rank's summed loss, so that averaged gradients are those of the mean.

    DDP and FSDP average the gradients of all W ranks that they know, whether these ranks hold
    other sequences (data parallelism) or other parts of the same sequences. Let rank r have the
    loss s_r, summed over its own labels, and let all ranks have N labels. Then the average of
    ``s_r / (N / W)`` is the mean over all labels, ``sum(s_r) / N``, however unevenly labels are
    spread. N / W, the labels per rank, is what this function returns:

        divisor = labels_per_rank(labels, model, group)
        (summed_loss / divisor).backward()

    It is one small collective. With gradient accumulation, call it once a step with the labels of
    all its micro-batches, and divide the loss of each by it. transformers' models divide by what
    they are given as ``num_items_in_batch``. The mean loss, to be shown, is the average of the
    ranks' divided losses.

    Args:
        labels: this rank's labels of the whole step: its shard, int64, of one dimension at least;
            or the shards of all micro-batches; or how many there are, an int, for other losses (0
            on a rank without any).
        model: what averages gradients: a model in DistributedDataParallel or under `fully_shard`
            (FSDP2, HSDP); or, where gradients are averaged otherwise, those ranks: a ProcessGroup
            or a DeviceMesh of any number of dimensions. That is also for DDP with a communication
            hook, which may average over other ranks, or sum.
        group: the ranks that share each sequence, which must be among the former: a ProcessGroup,
            a 1-D DeviceMesh, or None for one process.
        ignore_index: labels with this value do not count. Default -100, as in transformers and
            `torch.nn.functional.cross_entropy`.

    Returns:
        A float64 scalar, the same on every rank, on the device of the labels where the backend of
        the ranks takes it. Where no rank has a label it is 1 / W, so that a loss of 0 stays 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: gradients are not averaged over all ranks of `group`, or `fully_shard` does not
            average those of all parameters over the same ranks, or DDP has a communication hook;
            the message says how to fix it. Some other rank refused its arguments: labels on CPUs;
            the divisor of labels on GPUs is NaN instead, as looking at it would take time.
    """
    found = _averaging(model)
    try:
        _check_contains(found.ranks, group)
        count = _count(labels, ignore_index)
    except Exception:
        found.total(_refusal(labels))  # the other ranks are told instead of waiting
        raise
    total, refusals = found.total(torch.stack([count, torch.zeros_like(count)]))
    per_rank: Tensor = total.clamp(min=1).to(torch.float64) / found.divisor
    if refusals.device.type != "cpu":  # reading it would wait for the device
        return torch.where(refusals == 0, per_rank, math.nan)
    if refusals:
        raise ValueError(
            f"{int(refusals)} of the ranks that average gradients refused their arguments, each "
            "with an error that says why: labels_per_rank counts the labels of all ranks"
        )
    return per_rank


class _Average(NamedTuple):
    """The ranks whose gradients are averaged."""

    # a sum over each, one after the other, is a sum over all ranks; or a single `Exchange`,
    # whose ranks may be threads
    groups: list[dist.ProcessGroup] | Exchange
    ranks: frozenset[int] | None  # all of them, as numbers of the whole world; None: not known
    divisor: float  # what the sum of their gradients is divided by

    def total(self, counts: Tensor) -> Tensor:
        """The sums of all ranks' counts, which are as many on each."""
        if not isinstance(self.groups, list):
            ends = self.groups
            if ends.world_size == 1:
                return counts
            with ends.calls.enter("labels_per_rank", "labels"):
                return counts.new_tensor(ends.share(counts.tolist())).sum(0)
        for group in self.groups:
            counts = counts.to(device_for(group, counts.device))
            dist.all_reduce(counts, group=group)
        return counts


def _refusal(labels: Any) -> Tensor:
    """No label and one rank that refuses, on the device of its labels if they have one."""
    given = labels if isinstance(labels, list | tuple) and labels else [labels]
    return torch.tensor([0, 1], device=getattr(given[0], "device", None))


def _count(labels: Tensor | Iterable[Tensor] | int, ignore_index: int) -> Tensor:
    is_bool = isinstance(labels, bool)
    if isinstance(labels, Integral):
        if is_bool or not 0 <= int(labels) < 2**62:
            raise ValueError(f"labels must be tensors, or a number >= 0; got {labels}")
        return torch.tensor(int(labels))
    several = isinstance(labels, Iterable) and not isinstance(labels, Tensor)
    shards: list[Any] = list(labels) if several else [labels]  # type: ignore[arg-type]
    for shard in shards:
        if is_dtensor(shard):
            raise TypeError(
                "labels must be this rank's shard; got a DTensor: pass labels.to_local(), which is "
                "the shard where the DTensor is sharded over the sequence"
            )
        is_tensor = isinstance(shard, Tensor)
        if not is_tensor or not shard.ndim or shard.dtype not in _INTEGERS:
            got = f"{shard.dtype} of shape {tuple(shard.shape)}" if is_tensor else in_brief(shard)
            raise TypeError(
                "labels must be tensors of ints with a dimension at least, or their number: of a "
                f"mask int(mask.sum()), of a count int(count). Got {got}"
            )
    if not shards:
        return torch.tensor(0)
    return torch.stack([(shard != ignore_index).sum() for shard in shards]).sum()


def _averaging(model: Averaging) -> _Average:
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes a while to import

    if isinstance(model, DeviceMesh):
        return _of_mesh(model)
    if isinstance(model, dist.ProcessGroup):
        ranks = frozenset(dist.get_process_group_ranks(model))
        return _Average([model], ranks, len(ranks))
    if not isinstance(model, nn.Module):
        ends = resolve_exchange(model)
        return _Average(ends, _ranks(ends), ends.world_size)
    module = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(module, DistributedDataParallel):
        return _averaging(_of_ddp(module))
    if isinstance(module, FullyShardedDataParallel):
        raise ValueError(
            "a model in FullyShardedDataParallel does not say over which ranks gradients are "
            "averaged: use fully_shard (FSDP2), or pass the ProcessGroup or DeviceMesh instead of "
            "the model"
        )
    return _of_fully_shard(module)


def _of_mesh(mesh: DeviceMesh) -> _Average:
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    ranks = frozenset(mesh.mesh.flatten().tolist())
    return _Average(groups, ranks, len(ranks))


def _of_fully_shard(model: nn.Module) -> _Average:
    """Over which ranks FSDP2 averages, which must be the same for all parameters that learn."""
    meshes: dict[tuple[DeviceMesh, float], None] = {}
    managed: set[int] = set()
    for sharded in _parameter_groups(model):
        mesh = sharded.mesh_info.mesh
        divisor = getattr(sharded, "gradient_divide_factor", None)
        meshes[mesh, mesh.size() if divisor is None else divisor] = None
        for parameter in sharded.fsdp_params:
            info = parameter._module_info  # a parameter may be shared by several modules
            managed.add(id(getattr(info.module, info.param_name)))
            shared = zip(info.shared_modules, info.shared_param_names, strict=True)
            managed.update(id(getattr(owner, name)) for owner, name in shared)
    if not meshes:
        raise ValueError(
            f"{type(model).__name__} is neither in DistributedDataParallel nor under fully_shard, "
            f"so its gradients are not averaged: {_WHERE}; or average them by hand, and pass the "
            "ProcessGroup or DeviceMesh of those ranks instead of the model"
        )
    left = [name for name, p in model.named_parameters() if p.requires_grad]
    left = [name for name in left if id(model.get_parameter(name)) not in managed]
    if left:
        raise ValueError(
            f"fully_shard does not know {len(left)} parameters, {in_brief(', '.join(left))}, so "
            "their gradients are not averaged: call fully_shard(model, ...) for the whole model "
            "too, after its blocks"
        )
    if len(meshes) > 1:
        found = "; ".join(f"{mesh} divided by {divisor:g}" for mesh, divisor in meshes)
        raise ValueError(
            f"fully_shard must average all parameters over the same ranks; got {found}. Pass the "
            "ProcessGroup or DeviceMesh that the loss is averaged over instead of the model"
        )
    ((mesh, divisor),) = meshes
    return _of_mesh(mesh)._replace(divisor=divisor)


def _parameter_groups(model: nn.Module) -> Iterator[Any]:
    """What FSDP2 gathers and reduces together."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # of torch 2.12 on
            one = state._fsdp_param_group if groups is None else None
            yield from ([one] if one else groups or [])


def device_for(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """A device whose tensors a group takes: this one, or the current GPU in place of a CPU.

    Args:
        group: whose collectives are called.
        device: where the tensors are.
    """
    if device.type != "cpu" or "cpu" in dist.get_backend_config(group):
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _ranks(group: Group) -> frozenset[int] | None:
    """The ranks of a group as numbers of the whole world; None: not known."""
    if group is None or isinstance(group, SoloExchange):
        return frozenset()  # which takes part in everything
    if isinstance(group, DeviceMesh):
        return frozenset(group.mesh.flatten().tolist())
    if isinstance(group, ProcessGroupExchange):
        group = group.group
    if isinstance(group, dist.ProcessGroup):
        return frozenset(dist.get_process_group_ranks(group))
    return None


def _check_contains(averaged: frozenset[int] | None, group: Group) -> None:
    """Raise unless the ranks that share a sequence are among those that average gradients."""
    group_name(group)  # raises for what is none
    shared = _ranks(group)
    if averaged is None or shared is None or shared <= averaged:
        return
    missing = ", ".join(map(str, sorted(shared - averaged)))
    raise ValueError(
        f"gradients are averaged over ranks {', '.join(map(str, sorted(averaged)))}, without rank"
        f"{'s' * (len(shared - averaged) > 1)} {missing}, which hold other parts of the same "
        f"sequences: {_WHERE}"
    )


_known: WeakSet[DistributedDataParallel] = WeakSet()
"""Those that `labels_per_rank` was given."""


def _of_ddp(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """The ranks over which DDP averages gradients."""
    _known.add(ddp)
    if ddp._comm_hooks:
        hook = getattr(ddp._comm_hooks[0][0], "__name__", "one")
        raise ValueError(
            f"DistributedDataParallel has a communication hook, {hook}, which may do something "
            "else than to average gradients over all its ranks: pass the ProcessGroup or "
            "DeviceMesh of the ranks that it averages over instead of the model"
        )
    ranks: dist.ProcessGroup = ddp.process_group
    return ranks


def refuse_beside_wrapper(module: nn.Module) -> None:
    """Raise if a module in DDP computes a loss by a call that DDP does not know of.

    DDP does not average the gradients of such a call. Only wrappers are known that
    `labels_per_rank` was given before. Calls without gradients may be made, and those that
    backward makes again for activation checkpoints. Code of torch.compile cannot ask.

    Raises:
        ValueError: the module is in one, or in a module that is, and the wrapper does not run.
    """
    if torch.compiler.is_compiling():
        return
    if not _known or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return
    running = DistributedDataParallel._active_ddp_module
    if running is not None and _contains(running, module):
        return
    learns = any(parameter.requires_grad for parameter in module.parameters())
    if learns and any(_contains(ddp, module) for ddp in _known):
        raise ValueError(
            f"{type(module).__name__} is in DistributedDataParallel, which averages gradients of "
            "calls through it alone: call the wrapped model with its labels, ddp(tokens, labels)"
        )


def _contains(ddp: DistributedDataParallel, module: nn.Module) -> bool:
    return any(inner is module for inner in ddp.module.modules())


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was called with this very module, not with one around it."""
    # Not isinstance: importing FSDPModule takes longer than all of this package.
    return hasattr(type(module), "_get_fsdp_state")
