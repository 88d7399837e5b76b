"""Packed documents on one device: the rate at many documents of mixed length against one document.

    python benchmarks/documents.py --out documents.json
    python benchmarks/documents.py --length 3000 --heads 2 --count 20 --turns 3     # on a CPU

Useful work is counted by the plan: a document's segments are its own, so many short documents are
less work than one long one. Cases of one direction take turns.
"""

import json
import random
import statistics
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from harness import join, spread, write

from ring_dilated_attention import SequenceLayout, dilated_attention, plan_attention
from ring_dilated_attention.bench import take_turns
from ring_dilated_attention.named_patterns import named
from ring_dilated_attention.plan import costs

LONGNET = named("longnet").pattern


def main(
    length: int = 262_144,
    heads: int = 12,
    head_dim: int = 128,
    count: Annotated[int, typer.Option(help="of documents")] = 2048,
    turns: int = 10,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time every case, forward and forward+backward."""
    device = join().device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value, dout = torch.randn(4, 1, length, heads, head_dim, device=device, dtype=dtype)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    cuts = random.Random(0).sample(range(1, length), count - 1)
    half = random.Random(1).sample(range(1, length // 2), count - 2)
    documents = {
        "one document": None,
        f"{count} mixed": [0, *sorted(cuts), length],
        f"{count} equal": [*range(0, length, length // count), length],
        f"half in one, {count - 1} mixed": [0, *sorted(half), length // 2, length],
    }
    size = costs.TensorSize(batch=1, head_dim=head_dim, element_size=dtype.itemsize)

    def call(causal: bool, backward: bool, borders: list[int] | None) -> None:
        with torch.set_grad_enabled(backward):
            found = dilated_attention(*leaves, LONGNET, is_causal=causal, documents=borders)
        if backward:
            torch.autograd.grad(found, leaves, dout)

    found = []
    for causal, backward in ((False, False), (False, True), (True, False), (True, True)):
        calls = {name: partial(call, causal, backward, each) for name, each in documents.items()}
        rates: dict[str, float] = {}
        for name, samples in take_turns(calls, device, repeats=turns, seconds=60).items():
            layout = SequenceLayout.contiguous(length, 1)
            plan = plan_attention(
                LONGNET, layout, is_causal=causal, num_heads=heads, documents=documents[name]
            )
            median = statistics.median(samples)
            flops = costs.flops_by_rank(plan, size)[0] * (3.5 if backward else 1)
            rates[name] = flops / median / 1e9
            case = {
                "documents": name,
                "causal": causal,
                "backward": backward,
                **spread(samples),
                "tflops": round(rates[name], 1),
                "of_one_document": round(rates[name] / rates["one document"], 3),
                "tokens_per_s": round(length / median * 1e3),
            }
            found.append(case)
            print(json.dumps(case), flush=True)
    write(out, device, found)


if __name__ == "__main__":
    typer.run(main)
