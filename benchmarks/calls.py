"""Attention calls one by one on one device: errors, wall time, kernels, and CUDA graphs.

    python benchmarks/calls.py --out calls.json
    PYTHONPATH=OTHER/src python benchmarks/calls.py             # in turns, to compare two versions
    python benchmarks/calls.py --longest 300                    # on a CPU: that it runs

Wall time is that of 20 calls in a row until the device is idle, per call; where it is longer than
that of a CUDA graph, the host decides. Errors of out and of the gradients are relative to brute
force in float64, on the first 2,001 tokens.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from harness import in_a_row, join, kernels_of, write

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


def passes(case: Workload, device: torch.device) -> dict[str, Pass]:
    """Forward and forward+backward on random inputs; each returns what it computes."""
    torch.manual_seed(0)
    dtype = case.torch_dtype if device.type == "cuda" else torch.float32
    query, kv = case.shapes(case.seq_len)
    *leaves, dout = (torch.randn(x, device=device, dtype=dtype) for x in (query, kv, kv, query))
    leaves = [x.requires_grad_() for x in leaves]

    def forward() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (dilated_attention(*leaves, case.pattern, is_causal=case.is_causal),)

    def both() -> tuple[torch.Tensor, ...]:
        out = dilated_attention(*leaves, case.pattern, is_causal=case.is_causal)
        return out.detach(), *torch.autograd.grad(out, leaves, dout), *leaves, dout

    return {"forward": forward, "forward+backward": both}


def errors(case: Workload, device: torch.device) -> list[float]:
    """Relative, of out, dq, dk and dv, on the first `COMPARED` tokens."""
    short = replace(case, seq_len=min(case.seq_len, COMPARED))
    *got, query, key, value, dout = passes(short, device)["forward+backward"]()
    leaves = [x.detach().double().requires_grad_() for x in (query, key, value)]
    out, _ = reference_attention(*leaves, case.pattern, is_causal=case.is_causal)
    wanted = (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))
    return [float(f"{relative_error(a, b):.2g}") for a, b in zip(got, wanted, strict=True)]


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


def main(
    cases: Annotated[str, typer.Option(help="some of the names, separated by ;")] = "",
    longest: Annotated[int, typer.Option(help="tokens of a call at most")] = 1 << 20,
    samples: int = 11,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure every case, print a line of each."""
    ranks, found = join(), {}
    for name in filter(None, cases.split(";")) if cases else CASES:
        case = replace(CASES[name], seq_len=min(CASES[name].seq_len, longest))
        row = found[name] = {"tokens": case.seq_len, "errors": errors(case, ranks.device)}
        for each, call in passes(case, ranks.device).items():
            on_gpu = ranks.device.type == "cuda"
            hows = {"wall": call, "graph": graph_of(call)} if on_gpu else {"wall": call}
            row[each] = in_a_row(hows, IN_A_ROW, ranks, repeats=samples)
            row[each] |= kernels_of(call) if on_gpu else {}
        print(name, json.dumps(row), flush=True)
    write(out, ranks.device, found)


if __name__ == "__main__":
    typer.run(main)
