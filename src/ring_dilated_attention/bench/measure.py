"""Clocks, memory counters and ceilings of one device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch

from ..checks import host_memory
from ..pattern import check_choice
from .result import Ceilings

Call = Callable[[], object]

DEVICES = ("auto", "cpu", "cuda")

MATMUL_SIZES = {"cpu": 2048, "cuda": 8192}
"""Side of the matrices of the matmul ceiling; for float32 and float64 on CUDA half of it."""

COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""Bytes of the tensor of the copy ceiling: more than caches hold."""

CEILING_REPEATS = {"cpu": 5, "cuda": 20}
"""Timed matrix products, and copies."""


def device_type(name: str) -> str:
    """``"cpu"`` or ``"cuda"``; takes no memory of a device, as asking for one would.

    Args:
        name: one of `DEVICES`; ``"auto"``: CUDA where there is a device.

    Raises:
        ValueError: the name is unknown, or there is no such device.
    """
    check_choice("device", name, DEVICES)
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError(
            "device='cuda' needs a CUDA device, and torch finds none; 'cpu' and 'auto' need none"
        )
    return "cuda" if available and name != "cpu" else "cpu"


def resolve_device(name: str) -> torch.device:
    """The device that a name of `DEVICES` stands for: of CUDA's the current one.

    Raises:
        ValueError: the name is unknown, or there is no such device.
    """
    if device_type(name) == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory of a device; None where nobody knows."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def start_timing(device: torch.device, call: Call) -> Callable[[], float]:
    """Run a call; the result gives its milliseconds, waiting for the device if need be.

    On CUDA the time is that between two events around it, so that the next call can be queued
    before this one has ended; on the CPU it is the clock's.
    """
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()

        def elapsed() -> float:
            stop.synchronize()
            taken: float = start.elapsed_time(stop)
            return taken

        return elapsed
    wall = wall_ms(device, call)
    return lambda: wall


def wall_ms(device: torch.device, call: Call) -> float:
    """Milliseconds of a call by the clock, from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def peak_bytes(device: torch.device, call: Call) -> int | None:
    """Most bytes that a call allocates at a time on a CUDA device; None on the CPU."""
    if device.type != "cuda":
        return None
    gc.collect()  # else what is collected during the call is not counted as held before
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def graph_ms(device: torch.device, call: Call, repeats: int) -> tuple[float, ...]:
    """Milliseconds of replays of a call captured in a CUDA graph.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    if device.type != "cuda":
        raise RuntimeError("CUDA graphs need a CUDA device")
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    pending = [start_timing(device, graph.replay) for _ in range(repeats)]
    return tuple(elapsed() for elapsed in pending)


def matmul(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], torch.Tensor], int]:
    """The matrix product that stands for the device's rate, and its side."""
    size = MATMUL_SIZES[device.type]
    if device.type == "cuda" and dtype.itemsize > 2:
        size //= 2
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=product), size


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Rates of a large matrix product in a dtype, and of a large copy; medians of short bursts."""
    multiply, size = matmul(device, dtype)
    source = torch.randn(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return Ceilings(
        matmul_tflops=2 * size**3 / _median_ms(device, multiply) / 1e9,
        matmul_size=size,
        copy_gb_s=2
        * COPY_BYTES[device.type]
        / _median_ms(device, lambda: target.copy_(source))
        / 1e6,
    )


def _median_ms(device: torch.device, call: Call) -> float:
    for _ in range(2):
        call()
    pending = [start_timing(device, call) for _ in range(CEILING_REPEATS[device.type])]
    return statistics.median(elapsed() for elapsed in pending)
