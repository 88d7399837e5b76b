"""What a call of a dense ring takes the host: milliseconds until it returns, by function.

    torchrun --nproc-per-node 4 benchmarks/host_time.py --out host_time.json

Where that is longer than the GPU computes, the GPU waits: short sequences, and rings cut into many
rounds (benchmarks/rounds.py). The device is idle before each call, so nothing waits for it. With
`--device cpu` transfers are waited for, and the tiles are computed, within the call.
"""

import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from ranks import join

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.plan import spec
from ring_dilated_attention.resolve import forget_plans


def main(
    length: int = 65_536,
    heads: int = 16,
    head_dim: int = 128,
    repeats: int = 20,
    power: Annotated[list[int] | None, typer.Option(help="of two, of ROUND_PAIRS")] = None,
    shown: Annotated[int, typer.Option(help="functions of each row")] = 25,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time forward and backward, each by the host's clock and then by its profiler."""
    rank, world_size, world, ranks, own = join(device)
    cuda = device == "cuda"
    layout = SequenceLayout.zigzag(length, world_size)
    shape = 1, layout.local_length(rank), heads, head_dim
    dtype = torch.bfloat16 if cuda else torch.float32
    query, key, value, dout = (torch.randn(shape, device=own, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    made: list[torch.Tensor] = []

    def forward() -> None:
        made[:] = [
            dilated_attention(
                *leaves, DilatedPattern.dense(), is_causal=True, group=world, layout=layout
            )
        ]

    def backward() -> None:
        # In this thread, which the profiler sees.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.grad(made, leaves, dout)

    rows: list[dict[str, Any]] = []
    for exponent in power or (28, 31):
        spec.ROUND_PAIRS = 1 << exponent
        forget_plans()  # plans keep their rounds
        profilers = {forward: cProfile.Profile(), backward: cProfile.Profile()}
        times: dict[Callable[[], None], list[float]] = {forward: [], backward: []}
        for number in range(-2, 2 * repeats):  # at first kernels compile
            for call in (forward, backward):
                if cuda:
                    torch.cuda.synchronize()
                dist.barrier(group=ranks)
                begin = time.perf_counter()
                if number >= repeats:
                    profilers[call].runcall(call)
                else:
                    call()
                    times[call] += [1e3 * (time.perf_counter() - begin)] * (number >= 0)
        for call, profiler in profilers.items():
            row = {"rank": rank, "round_pairs": exponent, "direction": call.__name__}
            longest = _longest(profiler, repeats, shown)
            rows.append(row | {"ms": times[call], "profiled": longest})
            if rank == 0:
                median = statistics.median(times[call])
                print(f"2^{exponent} {call.__name__}: {median:.2f} ms; profiled:", flush=True)
                for name, (count, milliseconds) in longest.items():
                    print(f"  {milliseconds:8.3f} ms {count:7.1f} x {name[:90]}", flush=True)
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, rows, group=ranks)
    if rank == 0 and out is not None:
        kind = torch.cuda.get_device_name() if cuda else "cpu"
        about = {"device": kind, "length": length, "heads": heads, "rows": list(chain(*every))}
        out.write_text(json.dumps(about, indent=1) + "\n")
    dist.barrier(group=ranks)
    dist.destroy_process_group()


def _longest(profiler: cProfile.Profile, calls: int, count: int) -> dict[str, tuple[float, float]]:
    """How often a call of ours makes a function's, and the milliseconds of that by itself."""
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    found = {
        f"{Path(file).name}:{line} {name}": (entry[1] / calls, 1e3 * entry[2] / calls)
        for (file, line, name), entry in stats.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1][1])[:count])


if __name__ == "__main__":
    typer.run(main)
