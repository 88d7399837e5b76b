"""What a ring of dense causal attention loses to the power limit of GPUs, forward and backward.

    torchrun --nproc-per-node 2 benchmarks/power.py --out power.json

Calls on every GPU at once: the whole sequence on each by itself; the same beside what a ring does
to a GPU (copies to and from the neighbour, copies so small that they only keep the links awake, and
streams that wait for a flag); the tiles of all ranks of a ring on each GPU; the ring, by copies and
by messages. With random inputs and with zeros, which take much less power. A call is timed by the
host's clock, from a barrier to the end of its work; its kernels are those of two more calls. NVML
(the package nvidia-ml-py) says what power the GPU takes meanwhile, how fast it is clocked and how
often it finds the links asleep. `--device cpu --length 1024` shows that the script runs.
"""

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from ranks import join

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.exchange import Group, ProcessGroupExchange, run_loopback
from ring_dilated_attention.exchange.cuda_driver import wait_for_flag
from ring_dilated_attention.plan import spec

DENSE = DilatedPattern.dense()


def main(
    length: int = 262_144,
    heads: int = 16,
    head_dim: int = 128,
    repeats: int = 5,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    pairs: Annotated[
        int, typer.Option(help="see plan.spec.ROUND_PAIRS: the more, the fewer messages")
    ] = spec.ROUND_PAIRS,
    only: Annotated[str, typer.Option(help="calls whose names begin with this")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time and weigh every kind of call."""
    spec.ROUND_PAIRS = pairs
    cuda = device == "cuda"
    rank, world_size, world, ranks, own = join(device)
    layout = SequenceLayout.zigzag(length, world_size)
    dtype = torch.bfloat16 if cuda else torch.float32
    kind = torch.cuda.get_device_name() if cuda else "cpu"
    about, rows = {"device": kind, "length": length, "pairs": pairs}, []
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

        def ring(group: Group, inputs: list[torch.Tensor] = shards[rank]) -> None:
            _call(inputs, group, layout)

        for _ in range(3 if cuda else 0):  # a GPU that is cool runs above its limit for a while
            alone()
        copying = partial(_copying, own, world_size)
        kinds: dict[str, tuple[Callable[[], None], AbstractContextManager[None]]] = {
            "alone": (alone, nullcontext()),
            "tiles": (tiles, nullcontext()),
            "ring": (partial(ring, world), nullcontext()),
        }
        if cuda:
            messages = ProcessGroupExchange(world, peer_memory=False)
            kinds |= {
                "ring by messages": (partial(ring, messages), nullcontext()),
                "alone beside 4 copies of 16 MiB every 15 ms": (alone, copying(4, 16 << 20, 0.015)),
                "alone beside a copy of 64 KiB every 2 ms": (alone, copying(1, 64 << 10, 0.002)),
                "alone beside two streams that wait": (alone, _waiting(own, 2)),
            }
        for name, (call, beside) in kinds.items():
            if not name.startswith(only):
                continue
            with beside:
                row = _time(call, repeats, own, ranks)
            row = {"call": name, "zeros": zeros, "rank": rank, **row}
            if cuda and call is not alone:
                row["kernels_ms"] = _kernels(call)
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, row, group=ranks)
            rows.extend(every)
            for one in every if rank == 0 else ():
                print({key: value for key, value in one.items() if key != "kernels_ms"}, flush=True)
            if rank == 0 and out is not None:
                out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
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


def _time(
    call: Callable[[], None], repeats: int, device: torch.device, ranks: dist.ProcessGroup
) -> dict[str, Any]:
    """Of one rank: milliseconds of calls and their median, and what NVML says meanwhile."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # others may wait for a flag

    call()
    finish()
    times = []
    with _watching(device) as seen:
        for _ in range(repeats):
            dist.barrier(group=ranks)
            start = time.perf_counter()
            call()
            finish()
            times.append(1e3 * (time.perf_counter() - start))
    median = statistics.median(times)
    return {"median_ms": round(median, 1), "ms": [round(x, 1) for x in times], **seen}


def _kernels(call: Callable[[], None]) -> dict[str, float]:
    """The longest kernels and copies of a call: milliseconds in all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    for event in profiler.key_averages():
        kernels[event.key[:60]] += event.device_time_total / 2e3
    return {name: round(ms, 2) for name, ms in kernels.most_common(8)}


@contextmanager
def _watching(device: torch.device) -> Iterator[dict[str, Any]]:
    """What NVML says meanwhile, there at the end: means, and the share of links found asleep."""
    seen: dict[str, Any] = {}
    if device.type != "cuda":
        yield seen
        return
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    link = 0  # they sleep together
    fields = {
        "watts": (pynvml.NVML_FI_DEV_POWER_INSTANT, 0),
        "links_asleep": (pynvml.NVML_FI_DEV_NVLINK_GET_POWER_STATE, link),
        "asleep_after": (pynvml.NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD, link),
        "asleep_after_unit": (pynvml.NVML_FI_DEV_NVLINK_GET_POWER_THRESHOLD_UNITS, link),
    }
    samples: dict[str, list[int]] = {name: [] for name in (*fields, "megahertz")}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            found = pynvml.nvmlDeviceGetFieldValues(handle, list(fields.values()))
            for name, one in zip(fields, found, strict=True):
                if one.nvmlReturn == pynvml.NVML_SUCCESS:
                    samples[name].append(one.value.uiVal)
            clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            samples["megahertz"].append(clock)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        seen |= {name: round(statistics.mean(x), 2) for name, x in samples.items() if x}
        if "watts" in seen:
            seen["watts"] /= 1e3


@contextmanager
def _copying(
    device: torch.device, world_size: int, copies: int, nbytes: int, seconds: float
) -> Iterator[None]:
    """Meanwhile, copy from the next GPU now and then; the one before does so from this one."""
    theirs = torch.device("cuda", (device.index + 1) % world_size)
    source, target = (torch.empty(nbytes, dtype=torch.uint8, device=x) for x in (theirs, device))
    done = threading.Event()

    def copy() -> None:
        torch.cuda.set_device(device)
        with torch.cuda.stream(torch.cuda.Stream(device, priority=-1)):
            while not done.wait(seconds):
                for _ in range(copies):
                    target.copy_(source, non_blocking=True)

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _waiting(device: torch.device, count: int) -> Iterator[None]:
    """Meanwhile, streams wait for a flag, as those of `PeerMemory` do most of the time."""
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device, priority=-1) for _ in range(count)]
    for stream in streams:
        wait_for_flag(stream.cuda_stream, flag.data_ptr(), 1)
    try:
        yield
    finally:
        flag.fill_(1)
        for stream in streams:
            stream.synchronize()


if __name__ == "__main__":
    typer.run(main)
