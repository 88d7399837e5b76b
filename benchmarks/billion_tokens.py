"""A sequence of a billion tokens: one head, LongNet's pattern extended to the whole sequence.

    torchrun --nproc-per-node 4 benchmarks/billion_tokens.py --log2-length 30
    torchrun --nproc-per-node 4 benchmarks/billion_tokens.py --log2-length 29 --backward

Times calls, and recomputes rows in float64 at positions in every branch and at every rank border.
"""

import json
import statistics
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from ranks import join

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import Shard, positions_to_check, spot_check
from ring_dilated_attention.exchange import resolve_exchange

LONGNET = [(2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12)]


def extended(length: int) -> DilatedPattern:
    """LongNet's branches, then both numbers doubled until a segment is the whole sequence."""
    branches = [(w, r) for w, r in LONGNET if w < length]
    w, r = LONGNET[-1]
    while w < length:
        w, r = 2 * w, 2 * r
        branches.append((min(w, length), r))
    return DilatedPattern([w for w, _ in branches], [r for _, r in branches])


def main(
    log2_length: int = 30,
    backward: bool = False,
    head_dim: int = 64,
    workspace: Annotated[float, typer.Option(help="see dilated_attention")] = 0.05,
    repeats: int = 5,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time and check."""
    cuda = torch.cuda.is_available()
    rank, world_size, *_, device = join("cuda" if cuda else "cpu")
    length = 2**log2_length
    pattern, layout = extended(length), SequenceLayout.contiguous(length, world_size)
    generator = torch.Generator(device).manual_seed(seed + rank)
    shape = 1, layout.local_length(rank), 1, head_dim
    dtype = torch.bfloat16 if cuda else torch.float32

    def draw() -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)

    query, key, value = (draw().requires_grad_(backward) for _ in range(3))
    dout = draw() if backward else None
    group = dist.group.WORLD if world_size > 1 else None

    def call() -> tuple[torch.Tensor, ...]:
        result, lse = dilated_attention(
            query, key, value, pattern, group=group, layout=layout, workspace=workspace,
            return_lse=True,
        )  # fmt: skip
        if dout is None:
            return result, lse
        return result.detach(), lse, *torch.autograd.grad(result, (query, key, value), dout)

    times = []
    for _ in range(1 + repeats):  # the first compiles
        dist.barrier()
        if cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            results = call()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            results = call()
            times.append(0.0)
        del results
    slowest = torch.tensor(times[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    peak = torch.tensor([torch.cuda.max_memory_allocated() if cuda else 0])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)

    result, lse, *gradients = call()
    detached = [x.detach() for x in (query, key, value, result)]
    shard = Shard(*detached, lse, dout, *gradients) if backward else Shard(*detached, lse)
    positions = positions_to_check(pattern, layout, seed=seed)
    ends = resolve_exchange(group)
    errors = spot_check(shard, pattern, layout, ends, positions)
    if rank == 0:
        values = slowest.tolist()
        found = {
            "length": length,
            "world_size": world_size,
            "backward": backward,
            "pattern": str(pattern),
            "median_ms": statistics.median(values),
            "min_ms": min(values),
            "max_ms": max(values),
            "peak_gib_with_inputs": peak.item() / 2**30,
            "rows_checked": len(positions),
            "relative_errors": errors,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
        }
        print(json.dumps(found, indent=1))
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
