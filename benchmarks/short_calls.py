"""Wall time of one attention call beside the time of its kernels, on one GPU.

    python benchmarks/short_calls.py --out short_calls.json
    python benchmarks/short_calls.py --device cpu --longest 300      # prove that it runs

GigaPath's pattern (16 heads of 48, float16, blocked offsets) with and without zero keys, and
LongNet's (12 heads of 64, bfloat16). A sample is 20 calls in a row until the device is idle; wall
times are per call. Backward runs in autograd's own thread, as in training, and once more in the
thread of the caller: where a model has several layers that thread stays warm.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from own_kernels import CALLS, Case, by_part

from ring_dilated_attention import dilated_attention

IN_A_ROW = 20


def cases(longest: int) -> dict[str, Case]:
    """By name; none longer than so many tokens."""
    found: dict[str, Case] = {}
    for name, case in CALLS.items():
        if case.length > 50_000 or case.is_causal:
            continue
        case = case._replace(length=min(case.length, longest))
        found[name] = case
        if case.pattern.zero_keys:
            plain = replace(case.pattern, zero_keys=False)
            found[f"{name}, no zero keys"] = case._replace(pattern=plain)
    return found


def wall(call: Callable[[], Any], samples: int, *, on_cuda: bool) -> list[float]:
    """Milliseconds per call of each sample, after one that is left out."""
    found = []
    for _ in range(samples + 1):
        begun = time.perf_counter()
        for _ in range(IN_A_ROW):
            call()
        if on_cuda:
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begun) * 1e3 / IN_A_ROW)
    return sorted(found[1:])


def measure(case: Case, device: str, samples: int) -> dict[str, Any]:
    """All times of a call; of samples the median, the lowest and the highest."""
    *inputs, dout = case.tensors(device, case.length)
    leaves = [x.clone().requires_grad_() for x in inputs]
    on_cuda = device == "cuda"

    def forward() -> None:
        dilated_attention(*inputs, case.pattern)

    def both() -> None:
        torch.autograd.grad(dilated_attention(*leaves, case.pattern), leaves, dout)

    row: dict[str, Any] = {}
    for name, call, own_thread in (
        ("forward", forward, True),
        ("both", both, True),
        ("both in one thread", both, False),
    ):
        with torch.autograd.set_multithreading_enabled(own_thread):
            times = wall(call, samples, on_cuda=on_cuda)
        row[name] = [round(x, 4) for x in (statistics.median(times), times[0], times[-1])]
    if on_cuda:
        kernels = by_part(case, device, "auto")
        row["kernels"] = {name: round(ms, 4) for name, ms in kernels.items()}
    return row


def main() -> None:
    """Measure every case, print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--longest", type=int, default=50_000, help="tokens of a call at most")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    found = {}
    for name, case in cases(options.longest).items():
        found[name] = measure(case, options.device, options.samples)
        print(name, json.dumps(found[name]), flush=True)
    if options.out is not None:
        kind = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        about = {"device": kind, "torch": torch.__version__, "calls": found}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
