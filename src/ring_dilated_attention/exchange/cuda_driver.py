"""CUDA's driver, as far as torch does not offer it: flags that streams wait for, shared memory.

It is called through NVIDIA's `cuda-bindings`, which torch's CUDA wheels for Linux require from
torch 2.10 on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


@lru_cache(maxsize=1)
def driver() -> Any:
    """NVIDIA's bindings of the driver; pass what their functions return to `checked`.

    Raises:
        RuntimeError: they are not installed.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        version = str(torch.version.cuda or "13").split(".")[0]
        raise RuntimeError(
            "copies between GPUs call CUDA's driver through NVIDIA's cuda-bindings, which torch's "
            f"CUDA wheels require from torch 2.10 on, but here: {error}. "
            f"Install it: pip install 'cuda-bindings=={version}.*'"
        ) from error
    return bindings


def checked(outcome: tuple[Any, ...], what: str) -> Any:
    """What a function of the driver returned beside CUDA_SUCCESS.

    Args:
        outcome: its result: a code, and a value if the function has one.
        what: what it was for, for the message.

    Returns:
        The value; None if the function has none.

    Raises:
        RuntimeError: it failed.
    """
    code, *values = outcome
    if code:
        _, text = driver().cuGetErrorString(code)
        reason = text.decode() if text else "unknown"
        raise RuntimeError(f"CUDA driver error {int(code)} in {what}: {reason}")
    return values[0] if values else None


def query_while_capturing() -> None:
    """Let the current thread ask for events while another one captures a CUDA graph."""
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    checked(driver().cuThreadExchangeStreamCaptureMode(mode), "watching transfers")


def wait_for_flag(stream: int, address: int, value: int) -> None:
    """Have a stream wait until the 32 bits at an address of device memory equal a value."""
    equal = driver().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    _start(driver().cuStreamWaitValue32(stream, address, value, equal))


def set_flag(stream: int, address: int, value: int) -> None:
    """Have a stream write 32 bits to an address of device memory.

    Other devices that see the value also see everything the stream wrote before.
    """
    fenced = driver().CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
    _start(driver().cuStreamWriteValue32(stream, address, value, fenced))


def copy(stream: int, target: int, source: int, nbytes: int) -> None:
    """Have a stream copy bytes between addresses of device memory, by a copy engine."""
    _start(driver().cuMemcpyDtoDAsync(target, source, nbytes, stream))


def _start(outcome: tuple[Any, ...]) -> None:
    checked(outcome, "a transfer between GPUs")
