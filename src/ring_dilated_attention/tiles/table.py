"""The table-driven Triton kernels as a back end: many tiles in one launch, merged as they are made.

They take a whole `TileGroup` instead of one tile: see `kernels.cells`, `kernels.forward` and
`kernels.backward`.
"""

from __future__ import annotations

import os

import torch

from ..kernels import has_triton, profile_of
from .backend import refuse_all_but

TABLE_NAME = "triton"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_CAPABILITY = (8, 0)  # before it products of bfloat16 do not compile, and memory is short


def table_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot take (device, dtype, head_dim); None if they can."""
    if not has_triton():
        return f"{TABLE_NAME}: it is not installed"
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    # The interpreter keeps bfloat16 as integers, and multiplies those.
    dtypes = _DTYPES[:2] if interpreted else _DTYPES
    refused = refuse_all_but("cpu" if interpreted else "cuda", dtypes, multiple=8, largest=256)
    reason = refused(device, dtype, head_dim)
    if reason is None and device.type == "cuda":
        capability = profile_of(device).capability
        if torch.version.hip is None and capability < _LEAST_CAPABILITY:
            least, found = (".".join(map(str, x)) for x in (_LEAST_CAPABILITY, capability))
            reason = f"it takes compute capability {least} and above, the device has {found}"
    return reason and f"{TABLE_NAME}: {reason}"
