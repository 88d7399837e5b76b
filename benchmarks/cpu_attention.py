"""CPU speed: this library against one plain SDPA call, in FLOP/s, forward and backward.

    python benchmarks/cpu_attention.py [--json FILE]

The work is the pattern (2048, 1) (4096, 2) (8192, 4) with 8 heads of 64 over 16,384 positions in
float32; the peer is `F.scaled_dot_product_attention` on 8 x 2048 rows. Runs of the two alternate,
so that a machine whose speed drifts slows both.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    dilated_attention,
    plan_attention,
)

LENGTH, PEER_LENGTH, HEADS, HEAD_DIM = 16384, 2048, 8, 64
PATTERN = DilatedPattern([2048, 4096, 8192], [1, 2, 4])


def timed(function: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> tuple[float, float]:
    """Seconds of one forward and one backward call."""
    start = time.perf_counter()
    out = function()
    forward = time.perf_counter() - start
    dout = torch.randn_like(out)
    start = time.perf_counter()
    torch.autograd.grad(out, leaves, dout)
    return forward, time.perf_counter() - start


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.manual_seed(0)
    ours = [torch.randn(1, LENGTH, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
    peer = [torch.randn(1, HEADS, PEER_LENGTH, HEAD_DIM, requires_grad=True) for _ in range(3)]
    plan = plan_attention(
        PATTERN, SequenceLayout.contiguous(LENGTH, 1), is_causal=False, num_heads=HEADS
    )
    flops = {
        "ours": 4 * HEAD_DIM * plan.rank(0).pairs,
        "sdpa": 4 * HEAD_DIM * HEADS * PEER_LENGTH**2,
    }
    calls: dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]] = {
        "ours": (lambda: dilated_attention(ours[0], ours[1], ours[2], PATTERN), ours),
        "sdpa": (lambda: F.scaled_dot_product_attention(*peer), peer),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(options.repeats + 1):
        for name, (function, leaves) in calls.items():
            forward, backward = timed(function, leaves)
            if repeat:  # the first is a warm-up
                rates[name].append((flops[name] / forward, 2.5 * flops[name] / backward))

    result: dict[str, object] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "repeats": options.repeats,
    }
    print(f"{PATTERN}, {HEADS} x {HEAD_DIM}, n = {LENGTH}, float32, {result['threads']} threads")
    for index, direction in enumerate(("forward", "backward")):
        median = {}
        for name in calls:
            values = sorted(rate[index] / 1e9 for rate in rates[name])
            median[name] = statistics.median(values)
            result[f"{direction} {name} GFLOP/s"] = values
            print(
                f"{direction:9} {name:5} {median[name]:6.1f} GFLOP/s "
                f"({values[0]:.1f} to {values[-1]:.1f})"
            )
        ratio = median["ours"] / median["sdpa"]
        result[f"{direction} ratio"] = ratio
        print(f"{direction:9} ratio {ratio:6.2f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
