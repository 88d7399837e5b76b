"""DistributedDataParallel: what it averages over which ranks, and what is called beside it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getclosurevars
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..pattern import in_brief

_known: WeakSet[DistributedDataParallel] = WeakSet()
"""Those that `labels_per_rank` was given."""

_reduced: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()
"""The ids of the parameters that a reducer averages, which it keeps alive."""

_OTHERS = (
    "pass the ProcessGroup or DeviceMesh of the ranks that it averages over instead of the model"
)

# Those of torch that average over the ranks of their state, and over those of DDP.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_AVERAGE = {
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "powerSGD_hook",
    "batched_powerSGD_hook",
    "quantization_pertensor_hook",
    "quantization_perchannel_hook",
}
_AVERAGE_LIKE_DDP = {"_reducer_allreduce_and_upcast_hook", "apply_optim_in_backward_hook"}


def averaged_by_ddp(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    """The ranks over which it averages the gradients of all parameters that learn.

    Raises:
        ValueError: there is a parameter that it does not know, or a communication hook that is not
            known to average over these ranks.
    """
    _known.add(ddp)
    _check_parameters(ddp)
    ranks: dist.ProcessGroup = ddp.process_group
    for hook, state in ddp._comm_hooks:
        _check_hook(hook, state, ranks)
    return ranks


def refuse_beside_wrapper(module: nn.Module, instead: str) -> None:
    """Raise if a module in DDP computes a loss by a call that DDP does not know of.

    DDP does not average the gradients of such a call. Only wrappers are known that
    `labels_per_rank` was given before. Calls without gradients may be made, and those that
    backward makes again for activation checkpoints. Code of torch.compile cannot ask.

    Args:
        module: what is called.
        instead: how to call the wrapper.

    Raises:
        ValueError: the module is in one, or in a module that is, and the wrapper does not run.
    """
    if not _known or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
        return
    running = DistributedDataParallel._active_ddp_module
    if running is not None and _contains(running, module):
        return
    learns = any(parameter.requires_grad for parameter in module.parameters())
    if learns and any(_contains(ddp, module) and _tells(ddp) for ddp in _known):
        raise ValueError(
            f"{type(module).__name__} is in DistributedDataParallel, which averages gradients of "
            f"calls through it alone: call {instead}"
        )


def _contains(ddp: DistributedDataParallel, module: nn.Module) -> bool:
    return any(inner is module for inner in ddp.module.modules())


def _tells(ddp: DistributedDataParallel) -> bool:
    """Whether it says that it runs, which it does not in two of torch's experiments."""
    return not (
        getattr(ddp, "_use_python_reducer", False)
        or getattr(ddp, "_delay_all_reduce_all_params", False)
    )


def _check_parameters(ddp: DistributedDataParallel) -> None:
    """Raise unless it averages the gradients of all parameters that learn now."""
    known = {id(parameter) for parameter in ddp._delay_all_reduce_params} | _ids(ddp)
    left = [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and id(parameter) not in known
    ]
    if left:
        raise ValueError(
            f"DistributedDataParallel does not know {len(left)} parameters, "
            f"{in_brief(', '.join(left))}, so their gradients are not averaged: it knows those "
            "that required gradients when it was made, without those that it was told to ignore. "
            "Wrap the model again; or, if you average their gradients by hand over the same "
            "ranks, pass the ProcessGroup or DeviceMesh of these ranks instead of the model"
        )


def _ids(ddp: DistributedDataParallel) -> frozenset[int]:
    """The ids of the parameters whose gradients its reducer averages: the same all its life."""
    reducer = getattr(ddp, "reducer", None)  # none where all are delayed
    if reducer is None:
        return frozenset()
    found = _reduced.get(reducer)
    if found is None:
        # It takes as much memory as the gradients for a moment: once, in front of the first step.
        buckets = reducer._get_zeros_like_grad_buckets()
        found = frozenset(id(parameter) for each in buckets for parameter in each.parameters())
        _reduced[reducer] = found
    return found


def _check_hook(hook: Callable[..., Any], state: Any, ranks: dist.ProcessGroup) -> None:
    """Raise unless a communication hook is known to average over these ranks."""
    inner = _innermost(hook)
    name = getattr(inner, "__name__", type(inner).__name__)
    if _is_torchs(inner) and name in _AVERAGE_LIKE_DDP:
        return
    group = getattr(state, "process_group", state) or dist.group.WORLD
    averages = _is_torchs(inner) and name in _AVERAGE
    if not averages or not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"DistributedDataParallel has the communication hook {name}, of which it is not known "
            "that it averages gradients over all ranks: use one of torch's that does, such as "
            f"fp16_compress_hook or powerSGD_hook; or, if this one averages, {_OTHERS}"
        )
    own, over = (sorted(dist.get_process_group_ranks(each)) for each in (ranks, group))
    if own != over:
        raise ValueError(
            f"DistributedDataParallel is over ranks {own} and its communication hook {name} over "
            f"ranks {over}: give both the same ProcessGroup, or {_OTHERS}"
        )


def _is_torchs(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_HOOKS)


def _innermost(hook: Any) -> Any:
    """The hook in torch's wrappers, which compress or take a step of the optimizer beside it."""
    while True:
        hook = getattr(hook, "func", hook)  # of a partial
        wrapped = getclosurevars(hook).nonlocals.get("hook") if _is_torchs(hook) else None
        if wrapped is None:
            return hook
        hook = wrapped
