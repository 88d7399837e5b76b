"""Attention calls one by one: errors, wall time, kernels, CUDA graphs, and first calls.

    python benchmarks/calls.py --out calls.json
    python benchmarks/calls.py --first 60                       # and calls of new lengths
    PYTHONPATH=OTHER/src python benchmarks/calls.py             # in turns, to compare two versions
    torchrun --nproc-per-node 2 benchmarks/calls.py --cases "LongNet 4,096"
    python benchmarks/calls.py --longest 300 --first 2          # on a CPU: that it runs

Wall time is that of 20 calls in a row until the device is idle, per call; where it is longer than
that of a CUDA graph, the host decides. Errors of out and of the gradients are relative to brute
force in float64, on the first 2,001 tokens. A first call is one of a length that the process has
not seen: what it takes more than the same call again is planning, and looking up kernels.
"""

import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import Ranks, in_a_row, join, kernels_of, leave, spread, write

from ring_dilated_attention import dilated_attention
from ring_dilated_attention.bench import Workload
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.named_patterns import named

IN_A_ROW = 20
COMPARED = 2001
"""Tokens of a comparison with brute force."""


def workload(name: str, seq_len: int, **options: Any) -> Workload:
    """A published pattern in its shape; GigaPath's with zero keys, as its model has them."""
    found = named(name)
    pattern = replace(found.pattern, zero_keys=name == "gigapath")
    shape = {"num_heads": found.num_heads, "head_dim": found.head_dim, "dtype": found.dtype}
    return Workload(pattern=pattern, seq_len=seq_len, **{**shape, **options})


CASES = {
    "GigaPath 2,001": workload("gigapath", 2_001),
    "GigaPath 10,001": workload("gigapath", 10_001),
    "GigaPath 45,681": workload("gigapath", 45_681),
    "LongNet 4,096": workload("longnet", 4_096),
    "LongNet 4,096 causal": workload("longnet", 4_096, is_causal=True),
    "LongNet 262,144": workload("longnet", 262_144),
    "LongNet 262,144 causal": workload("longnet", 262_144, is_causal=True),
    "LongNet 4,096, 3 heads a KV head": workload("longnet", 4_096, num_kv_heads=4),
}
Pass = Callable[[], tuple[torch.Tensor, ...]]


def passes(case: Workload, ranks: Ranks) -> dict[str, Pass]:
    """Forward and forward+backward on random inputs; each returns what it computes."""
    layout = case.layout(ranks.size)
    length, heads, kv_heads = layout.local_length(ranks.rank), case.num_heads, case.kv_heads
    dtype = case.torch_dtype if ranks.device.type == "cuda" else torch.float32
    torch.manual_seed(ranks.rank)
    *leaves, dout = (
        torch.randn(1, length, count, case.head_dim, device=ranks.device, dtype=dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    leaves = [x.requires_grad_() for x in leaves]
    options: dict[str, Any] = {"is_causal": case.is_causal}
    if ranks.size > 1:
        options |= {"group": ranks.world, "layout": layout}

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (dilated_attention(*leaves, case.pattern, **options),)

    def both() -> tuple[torch.Tensor, ...]:
        out = dilated_attention(*leaves, case.pattern, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, dout), *leaves, dout

    return {"forward": forward, "forward+backward": both}


def errors(case: Workload, device: torch.device) -> list[float]:
    """Relative, of out, dq, dk and dv, on the first `COMPARED` tokens."""
    short = replace(case, seq_len=min(case.seq_len, COMPARED))
    *got, query, key, value, dout = passes(short, Ranks(0, 1, None, None, device))[
        "forward+backward"
    ]()
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
    out, _ = reference_attention(*leaves, case.pattern, is_causal=case.is_causal)
    wanted = (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))
    return [relative_error(a, b) for a, b in zip(got, wanted, strict=True)]


def graph_of(call: Pass) -> Callable[[], Any]:
    """Replays the call, captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(case: Workload, ranks: Ranks, samples: int) -> dict[str, Any]:
    """Everything about one case."""
    found: dict[str, Any] = {"tokens": case.seq_len, "ranks": ranks.size}
    if ranks.size == 1:
        found["errors_of_out_dq_dk_dv"] = [float(f"{x:.2g}") for x in errors(case, ranks.device)]
    for name, call in passes(case, ranks).items():
        on_one_gpu = ranks.device.type == "cuda" and ranks.size == 1
        hows = {"wall": call, "graph": graph_of(call)} if on_one_gpu else {"wall": call}
        row: dict[str, Any] = in_a_row(hows, IN_A_ROW, ranks, repeats=samples)
        if on_one_gpu:
            kernels = kernels_of(call)
            row["kernels"] = sum(count for count, _ in kernels.values())
            row["kernels_ms"] = round(sum(ms for _, ms in kernels.values()), 4)
        found[name] = row
    return found


def first_calls(lengths: Sequence[int], ranks: Ranks) -> dict[str, Any]:
    """Milliseconds that the first call of a length takes more than the same call again."""
    extra = []
    for length in lengths:
        call = passes(workload("gigapath", length), ranks)["forward+backward"]
        gc.collect()
        times = []
        for _ in range(4):
            begun = time.perf_counter()
            call()
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            times.append((time.perf_counter() - begun) * 1e3)
        extra.append(times[0] - statistics.median(times[1:]))
    half = extra[len(extra) // 2 :]  # the kernels are compiled by then
    return {"calls": len(half), "extra": spread(half)}


def main(
    cases: Annotated[str, typer.Option(help="some of the names, separated by ;")] = "",
    longest: Annotated[int, typer.Option(help="tokens of a call at most")] = 1 << 20,
    samples: int = 11,
    first: Annotated[int, typer.Option(help="calls of new lengths as well")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure every case, print a line of each."""
    ranks = join()
    found = {}
    for name in filter(None, cases.split(";")) if cases else CASES:
        case = replace(CASES[name], seq_len=min(CASES[name].seq_len, longest))
        found[name] = measure(case, ranks, samples)
        if ranks.rank == 0:
            print(name, json.dumps(found[name]), flush=True)
    if first and ranks.size == 1:
        dice = random.Random(0)
        for low, high in ((1000, 6500), (7000, 40_000)):
            span = range(min(low, longest // 2), min(high, longest))
            name = f"GigaPath, first calls of {span.start:,} to {span.stop:,} tokens"
            found[name] = first_calls(dice.sample(span, 2 * first), ranks)
            print(name, json.dumps(found[name]), flush=True)
    if ranks.rank == 0:
        write(out, ranks.device, found)
    leave()


if __name__ == "__main__":
    typer.run(main)
