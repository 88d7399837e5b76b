"""A LayerNorm of rows in half precision, torch's and ours, under autocast: GPU and host time.

    python benchmarks/norms.py --out norms.json
    python benchmarks/norms.py --device cpu --rows 40 --width 24    # where ours is torch's

Calls are queued on the GPU and timed in turns; the host's time is that of calls for which it does
not wait. Both are medians.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from decode import Timer
from torch import Tensor

from ring_dilated_attention.nn import LayerNorm

HOST_CALLS = 50


def torchs(norm: LayerNorm, rows: Tensor) -> Tensor:
    """As `LayerNorm` is for a few rows: torch's, by parameters rounded to the rows' dtype."""
    weight, bias = norm.weight.to(rows.dtype), norm.bias.to(rows.dtype)
    with torch.autocast(rows.device.type, enabled=False):
        return F.layer_norm(rows, norm.normalized_shape, weight, bias, norm.eps)


def host_microseconds(call: Callable[[], Any], timer: Timer) -> float:
    """Until a call returns: the median of several rounds."""
    taken = []
    for _ in range(timer.repeats):
        if timer.device.type == "cuda":
            torch.cuda.synchronize(timer.device)
        begun = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        taken.append((time.perf_counter() - begun) / HOST_CALLS * 1e6)
    return statistics.median(taken)


def measure(count: int, width: int, dtype: torch.dtype, timer: Timer) -> dict[str, Any]:
    """Times of both, forward and forward+backward."""
    device = timer.device
    rows = torch.randn(1, count, width, device=device, dtype=dtype, requires_grad=True)
    dout, norm = torch.randn_like(rows), LayerNorm(width, device=device)
    inputs = [rows, *norm.parameters()]

    def forward(function: Callable[[LayerNorm, Tensor], Tensor]) -> Tensor:
        with torch.autocast(device.type, dtype):
            return function(norm, rows)

    def both(function: Callable[[LayerNorm, Tensor], Tensor]) -> None:
        torch.autograd.grad(forward(function), inputs, dout)

    functions: tuple[Callable[[LayerNorm, Tensor], Tensor], ...] = (torchs, LayerNorm.__call__)
    for function in functions:
        both(function)
    forwards = timer.queued(*[lambda f=f: forward(f) for f in functions])
    all_of_it = timer.queued(*[lambda f=f: both(f) for f in functions])
    hosts = [host_microseconds(lambda f=f: both(f), timer) for f in functions]
    found: dict[str, Any] = {"rows": count, "width": width, "dtype": str(dtype)}
    for name, ms, both_ms, host in zip(("torch", "ours"), forwards, all_of_it, hosts, strict=True):
        found[name] = {
            "forward_ms": round(ms, 4),
            "both_ms": round(both_ms, 4),
            "both_host_us": round(host, 1),
        }
    return found


def main(
    rows: Annotated[list[int] | None, typer.Option(help="how many; may be repeated")] = None,
    width: Annotated[list[int] | None, typer.Option(help="of a row; may be repeated")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16")] = "float16",
    repeats: int = 7,
    device: str = "cuda",
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Print the times of each number of rows and width."""
    timer, found = Timer(torch.device(device), repeats), []
    for count in rows or [4_001, 10_001, 50_001, 100_001]:
        for columns in width or [768, 3072]:
            found.append(measure(count, columns, getattr(torch, dtype), timer))
            print(json.dumps(found[-1]), flush=True)
    if out is not None:
        kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        about = {"device": kind, "torch": torch.__version__, "rows": found}
        out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
