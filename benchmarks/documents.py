"""Packed documents on one device: the rate at many documents of mixed length against one document.

    python benchmarks/documents.py --out documents.json

Useful work is counted by the plan: a document's segments are its own, so many short documents are
less work than one long one. Cases take turns, call by call.
"""

import json
import random
import statistics
from pathlib import Path
from typing import Annotated

import torch
import typer

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention, plan_attention
from ring_dilated_attention.plan import costs

LONGNET = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])


def main(
    length: int = 262_144,
    heads: int = 12,
    head_dim: int = 128,
    count: Annotated[int, typer.Option(help="of documents")] = 2048,
    turns: int = 10,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time every case, forward and forward+backward."""
    shape = 1, length, heads, head_dim
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    query, key, value = (torch.randn(shape, **draw, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, **draw)
    cuts = random.Random(0).sample(range(1, length), count - 1)
    # Half of the tokens in one document, the other half in short ones.
    half = random.Random(1).sample(range(1, length // 2), count - 2)
    documents = {
        "one document": None,
        f"{count} mixed": [0, *sorted(cuts), length],
        f"{count} equal": [*range(0, length, length // count), length],
        f"half in one, {count - 1} mixed": [0, *sorted(half), length // 2, length],
    }
    found = []
    for causal in (False, True):
        work = {}
        for name, borders in documents.items():
            layout = SequenceLayout.contiguous(length, 1)
            plan = plan_attention(
                LONGNET, layout, is_causal=causal, num_heads=heads, documents=borders
            )
            size = costs.TensorSize(batch=1, head_dim=head_dim, element_size=2)
            work[name] = costs.flops_by_rank(plan, size)[0]
        times: dict[tuple[str, bool], list[float]] = {}
        for turn in range(turns + 2):  # the first compile
            for name, borders in documents.items():
                for backward in (False, True):
                    ms = timed(query, key, value, dout, causal, borders, backward)
                    if turn > 1:
                        times.setdefault((name, backward), []).append(ms)
        rates = {case: work[case[0]] * (3.5 if case[1] else 1) / statistics.median(ms) / 1e9
                 for case, ms in times.items()}  # fmt: skip
        for (name, backward), ms in times.items():
            case = {
                "documents": name,
                "causal": causal,
                "backward": backward,
                "median_ms": round(statistics.median(ms), 3),
                "min_ms": round(min(ms), 3),
                "max_ms": round(max(ms), 3),
                "tflops": round(rates[name, backward], 1),
                "of_one_document": round(
                    rates[name, backward] / rates["one document", backward], 3
                ),
                "tokens_per_s": round(length / statistics.median(ms) * 1e3),
            }
            found.append(case)
            print(json.dumps(case), flush=True)
    if out is not None:
        found.append({"device": torch.cuda.get_device_name(), "torch": torch.__version__})
        out.write_text(json.dumps(found, indent=1) + "\n")


def timed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dout: torch.Tensor,
    causal: bool,
    borders: list[int] | None,
    backward: bool,
) -> float:
    """Milliseconds of three calls in a row, a call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(3):
        with torch.set_grad_enabled(backward):
            out = dilated_attention(query, key, value, LONGNET, is_causal=causal, documents=borders)
        if backward:
            torch.autograd.grad(out, (query, key, value), dout)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 3


if __name__ == "__main__":
    typer.run(main)
