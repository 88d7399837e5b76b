"""What a ring of dense causal attention loses to the power limit of GPUs, forward and backward.

    torchrun --nproc-per-node 2 benchmarks/power.py --out power.json

Calls on every GPU at once: the whole sequence on each by itself, the same beside copies to and from
its neighbour, the tiles of all ranks of a ring on each GPU, and the ring; with random inputs and
with zeros, which take much less power. A call is timed by the host's clock, from a barrier to the
end of its work; its energy is NVML's, its kernels are those of two more calls. `--device cpu
--length 1024` shows that the script runs.
"""

import ctypes
import json
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.exchange import Group
from ring_dilated_attention.testing import run_loopback

DENSE = DilatedPattern.dense()
COPY_BYTES = 16 << 20


def main(
    length: int = 262_144,
    heads: int = 16,
    head_dim: int = 128,
    repeats: int = 5,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    copies: Annotated[int, typer.Option(help="of 16 MiB, in and out, every 15 ms")] = 4,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time and weigh every kind of call."""
    cuda = device == "cuda"
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ranks = dist.new_group(backend="gloo")  # to meet without taking the GPU
    layout = SequenceLayout.zigzag(length, world_size)
    dtype = torch.bfloat16 if cuda else torch.float32
    rows = []
    for zeros in (False, True):
        whole, *shards = (
            _inputs((1, count, heads, head_dim), own, dtype, zeros)
            for count in (length, *map(layout.local_length, range(world_size)))
        )

        def alone(inputs: list[torch.Tensor] = whole) -> None:
            _call(inputs)

        def tiles(inputs: list[list[torch.Tensor]] = shards) -> None:
            def rank_of(group: Any) -> None:
                if cuda:
                    torch.cuda.set_device(own)  # of this thread
                _call(inputs[group.rank], group, layout)

            run_loopback(world_size, rank_of)

        def ring(inputs: list[torch.Tensor] = shards[rank]) -> None:
            _call(inputs, dist.group.WORLD, layout)

        for name, call in (
            ("alone", alone),
            ("beside copies", alone),
            ("tiles", tiles),
            ("ring", ring),
        ):
            if name == "beside copies" and not cuda:
                continue
            with _copying(own, world_size, copies if name == "beside copies" else 0):
                row = _measure(call, repeats, own, ranks)
            row = {"call": name, "zeros": zeros, "rank": rank, **row}
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, row, group=ranks)
            rows.extend(every)
            for one in every if rank == 0 else ():
                print({key: value for key, value in one.items() if key != "kernels_ms"}, flush=True)
    if rank == 0 and out is not None:
        found_by = {"device": torch.cuda.get_device_name() if cuda else "cpu", "length": length}
        out.write_text(json.dumps(found_by | {"rows": rows}, indent=1) + "\n")
    dist.barrier(group=ranks)
    dist.destroy_process_group()


def _inputs(
    shape: tuple[int, ...], device: torch.device, dtype: torch.dtype, zeros: bool
) -> list[torch.Tensor]:
    """Query, key, value, and the gradient of out."""
    create = torch.zeros if zeros else torch.randn
    tensors = [create(shape, device=device, dtype=dtype) for _ in range(4)]
    return [*(x.requires_grad_() for x in tensors[:3]), tensors[3]]


def _call(
    inputs: list[torch.Tensor], group: Group = None, layout: SequenceLayout | None = None
) -> None:
    query, key, value, dout = inputs
    out = dilated_attention(query, key, value, DENSE, is_causal=True, group=group, layout=layout)
    torch.autograd.grad(out, (query, key, value), dout)


def _measure(
    call: Callable[[], None], repeats: int, device: torch.device, ranks: dist.ProcessGroup
) -> dict[str, Any]:
    """Of one rank: milliseconds of calls and their median, joules a call, kernels' milliseconds."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    finish()
    times, before = [], _joules(device)
    for _ in range(repeats):
        dist.barrier(group=ranks)
        start = time.perf_counter()
        call()
        finish()
        times.append(1e3 * (time.perf_counter() - start))
    after = _joules(device)
    row = {
        "median_ms": round(statistics.median(times), 1),
        "ms": [round(x, 1) for x in times],
        "joules": None if before is None or after is None else round((after - before) / repeats, 1),
    }
    if device.type != "cuda":
        return row
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            call()
        finish()
    kernels: Counter[str] = Counter()
    for event in profiler.key_averages():
        kernels[event.key[:60]] += event.device_time_total / 2e3
    return row | {"kernels_ms": {name: round(ms, 2) for name, ms in kernels.most_common(8)}}


def _joules(device: torch.device) -> float | None:
    """That the device has taken since its driver was loaded, if NVML says."""
    if device.type != "cuda":
        return None
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
    if failed or nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)):
        return None
    return energy.value / 1e3


@contextmanager
def _copying(device: torch.device, world_size: int, copies: int) -> Iterator[None]:
    """Meanwhile, copy from the next GPU every 15 ms; the one before does so from this one."""
    if not copies:
        yield
        return
    theirs = torch.device("cuda", (device.index + 1) % world_size)
    source, target = (
        torch.empty(COPY_BYTES, dtype=torch.uint8, device=x) for x in (theirs, device)
    )
    done = threading.Event()

    def copy() -> None:
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
            while not done.wait(0.015):
                for _ in range(copies):
                    target.copy_(source, non_blocking=True)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    typer.run(main)
