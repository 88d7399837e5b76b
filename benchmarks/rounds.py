"""What it costs to run a dense ring for a few heads, and a piece of rows, at a time: ms and bytes.

    torchrun --nproc-per-node 4 benchmarks/rounds.py --out rounds.json

Each row is a call with another value of `plan.spec.ROUND_PAIRS`, one GPU in the same run;
timed as in transports.py. Memory is inputs and peak over those of one GPU.
"""

import json
import statistics
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from ranks import join
from transports import DENSE, Case, call_of, measure

from ring_dilated_attention.plan import spec
from ring_dilated_attention.resolve import forget_plans

HEADS = 16
POWERS = {  # of two, of ROUND_PAIRS, by length
    65_536: range(28, 33),
    262_144: range(31, 34),
}


def main(
    samples: int = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time all settings."""
    rank, world_size, world, ranks, device = join()
    rows = []
    for (length, powers), backward in product(POWERS.items(), (False, True)):
        case = Case(f"dense causal {length:,}", DENSE, length, HEADS, True, backward)
        inputs = (3 + backward) * length * HEADS * 128 * 2 / 2**30
        alone, one = [0.0], 0.0
        if rank == 0:
            alone, one = measure(call_of(case, None, 0, 1, device), samples, None)
        torch.cuda.empty_cache()
        dist.barrier(group=ranks)
        for power in powers:
            spec.ROUND_PAIRS = 1 << power
            forget_plans()  # plans keep their rounds
            call = call_of(case, world, rank, world_size, device)
            times, peak = measure(call, samples, ranks)
            del call
            torch.cuda.empty_cache()
            if rank == 0:
                rate = statistics.median(alone) / statistics.median(times) / world_size
                memory = (inputs / world_size + peak) / (inputs + one)
                row = {"length": length, "backward": backward, "round_pairs": power}
                row |= {"one_ms": alone, "ms": times, "rate": rate, "memory": memory}
                rows.append(row)
                print(
                    f"{case.name} {'fwd+bwd' if backward else 'forward'} 2^{power}: "
                    f"{statistics.median(times):.2f} ms [{min(times):.2f} .. "
                    f"{max(times):.2f}], {rate:.3f} per GPU, {memory:.3f} of the memory",
                    flush=True,
                )
                if out is not None:
                    about = {"device": torch.cuda.get_device_name(), "ranks": world_size}
                    out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    dist.barrier(group=ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
