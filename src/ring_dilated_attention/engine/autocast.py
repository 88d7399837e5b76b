"""Where kernels run, and in which dtypes: those of the tensors that they are given."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """To which dtype autocast casts now; None where it is off, or does not know such devices."""
    try:  # before torch 2.13, torch.compile cannot trace is_autocast_available
        enabled = torch.is_autocast_enabled(device_type)
    except RuntimeError:
        return None
    return torch.get_autocast_dtype(device_type) if enabled else None


def kernels_on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels compute in the dtypes that they are given, on the device of what they are given.

    Those that Triton launches run on the current device, which may be another one.
    """
    casts = autocast_dtype(device.type) is not None
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    if not casts and not elsewhere:
        return _NOTHING
    both = ExitStack()
    if casts:
        both.enter_context(torch.autocast(device.type, enabled=False))
    if elsewhere:
        both.enter_context(torch.cuda.device(device))
    return both
