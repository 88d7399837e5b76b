"""Call what implements an operator without torch's dispatcher, where that would do no more.

The dispatcher converts every option of a call to its own types and back, 15 us each time. It is
asked where something is to see the operator: a transform of torch.func, a dispatch mode, a tracer,
a profiler or a subclass of tensors; and for meta tensors, of which nothing is computed.

Two things cannot be told in less time than the dispatcher takes, and do not see a call: kernels
that users register for these operators, and an `ExecutionTraceObserver` without a profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch


def call_operator(
    operator: Callable[..., Any],
    implementation: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    *others: Any,
) -> Any:
    """What an operator returns.

    Args:
        operator: as torch knows it.
        implementation: what the dispatcher calls on any device, there where this is called from.
        tensors: its first arguments, of one device.
        others: its other arguments.
    """
    if (
        torch.compiler.is_compiling()  # compiled autograd traces backward
        or torch._C._len_torch_dispatch_stack()
        or torch._C._has_torch_function(tensors)
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
        or torch.autograd.profiler._is_profiler_enabled  # by another thread, for all
        or tensors[0].is_meta
    ):
        return operator(*tensors, *others)
    ordinary = _ordinary_keys(tensors[0].device.type)
    if all(map(ordinary.__eq__, map(torch._C._dispatch_keys, tensors))):
        return implementation(*tensors, *others)
    return operator(*tensors, *others)


@lru_cache(maxsize=8)
def _ordinary_keys(device_type: str) -> Any:
    """The dispatch keys of a tensor that is no subclass, no wrapper and no lazy negation."""
    with torch.inference_mode(False):
        return torch._C._dispatch_keys(torch.empty(0, device=device_type))
