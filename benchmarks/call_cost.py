"""What a call costs beside its kernels: many small calls on ranks of one host, wall time of each.

    python benchmarks/call_cost.py --ranks 2 --device cpu
    python benchmarks/call_cost.py --ranks 2 --device cuda
    python benchmarks/call_cost.py --ranks 2 --no-board

Each number is that of the rank that took longest: the lowest tenth, and the median. Without a board
ranks agree as those of several hosts do, but over the loopback interface.
To compare two versions, run it in turns with PYTHONPATH set to the `src` of each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import ring_dilated_attention
from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.exchange import ProcessGroupExchange


def measure(
    rank: int, world_size: int, folder: str, device_type: str, length: int, board: bool
) -> None:
    """Write what this rank's calls took, in microseconds."""
    torch.set_num_threads(1)
    if not board:
        vars(sys.modules[ProcessGroupExchange.__module__])["make_board"] = lambda *args: None
    device, group = torch.device("cpu"), None
    if device_type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group(
            "gloo" if device_type == "cpu" else "nccl",
            store=dist.FileStore(f"{folder}/store", world_size),
            rank=rank,
            world_size=world_size,
        )
        group = dist.group.WORLD
    # Segments of half a rank: nothing travels, so that what is left is the price of a call.
    pattern = DilatedPattern([length // 2], [2])
    dtype = torch.float16 if device_type == "cuda" else torch.float32
    query, key, value = (
        torch.randn(1, length, 2, 16, device=device, dtype=dtype).requires_grad_() for _ in range(3)
    )
    dout = torch.randn_like(query)

    def synchronize() -> None:
        if device_type == "cuda":
            torch.cuda.synchronize(device)

    def forward() -> None:
        with torch.no_grad():
            dilated_attention(query, key, value, pattern, group=group)

    def both() -> None:
        dilated_attention(query, key, value, pattern, group=group).backward(dout)

    found = {}
    for name, call in (("forward", forward), ("forward+backward", both)):
        for _ in range(200):
            call()
        synchronize()
        taken = []
        for _ in range(30):
            begun = time.perf_counter()
            for _ in range(40):
                call()
            synchronize()
            taken.append((time.perf_counter() - begun) / 40 * 1e6)
        # The lowest tenth says what a call costs where nothing else wants the cores.
        found[name] = [statistics.quantiles(taken, n=10)[0], statistics.median(taken)]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if world_size > 1:
        dist.destroy_process_group()


def main() -> None:
    """Run the ranks, and print what the slowest took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--length", type=int, default=64, help="of a rank's shard")
    parser.add_argument("--no-board", action="store_true", help="agree as ranks of several hosts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args = options.ranks, folder, options.device, options.length, not options.no_board
        mp.spawn(measure, args, nprocs=options.ranks)
        by_rank = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    slowest = {}
    for name in by_rank[0]:
        tenth, median = (max(x) for x in zip(*(one[name] for one in by_rank), strict=True))
        slowest[name] = {"tenth": round(tenth, 1), "median": round(median, 1)}
    source = Path(ring_dilated_attention.__file__).parents[2].name
    board = not options.no_board
    print(json.dumps({"source": source, "ranks": options.ranks, "board": board, "us": slowest}))


if __name__ == "__main__":
    main()
