"""Variants of the decoding kernels beside torch's SDPA and a copy of as many bytes, on one GPU.

    python benchmarks/decode_kernel.py                    # under a minute
    python benchmarks/decode_kernel.py --rounds 20
    python benchmarks/decode_kernel.py --small            # CPU, interpreted: TRITON_INTERPRET=1

Each round times all of them one after the other, so that a slower clock slows them all. A row is
the median of the rounds, the least and the largest, and the median of its ratio to SDPA in a round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from decode import gpu_milliseconds

from ring_dilated_attention.kernels.decode import Strips, begin_strips
from ring_dilated_attention.kernels.device_profile import DecodeTuning

VARIANTS = {
    "as it is": DecodeTuning(),
    "launches apart": DecodeTuning(overlaps=False),
    "1 program": DecodeTuning(programs=1),
    "33 rounds": DecodeTuning(rounds=33),
}
HEADS, KV_HEADS = 32, 8


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """GPU time of a call; on a CPU, where kernels are interpreted, there is none."""
    if device.type == "cuda":
        return gpu_milliseconds(call, count=10)
    call()
    return float("nan")


def calls(batch: int, keys: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Of one new query a row, by name. Each variant is compared with SDPA first."""
    head_dim, dtype = (128, torch.bfloat16) if device.type == "cuda" else (16, torch.float32)
    q = torch.randn(batch, 1, HEADS, head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, KV_HEADS, keys, head_dim, device=device, dtype=dtype).unbind(0)
    q_bhnd, by_rows = q.transpose(1, 2), [x.transpose(1, 2) for x in (k, v)]
    # One strip of each KV head: first row, step, rows, and before which the query sees them all.
    strip = torch.tensor([0, 1, keys, keys], device=device).expand(1, KV_HEADS, 4).contiguous()
    strips = Strips(strip, 1, 0)

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(q_bhnd, k, v, enable_gqa=True)

    def of(tuning: DecodeTuning) -> Callable[[], torch.Tensor]:
        begun = partial(begin_strips, q, *by_rows, strips, keys, head_dim**-0.5, tuning=tuning)
        return lambda: begun().merged(dtype)[0]

    want, found = sdpa().transpose(1, 2).float(), {name: of(x) for name, x in VARIANTS.items()}
    for name, call in found.items():
        error = float((call().float() - want).norm() / want.norm())
        assert error < 1e-2, f"{name}: error {error}"
    source = torch.empty(k.nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {"SDPA": sdpa, **found, "copy of as many bytes": lambda: target.copy_(source)}


def main() -> None:
    """Check and time every variant; a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--small", action="store_true", help="few keys, on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.small else "cuda")
    torch.manual_seed(0)
    shapes = [(1, 300), (3, 100)] if options.small else [(1, 1 << 20), (32, 32_768)]
    for batch, keys in shapes:
        timed = calls(batch, keys, device)
        rounds = [
            {name: milliseconds(call, device) for name, call in timed.items()}
            for _ in range(1 if options.small else options.rounds + 1)
        ][-options.rounds :]
        print(f"batch {batch}, {keys:,} keys each: ms, and the ratio to SDPA in the same round")
        for name in timed:
            taken = [each[name] for each in rounds]
            ratio = statistics.median(each[name] / each["SDPA"] for each in rounds)
            spread = f"[{min(taken):.4f} .. {max(taken):.4f}]"
            print(f"{name:32} {statistics.median(taken):.4f} {spread}  {ratio:.4f}")


if __name__ == "__main__":
    main()
