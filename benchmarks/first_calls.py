"""What the first call of a new length, or of new documents, costs beside its repetition.

    python benchmarks/first_calls.py --device cuda --out first_calls.json
    python benchmarks/first_calls.py --device cpu

Forward and backward. On CUDA: wall time until the device is idle. On a CPU, whose number is that of
the host alone: everything is planned, and launched, as on an H200, with kernels that do nothing;
times are those of the process on the CPU, the lowest of `turns` in each of which all is planned
anew. The cost of flash-attn-4's own look-ups for a new shape is not in it.
To compare two versions, run it in turns with PYTHONPATH set to the `src` of each.
"""

import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.kernels import H200
from ring_dilated_attention.named_patterns import named
from ring_dilated_attention.plan import RankPlan
from ring_dilated_attention.resolve import forget_plans
from ring_dilated_attention.tiles import Selection, TileBackend, TileInputs, limits_on

Call = tuple[int, list[int] | None]
"""Length, and cumulative lengths of documents."""


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda",
    pattern: Annotated[str, typer.Option(help="gigapath (with zero keys) or longnet")] = "gigapath",
    calls: Annotated[int, typer.Option(help="first calls of each kind")] = 30,
    warm: Annotated[int, typer.Option(help="other calls before them")] = 20,
    turns: Annotated[int, typer.Option(help="on a CPU")] = 3,
    packed: Annotated[int, typer.Option(help="tokens of packed documents")] = 131_072,
    own_thread: Annotated[bool, typer.Option(help="backward in autograd's thread")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Print median and highest extra ms of each kind of call."""
    shape = named(pattern)
    asked = shape.pattern
    if pattern == "gigapath":
        asked = DilatedPattern(
            asked.segment_lengths, asked.dilation_rates, head_offsets="blocked", zero_keys=True
        )
    on_cuda, found = device == "cuda", []
    collecting = _Collecting()

    def run(call: Call) -> tuple[float, float]:
        """Milliseconds of forward, and of backward."""
        length, documents = call
        full = 1, length, shape.num_heads, shape.head_dim
        dtype = getattr(torch, shape.dtype)
        make: Callable[..., Any] = torch.randn if on_cuda else torch.empty  # untouched memory
        *leaves, dout = (make(full, dtype=dtype, device=device) for _ in range(4))
        leaves = [x.requires_grad_() for x in leaves]
        marks = [_clock(on_cuda)]
        result = dilated_attention(*leaves, asked, documents=documents)
        marks.append(time.perf_counter() if on_cuda else _clock(on_cuda))
        with torch.autograd.set_multithreading_enabled(own_thread):
            torch.autograd.grad(result, leaves, dout)
        marks.append(_clock(on_cuda))
        return 1e3 * (marks[1] - marks[0]), 1e3 * (marks[2] - marks[1])

    with ExitStack() as stack:
        if not on_cuda:
            torch.set_num_threads(1)
            stack.enter_context(_kernels_that_do_nothing())
        for name, drawn in _kinds(calls + warm, packed):
            best: dict[int, list[float]] = {}
            collected: dict[int, float] = {}
            for _ in range(1 if on_cuda else turns):
                forget_plans()
                gc.collect()
                for call in drawn[:warm]:
                    run(call)
                for number, call in enumerate(drawn[warm:]):
                    before = collecting.ms
                    first = run(call)
                    collected[number] = collecting.ms - before
                    again = [run(call) for _ in range(3)]
                    middle = map(statistics.median, zip(*again, strict=True))
                    times = [*first, *middle]
                    best[number] = list(map(min, best.get(number, times), times))
            forward, backward, *again_both = map(
                statistics.median, zip(*best.values(), strict=True)
            )
            extra = [a + b - c - d for a, b, c, d in best.values()]
            worst = max(range(calls), key=extra.__getitem__)
            row = {
                "calls": name,
                "first_ms": [round(forward, 3), round(backward, 3)],
                "again_ms": [round(x, 3) for x in again_both],
                "extra_median_ms": round(statistics.median(extra), 2),
                "extra_highest_ms": round(extra[worst], 2),
                "highest": {
                    "tokens": drawn[warm + worst][0],
                    "first_ms": [round(x, 3) for x in best[worst][:2]],
                    "garbage_collection_ms": round(collected[worst], 3),
                },
                "garbage_collection_highest_ms": round(max(collected.values()), 3),
            }
            found.append(row)
            print(json.dumps(row), flush=True)
    if out is not None:
        kind = torch.cuda.get_device_name() if on_cuda else "host alone"
        about = {"device": kind, "torch": torch.__version__, "pattern": pattern, "rows": found}
        out.write_text(json.dumps(about, indent=1) + "\n")


class _Collecting:
    """Time that Python has collected garbage for, which it does within calls of anything."""

    def __init__(self) -> None:
        self.ms, self._begun = 0.0, 0.0
        gc.callbacks.append(self._mark)

    def _mark(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
        else:
            self.ms += 1e3 * (time.perf_counter() - self._begun)


def _kinds(count: int, packed: int) -> Iterator[tuple[str, list[Call]]]:
    """Calls of each kind, none twice."""
    dice = random.Random(0)
    for low, high in ((1000, 6500), (7000, 40_000)):
        lengths = dice.sample(range(low, high), count)
        yield f"lengths {low} to {high}", [(length, None) for length in lengths]
    for mean in (8000, 1000):
        cuts = [sorted(dice.sample(range(1, packed), packed // mean)) for _ in range(count)]
        yield f"documents of {mean}", [(packed, [0, *each, packed]) for each in cuts]


def _clock(on_cuda: bool) -> float:
    if not on_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _kernels_that_do_nothing() -> Iterator[None]:
    """CPU tensors are computed with as those of an H200 are, by kernels that do nothing."""

    def forward(tile: TileInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(tile.q), torch.empty(tile.q.shape[:3])

    nothing = TileBackend(
        name="nothing",
        forward=forward,
        backward=lambda tile, _: tuple(map(torch.empty_like, tile[:3])),  # type: ignore[arg-type]
        refusal=lambda *_: None,
        forward_into=lambda *_: None,
        backward_into=lambda *_: None,
    )

    def select(name: str, device: Any, dtype: Any, head_dim: int) -> Selection:
        return Selection(nothing, limits_on(H200, 2, head_dim, keeps_calls=True))

    def sum_dtype(query: torch.Tensor, additions: float) -> torch.dtype:
        return query.dtype if additions <= RankPlan.FEW_ADDITIONS else torch.float32

    package = "ring_dilated_attention"
    with (
        patch(f"{package}.resolve.select_backend", select),
        patch(f"{package}.kernels.launch.Launcher.__call__", lambda *_: None),
        patch(f"{package}.engine.accumulate.runs_triton", lambda _: True),
        patch(f"{package}.engine.ring.sum_dtype", sum_dtype),
    ):
        yield


if __name__ == "__main__":
    typer.run(main)
