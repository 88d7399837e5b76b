"""Whether Triton is there, and where it runs; this module does without."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import torch

from .device_profile import profile_of

_LEAST_CAPABILITY = (7, 0)
"""Of devices that Triton compiles for."""


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


@lru_cache(maxsize=64)
def compiles_for(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    if device.type != "cuda" or not has_triton():
        return False
    return profile_of(device).capability >= _LEAST_CAPABILITY


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels compute in the dtype and on the device of a tensor."""
    return tensor.is_cuda and tensor.dtype != torch.float64 and compiles_for(tensor.device)
