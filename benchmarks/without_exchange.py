"""What the ranks of a dense ring compute, beside the ring itself and one GPU: ms.

    torchrun --nproc-per-node 4 benchmarks/without_exchange.py --out without_exchange.json

On all GPUs at once: the whole sequence, on each by itself; what a rank of the ring computes, with
rows of other ranks copied from the GPU's own memory; the ring. What the second takes more than a
share of the first is what tiles cost, what the third takes more than the second is what exchanging
costs. Timed as in transports.py.
"""

import json
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from ranks import join
from transports import DENSE, SAMPLE_MS, Call, Case, call_of, sample

HEADS = 16
LENGTHS = (65_536, 262_144)
COPIED = 64 << 20  # elements that stand for those of other ranks


class OwnRows:
    """An `Exchange` of one rank of several that are not there: rows come from its own memory."""

    def __init__(self, rank: int, world_size: int, device: torch.device, *, zeros: bool) -> None:
        self.rank, self.world_size, self.sent_bytes = rank, world_size, 0
        self._rows = torch.randn(COPIED, device=device, dtype=torch.bfloat16) * (not zeros)
        self._stream = torch.cuda.Stream(device, priority=-1)

    def start(
        self, send: tuple[int, torch.Tensor] | None, receive: tuple[int, torch.Tensor] | None
    ) -> "Copied":
        """Copy what would be received, behind the compute."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if receive is not None:
                for part in receive[1].view(-1).split(COPIED):
                    part.copy_(self._rows[: len(part)])
            return Copied(self._stream.record_event())

    def maximum(self, values: Sequence[int], device: torch.device) -> list[int]:
        """Those of this rank."""
        return list(values)

    def share(self, value: Any) -> list[Any]:
        """As if every rank had the same."""
        return [value] * self.world_size

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Likewise."""
        return [tensor.clone() for _ in range(self.world_size)]


class Copied:
    """A copy under way."""

    def __init__(self, done: torch.cuda.Event) -> None:
        self._done = done

    def wait(self) -> None:
        """Have the compute wait for it."""
        torch.cuda.current_stream().wait_event(self._done)


def main(
    samples: int = 4,
    zeros: Annotated[
        bool, typer.Option(help="as inputs, with which GPUs stay below their power limit")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time all three."""
    rank, world_size, world, ranks, device = join()
    own_rows = OwnRows(rank, world_size, device, zeros=zeros)

    def meet() -> None:
        dist.barrier(group=ranks)

    def medians(call: Call) -> list[float]:
        """Of a call on each rank."""
        for _ in range(2):  # kernels compile
            call()
        once = torch.tensor(sample(call, 1, meet))
        dist.all_reduce(once, op=dist.ReduceOp.MAX, group=ranks)
        calls = max(1, round(SAMPLE_MS / once.item()))
        median = statistics.median(sample(call, calls, meet) for _ in range(samples))
        every: list[Any] = [None] * world_size
        dist.all_gather_object(every, median, group=ranks)
        return every

    rows = []
    for length, backward in product(LENGTHS, (False, True)):
        case = Case(f"dense causal {length:,}", DENSE, length, HEADS, True, backward)
        found = {}
        for name, group, size in (
            ("alone", None, 1), ("without exchange", own_rows, world_size),
            ("ring", world, world_size),
        ):  # fmt: skip
            found[name] = medians(call_of(case, group, rank % size, size, device, zeros=zeros))
            torch.cuda.empty_cache()
        rows.append({"length": length, "backward": backward, "ms": found})
        if rank == 0:
            print(f"{case.name} {'fwd+bwd' if backward else 'forward'}", flush=True)
            for name, every in found.items():
                print(f"  {name:16}", *(f"{ms:9.2f}" for ms in every), flush=True)
            if out is not None:
                about = {"device": torch.cuda.get_device_name(), "ranks": world_size}
                about |= {"zeros": zeros}
                out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
