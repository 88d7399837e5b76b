"""Ranks that are told to be on two hosts, against one host and one GPU, in the same run.

    torchrun --nproc-per-node 2 benchmarks/hosts.py --out hosts.json

The first half of the ranks is on the first host. Speed as in transports.py; a call's host time is
that until it returns, from an idle device on. On two hosts, the JSON says how often ranks waited
for all others in the timed calls, which should be never; on one host they do in every call.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from ranks import join
from transports import Call, Timed, compare, finish

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
    joined = join()
    hosts = [2 * each // joined.size for each in range(joined.size)]
    exchanges = {
        "one host": ProcessGroupExchange(joined.world),
        "two hosts": ProcessGroupExchange(dist.new_group(), hosts=hosts),
    }

    def details(timed: Timed) -> tuple[dict[str, Any], str]:
        """Host times; and on two hosts, how often ranks waited for all others."""
        host = host_times(timed.call, repeats, joined.host)
        text = f"; host {statistics.median(host):.2f} ms [{min(host):.2f} .. {max(host):.2f}]"
        waits = None
        if timed.name == "two hosts":
            waits = timed.exchange.waits - timed.waits
            text += f", {waits} waits for all ranks"
        return {"host_ms": host, "waits": waits}, text

    rows = compare(exchanges, "on", details, joined, samples, only)
    finish(joined, out, hosts=hosts, rows=rows)


if __name__ == "__main__":
    typer.run(main)
