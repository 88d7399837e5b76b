"""Copies between GPUs of one host against messages of NCCL, and one GPU in the same run.

    torchrun --nproc-per-node 4 benchmarks/transports.py --out transports.json

A sample is so many calls back to back that they take about 0.3 s, from a barrier on, by CUDA
events, on the slowest rank. Whether both transports find the same is in the JSON too.
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from ranks import join

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.exchange import Group, ProcessGroupExchange
from ring_dilated_attention.named_patterns import named

SAMPLE_MS = 300


class Case(NamedTuple):
    """A call: of `heads` heads of 128, in bfloat16."""

    name: str
    pattern: DilatedPattern
    length: int
    heads: int
    is_causal: bool
    backward: bool


DENSE = DilatedPattern.dense()
CROSSING = DilatedPattern([2048, 16384, 131072, None], [1, 8, 64, 512])
CASES = [
    *(
        Case(f"dense causal {length:,}{' fwd+bwd' * backward}", DENSE, length, 16, True, backward)
        for length in (65_536, 262_144)
        for backward in (False, True)
    ),
    *(
        Case(f"crossing{' causal' * causal} 1M fwd+bwd", CROSSING, 2**20, 12, causal, True)
        for causal in (False, True)
    ),
    Case("longnet 1M fwd+bwd", named("longnet").pattern, 2**20, 12, False, True),
]

Call = Callable[[], tuple[torch.Tensor, ...]]


def call_of(
    case: Case,
    group: Group,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    zeros: bool = False,
) -> Call:
    """What a rank of so many runs, with random inputs or zeros."""
    deal = SequenceLayout.zigzag if case.is_causal else SequenceLayout.contiguous
    layout = deal(case.length, world_size)
    generator = torch.Generator(device).manual_seed(rank)
    shape = 1, layout.local_length(rank), case.heads, 128
    query, key, value, dout = (
        torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * (not zeros)
        for _ in range(4)
    )
    leaves = [x.requires_grad_(case.backward) for x in (query, key, value)]

    def call() -> tuple[torch.Tensor, ...]:
        out = dilated_attention(
            query, key, value, case.pattern, is_causal=case.is_causal, group=group, layout=layout
        )
        return (out.detach(), *torch.autograd.grad(out, leaves, dout)) if case.backward else (out,)

    return call


def sample(call: Call, calls: int, meet: Callable[[], None]) -> float:
    """Milliseconds of a call on this rank."""
    torch.cuda.synchronize()
    meet()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


def measure(call: Call, samples: int, ranks: dist.ProcessGroup | None) -> tuple[list[float], float]:
    """Milliseconds of a call in each sample and GiB over the inputs, the most of any rank."""

    def meet() -> None:
        if ranks is not None:
            dist.barrier(group=ranks)

    def slowest(*values: float) -> list[float]:
        found = torch.tensor(values, dtype=torch.float64)
        if ranks is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=ranks)
        return found.tolist()

    for _ in range(2):  # kernels compile
        call()
    (once,) = slowest(sample(call, 1, meet))
    calls = max(1, round(SAMPLE_MS / once))
    times = slowest(*(sample(call, calls, meet) for _ in range(samples)))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    (peak,) = slowest((torch.cuda.max_memory_allocated() - before) / 2**30)
    return times, peak


def main(
    samples: int = 5,
    only: Annotated[str, typer.Option(help="cases whose name has this")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time all cases."""
    rank, world_size, world, ranks, device = join()
    exchanges = {
        "copies": ProcessGroupExchange(world, peer_memory=True),
        "NCCL": ProcessGroupExchange(world, peer_memory=False),
    }
    rows = []
    for case in (case for case in CASES if only in case.name):
        alone: list[float] = []
        if rank == 0:
            alone, peak = measure(call_of(case, None, 0, 1, device), samples, None)
            rows.append({"case": case.name, "ranks": 1, "ms": alone, "peak_gib": peak})
        torch.cuda.empty_cache()
        dist.barrier(group=ranks)
        first: tuple[torch.Tensor, ...] = ()
        for name, exchange in exchanges.items():
            call = call_of(case, exchange, rank, world_size, device)
            times, peak = measure(call, samples, ranks)
            found = call()
            differ = [
                ((a - b).norm() / b.norm()).item() for a, b in zip(found, first, strict=False)
            ]
            first = first or found
            del call, found
            torch.cuda.empty_cache()
            if rank == 0:
                row = {"case": case.name, "ranks": world_size, "transport": name, "ms": times}
                rows.append(row | {"peak_gib": peak, "differs_by": differ})
                speed_up = statistics.median(alone) / statistics.median(times)
                print(
                    f"{case.name:28} {name:6} {statistics.median(times):8.2f} ms "
                    f"[{min(times):.2f} .. {max(times):.2f}] on {world_size}, "
                    f"{statistics.median(alone):8.2f} on 1: speed-up {speed_up:.3f}, "
                    f"{speed_up / world_size:.3f} per GPU, peak {peak:.2f} GiB",
                    flush=True,
                )
        del first
    if rank == 0 and out is not None:
        found_by = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        out.write_text(json.dumps(found_by | {"rows": rows}, indent=1) + "\n")
    dist.barrier(group=ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
