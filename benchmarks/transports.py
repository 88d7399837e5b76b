"""Copies between GPUs of one host against messages of NCCL, and one GPU in the same run.

    torchrun --nproc-per-node 4 benchmarks/transports.py --out transports.json

A sample is so many calls back to back that they take about 0.3 s, from a barrier on, by CUDA
events, on the slowest rank. Whether both transports find the same is in the JSON too.
"""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from ranks import Ranks, join

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


class Timed(NamedTuple):
    """A case over one exchange, when it has been timed.

    Attributes:
        case: the case.
        name: of the exchange.
        exchange: the exchange.
        call: the call.
        waits: how often the exchange had waited for all ranks before.
        speed_up: over one GPU; NaN but on the first rank.
        peak: GiB over the inputs.
    """

    case: Case
    name: str
    exchange: ProcessGroupExchange
    call: Call
    waits: int
    speed_up: float
    peak: float


def compare(
    exchanges: dict[str, ProcessGroupExchange],
    label: str,
    details: Callable[[Timed], tuple[dict[str, Any], str]],
    joined: Ranks,
    samples: int,
    only: str,
) -> list[dict[str, Any]]:
    """Time cases on one GPU, then over each exchange, printing a line each.

    Args:
        exchanges: by name.
        label: what a name says, in rows.
        details: what else to find out on every rank: for the row, and for the end of the line.
        joined: the ranks.
        samples: of each time.
        only: a part of the names of the cases.

    Returns:
        The rows, on the first rank.
    """
    rows: list[dict[str, Any]] = []
    width = max(map(len, exchanges))
    for case in (case for case in CASES if only in case.name):
        one, median = [math.nan], statistics.median
        if joined.rank == 0:
            one, peak = measure(call_of(case, None, 0, 1, joined.device), samples, None)
            rows.append({"case": case.name, "ranks": 1, "ms": one, "peak_gib": peak})
        torch.cuda.empty_cache()
        dist.barrier(group=joined.host)
        for name, exchange in exchanges.items():
            call = call_of(case, exchange, joined.rank, joined.size, joined.device)
            call()  # what is the first of its kind takes longer
            waits = exchange.waits
            times, peak = measure(call, samples, joined.host)
            speed_up = median(one) / median(times)
            more, text = details(Timed(case, name, exchange, call, waits, speed_up, peak))
            del call
            torch.cuda.empty_cache()
            if joined.rank == 0:
                row = {"case": case.name, "ranks": joined.size, label: name, "ms": times}
                rows.append(row | {"peak_gib": peak} | more)
                print(
                    f"{case.name:28} {name:{width}} {median(times):8.2f} ms "
                    f"[{min(times):.2f} .. {max(times):.2f}] on {joined.size}, "
                    f"{median(one):8.2f} on 1: speed-up {speed_up:.3f}{text}",
                    flush=True,
                )
    return rows


def finish(joined: Ranks, out: Path | None, **found: Any) -> None:
    """Write what was found, on the first rank, and leave."""
    if joined.rank == 0 and out is not None:
        found_by = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        out.write_text(json.dumps(found_by | found, indent=1) + "\n")
    dist.barrier(group=joined.host)
    dist.destroy_process_group()


def main(
    samples: int = 5,
    only: Annotated[str, typer.Option(help="cases whose name has this")] = "",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time all cases."""
    joined = join()
    exchanges = {
        "copies": ProcessGroupExchange(joined.world, peer_memory=True),
        "NCCL": ProcessGroupExchange(joined.world, peer_memory=False),
    }
    first: dict[Case, tuple[torch.Tensor, ...]] = {}

    def details(timed: Timed) -> tuple[dict[str, Any], str]:
        """How far both transports differ."""
        found = timed.call()
        before = first.pop(timed.case, ())  # of the other transport
        if not before:
            first[timed.case] = found
        differ = [((a - b).norm() / b.norm()).item() for a, b in zip(found, before, strict=False)]
        per_gpu = timed.speed_up / joined.size
        return {"differs_by": differ}, f", {per_gpu:.3f} per GPU, peak {timed.peak:.2f} GiB"

    rows = compare(exchanges, "transport", details, joined, samples, only)
    finish(joined, out, rows=rows)


if __name__ == "__main__":
    typer.run(main)
