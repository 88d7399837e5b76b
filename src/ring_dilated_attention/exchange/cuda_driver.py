"""CUDA's driver, as far as torch does not offer it: flags that streams wait for, shared memory."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

_POINTER, _ADDRESS, _WORD = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
_SIZE, _HANDLE, _OPTIONS, _KIND = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int
_FUNCTIONS = {
    "cuStreamWaitValue32_v2": [_POINTER, _ADDRESS, _WORD, ctypes.c_uint],
    "cuStreamWriteValue32_v2": [_POINTER, _ADDRESS, _WORD, ctypes.c_uint],
    "cuMemcpyDtoDAsync_v2": [_ADDRESS, _ADDRESS, _SIZE, _POINTER],
    "cuMemGetAllocationGranularity": [_POINTER, _POINTER, _KIND],
    "cuMemCreate": [_POINTER, _SIZE, _POINTER, _OPTIONS],
    "cuMemExportToShareableHandle": [_POINTER, _HANDLE, _KIND, _OPTIONS],
    "cuMemImportFromShareableHandle": [_POINTER, _POINTER, _KIND],
    "cuMemRelease": [_HANDLE],
    "cuMemAddressReserve": [_POINTER, _SIZE, _SIZE, _ADDRESS, _OPTIONS],
    "cuMemAddressFree": [_ADDRESS, _SIZE],
    "cuMemMap": [_ADDRESS, _SIZE, _SIZE, _HANDLE, _OPTIONS],
    "cuMemUnmap": [_ADDRESS, _SIZE],
    "cuMemSetAccess": [_ADDRESS, _SIZE, _POINTER, _SIZE],
    "cuThreadExchangeStreamCaptureMode": [_POINTER],
    "cuGetErrorString": [_KIND, _POINTER],
}

WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


@lru_cache(maxsize=1)
def driver() -> Any:
    """The library, which torch has loaded; pass what its functions return to `check`."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _FUNCTIONS.items():
        getattr(library, name).argtypes = arguments
    return library


def query_while_capturing() -> None:
    """Let the current thread ask for events while another one captures a CUDA graph."""
    mode = ctypes.c_int(1)  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "watching transfers")


def check(result: int, what: str) -> None:
    """Raise unless a function of the driver returned success.

    Args:
        result: what it returned.
        what: what it was for, for the message.

    Raises:
        RuntimeError: it failed.
    """
    if result:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown"
        raise RuntimeError(f"CUDA driver error {result} in {what}: {reason}")
