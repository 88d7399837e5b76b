"""Ranks that are told to be on two hosts, against one host and one GPU, in the same run.

    torchrun --nproc-per-node 2 benchmarks/hosts.py --out hosts.json

The first half of the ranks is on the first host. Speed as in transports.py; a call's host time is
that until it returns, from an idle device on. How often ranks waited for all others in the timed
calls is in the JSON too: on two hosts it should be never.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from ranks import join
from transports import CASES, Call, call_of, measure

from ring_dilated_attention.exchange import ProcessGroupExchange


def host_times(call: Call, repeats: int, ranks: dist.ProcessGroup) -> list[float]:
    """Milliseconds until a call returns, on the rank where that takes longest."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier(group=ranks)
        begun = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begun))
    torch.cuda.synchronize()
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=ranks)
    found: list[float] = slowest.tolist()
    return found


def main(
    samples: int = 5,
    repeats: Annotated[int, typer.Option(help="calls whose host time is taken")] = 40,
    only: Annotated[str, typer.Option(help="cases whose name has this")] = "fwd+bwd",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time all cases."""
    rank, world_size, world, ranks, device = join()
    hosts = [2 * each // world_size for each in range(world_size)]
    exchanges = {
        "one host": ProcessGroupExchange(world),
        "two hosts": ProcessGroupExchange(dist.new_group(), hosts=hosts),
    }
    rows = []
    for case in (case for case in CASES if only in case.name):
        alone: list[float] = []
        if rank == 0:
            alone, peak = measure(call_of(case, None, 0, 1, device), samples, None)
            rows.append({"case": case.name, "ranks": 1, "ms": alone, "peak_gib": peak})
        torch.cuda.empty_cache()
        dist.barrier(group=ranks)
        for name, exchange in exchanges.items():
            call = call_of(case, exchange, rank, world_size, device)
            call()
            before = exchange.waits
            times, peak = measure(call, samples, ranks)
            host = host_times(call, repeats, ranks)
            waits = exchange.waits - before
            del call
            torch.cuda.empty_cache()
            if rank == 0:
                row = {"case": case.name, "ranks": world_size, "on": name, "ms": times}
                rows.append(row | {"host_ms": host, "waits": waits, "peak_gib": peak})
                speed_up = statistics.median(alone) / statistics.median(times)
                print(
                    f"{case.name:28} {name:9} {statistics.median(times):8.2f} ms "
                    f"[{min(times):.2f} .. {max(times):.2f}] on {world_size}, "
                    f"{statistics.median(alone):8.2f} on 1: speed-up {speed_up:.3f}; "
                    f"host {statistics.median(host):.2f} ms [{min(host):.2f} .. {max(host):.2f}], "
                    f"{waits} waits for all ranks",
                    flush=True,
                )
    if rank == 0 and out is not None:
        found_by = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        out.write_text(json.dumps(found_by | {"hosts": hosts, "rows": rows}, indent=1) + "\n")
    dist.barrier(group=ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
