"""Kernels that compute several branches row by row: errors, and times of each with many settings.

    python benchmarks/own_kernels.py --out own_kernels.json
    python benchmarks/own_kernels.py --baseline OTHER/src     # and calls of another clone

Times are those of kernels alone, as torch's profiler sees them: medians of each kernel, added up
over a call. Errors are relative to the definition by brute force in float64. Before anything is
timed, processes compile every setting into Triton's cache, several at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ring_dilated_attention
from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import reference_attention
from ring_dilated_attention.kernels import LaunchConfig, default_config
from ring_dilated_attention.resolve import forget_plans

KERNELS = {"own_forward": "_forward_kernel", "own_dq": "_dq_kernel", "own_dkdv": "_dkdv_kernel"}
COMPILING = 14  # processes
REPEATS = 9


class Case(NamedTuple):
    """A call."""

    pattern: DilatedPattern
    length: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    is_causal: bool = False
    kv_heads: int = 0  # 0: as many as heads

    def tensors(self, device: str, length: int) -> list[torch.Tensor]:
        """Query, key, value and the gradient of out."""
        torch.manual_seed(length)
        kv_heads = self.kv_heads or self.heads
        heads = self.heads, kv_heads, kv_heads, self.heads
        dtype = self.dtype if device == "cuda" else torch.float16  # as the interpreter takes
        return [torch.randn(1, length, x, self.head_dim, device=device, dtype=dtype) for x in heads]


GIGAPATH = DilatedPattern(
    [1024, 5792, 32768, 185363, 1048576],
    [1, 2, 4, 8, 16],
    head_offsets="blocked",
    zero_keys=True,
)
LONGNET = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
HALF, BRAIN = torch.float16, torch.bfloat16
CALLS = {
    "GigaPath 2,001": Case(GIGAPATH, 2_001, 16, 48, HALF),
    "GigaPath 10,001": Case(GIGAPATH, 10_001, 16, 48, HALF),
    "GigaPath 45,681": Case(GIGAPATH, 45_681, 16, 48, HALF),
    "LongNet 4,096": Case(LONGNET, 4_096, 12, 64, BRAIN),
    "LongNet 262,144": Case(LONGNET, 262_144, 12, 64, BRAIN),
    "LongNet 262,144 causal": Case(LONGNET, 262_144, 12, 64, BRAIN, is_causal=True),
}
SWEPT = ("GigaPath 10,001", "LongNet 4,096")
# What differs from the calls above: two parts and padding, masks, shared KV heads.
CHECKED = [
    Case(GIGAPATH, 1_501, 4, 40, HALF),
    Case(GIGAPATH, 1_501, 4, 48, BRAIN, is_causal=True),
    Case(GIGAPATH, 1_501, 4, 80, HALF, kv_heads=2),
    Case(LONGNET, 1_501, 6, 96, HALF, is_causal=True),
    Case(LONGNET, 1_501, 6, 160, BRAIN),
]


def settings(head_dim: int) -> dict[str, list[LaunchConfig]]:
    """What is tried; the n-th of each kernel together, the last one of a shorter list again."""
    of_forward = [
        (64, 64, 4, 3, 168), (64, 64, 4, 3, 128), (64, 64, 4, 2, 128), (128, 64, 8, 3, 128),
        (128, 64, 8, 2, 128), (64, 64, 4, 2, 168), (128, 64, 8, 3, None), (128, 64, 8, 4, 128),
    ]  # fmt: skip
    of_dq = [
        (64, 64, 4, 3, 168), (64, 64, 4, 4, 168), (64, 64, 4, 5, 168), (64, 64, 4, 3, 128),
        (64, 64, 4, 4, 128), (128, 64, 8, 3, 128), (128, 64, 8, 4, 128), (128, 64, 8, 3, None),
    ]  # fmt: skip
    of_dkdv = [
        (64, 64, 4, 3, None), (64, 64, 4, 4, None), (64, 64, 4, 5, None), (64, 128, 8, 3, None),
        (64, 128, 8, 4, None), (32, 64, 4, 5, 168), (32, 128, 8, 4, None), (32, 64, 4, 5, None),
    ]  # fmt: skip
    lists = of_forward, of_dq, of_dkdv
    found = {}
    for name, tried in zip(KERNELS, lists, strict=True):
        padded = [LaunchConfig(*x) for x in tried]
        if head_dim.bit_count() > 1:
            # Of those without a tail, the first few.
            padded = [*(LaunchConfig(*x, tail=True) for x in tried), *padded[:5]]
        found[name] = padded
    return found


Settings = dict[str, LaunchConfig]  # of each kernel


def take(chosen: Callable[[int], Settings | None]) -> None:
    """Have the kernels launched like this for a head_dim; None: as the library does."""

    def config(kernel: Any, head_dim: int, *others: Any, **sizes: Any) -> LaunchConfig:
        found = chosen(head_dim)
        return found[kernel] if found else default_config(kernel, head_dim, *others, **sizes)

    vars(sys.modules["ring_dilated_attention.engine.own"])["default_config"] = config
    forget_plans()  # plans keep it


def by_default(head_dim: int) -> None:
    """What the library does."""


def with_tails(head_dim: int) -> Settings:
    """What the library does, with a tail where a head_dim can have one."""
    sizes = {"queries": 4096, "keys": 4096, "device": torch.device("cuda")}
    if not torch.cuda.is_available():
        sizes["device"] = None
    kernels: Any = KERNELS
    return {
        x: replace(default_config(x, head_dim, HALF, **sizes), tail=True)  # type: ignore[arg-type]
        for x in kernels
    }


def call_of(case: Case, length: int, device: str, backend: str) -> Callable[[], list[torch.Tensor]]:
    """Out and gradients of a call."""
    *inputs, dout = case.tensors(device, length)
    leaves = [x.requires_grad_() for x in inputs]

    def call() -> list[torch.Tensor]:
        options: Any = {"backend": backend, "is_causal": case.is_causal}
        out = dilated_attention(*leaves, case.pattern, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return call


def errors(case: Case, length: int, device: str) -> list[float]:
    """Of out, dq, dk and dv, relative; NaN where a second call differs from the first."""
    *inputs, dout = case.tensors(device, length)
    wide = [x.double().requires_grad_() for x in inputs]
    out, _ = reference_attention(*wide, case.pattern, is_causal=case.is_causal)
    want = [out.detach(), *torch.autograd.grad(out, wide, dout.double())]
    call = call_of(case, length, device, "triton")
    got, again = call(), call()
    return [
        ((x.double() - y).norm() / y.norm()).item() if torch.equal(x, z) else float("nan")
        for x, y, z in zip(got, want, again, strict=True)
    ]


def times(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds that each kernel takes in a call."""
    call(), call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            call()
        torch.cuda.synchronize()
    taken = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_time_total > 0:
            taken[event.name].append(event.device_time_total / 1e3)
    # Launches of one name differ: the n-th of each call together.
    found = {}
    for name, each in taken.items():
        count = max(1, len(each) // REPEATS)
        found[name] = sum(statistics.median(each[i::count]) for i in range(count))
    return found


def by_part(case: Case, device: str, backend: str) -> dict[str, float]:
    """Milliseconds of the kernels of forward, and of forward and backward."""
    call = call_of(case, case.length, device, backend)
    *inputs, _ = case.tensors(device, case.length)
    options: Any = {"backend": backend, "is_causal": case.is_causal}
    forward = times(lambda: dilated_attention(*inputs, case.pattern, **options))
    return {"forward": sum(forward.values()), "both": sum(times(call).values())}


def calls(device: str, chosen: Callable[[int], Settings | None]) -> dict[str, dict[str, float]]:
    """All calls, by the fastest kernels and by those of this library alone."""
    take(chosen)
    found = {}
    for name, case in CALLS.items():
        for backend in ("auto", "triton"):
            try:
                found[f"{name}, {backend}"] = by_part(case, device, backend)
            except Exception as error:
                found[f"{name}, {backend}"] = {"error": repr(error)[:200]}  # type: ignore[dict-item]
            torch.cuda.empty_cache()
    return found


def jobs() -> list[tuple[str, int]]:
    """A swept case and the number of a setting, each."""
    most = {name: max(map(len, settings(CALLS[name].head_dim).values())) for name in SWEPT}
    return [(name, number) for name in SWEPT for number in range(most[name])]


def chosen_of(name: str, number: int) -> dict[str, LaunchConfig]:
    """The setting with a number."""
    tried = settings(CALLS[name].head_dim)
    return {kernel: each[min(number, len(each) - 1)] for kernel, each in tried.items()}


def compile_some(share: int, length: int, device: str) -> None:
    """Compile a share of all settings, by running them on short sequences."""
    for name, number in jobs()[share::COMPILING]:
        chosen = chosen_of(name, number)
        take(lambda _, chosen=chosen: chosen)  # type: ignore[misc]
        attempt(call_of(CALLS[name], length, device, "triton"))
    for chosen_by, cases in ((with_tails, CHECKED), (by_default, CALLS.values())):
        take(chosen_by)
        for case in [*cases][share::COMPILING]:
            attempt(call_of(case, length, device, "triton"))


def attempt(call: Callable[[], Any]) -> str | None:
    """What went wrong, if anything."""
    try:
        call()
    except Exception as error:
        return repr(error)[:200]
    return None


def sweep(device: str, length: int) -> list[dict[str, Any]]:
    """Errors and times of each kernel with each setting."""
    rows: list[dict[str, Any]] = []
    for name, number in jobs():
        case, chosen = CALLS[name], chosen_of(name, number)
        take(lambda _, chosen=chosen: chosen)  # type: ignore[misc]
        row: dict[str, Any] = {"case": name, "settings": {k: vars(v) for k, v in chosen.items()}}
        try:
            row["errors"] = errors(case, length, device)
            if device == "cuda":
                found = times(call_of(case, case.length, device, "triton"))
                row["ms"] = {kernel: found.get(KERNELS[kernel]) for kernel in chosen}
        except Exception as error:
            row["error"] = repr(error)[:200]
        rows.append(row)
    return rows


def fastest(rows: Sequence[dict[str, Any]]) -> dict[int, Settings]:
    """By head_dim, of each kernel the fastest setting whose results are right."""
    found: dict[int, Settings] = {}
    for name in SWEPT:
        own = [row for row in rows if row["case"] == name and row.get("ms")]
        chosen = {}
        for index, kernel in enumerate(KERNELS):
            right = [x for x in own if worst(x, index) < 2 * min(worst(y, index) for y in own)]
            best = min(right, key=lambda x: x["ms"][kernel] or float("inf"))
            chosen[kernel] = LaunchConfig(**best["settings"][kernel])
        found[CALLS[name].head_dim] = chosen
    return found


def worst(row: dict[str, Any], index: int) -> float:
    """The largest error of what a kernel computes: out, dq, or dk and dv."""
    own = row["errors"][2:] if index == 2 else row["errors"][index : index + 1]
    return float("inf") if any(x != x for x in own) else max(own)


def show(found: dict[str, Any]) -> None:
    """The table."""
    for row in found["checked"]:
        print("errors", *(f"{x:.1e}" if isinstance(x, float) else x for x in row))
    for row in found["sweep"]:
        if "error" in row:
            print(row["case"], row["error"])
            continue
        cells = []
        for index, (kernel, each) in enumerate(row["settings"].items()):
            blocks = ",".join(str(x) for x in each.values())
            taken = (row.get("ms") or {}).get(kernel)
            cells.append(f"{blocks}: {taken and round(taken, 4)} ({worst(row, index):.1e})")
        print(row["case"], "|", " | ".join(cells))
    for name in found["calls by"].get("default", {}):
        cells = [name]
        for source, every in found["calls by"].items():
            numbers = (f"{x:.4f}" if isinstance(x, float) else x for x in every[name].values())
            cells.append(f"{source}: {' / '.join(numbers)}")
        print(" | ".join(cells))


def children(arguments: Sequence[Sequence[str]], source: Path) -> list[subprocess.Popen[str]]:
    """This program with other arguments and the code in `source`."""
    environment = os.environ | {"PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"}
    return [
        subprocess.Popen([sys.executable, __file__, *each], env=environment, text=True)
        for each in arguments
    ]


def main() -> None:
    """Compile, check, time and show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--baseline", type=Path, help="`src` of another clone, whose calls to time")
    parser.add_argument("--length", type=int, default=2_001, help="where errors are found")
    parser.add_argument("--no-sweep", action="store_true", help="calls only")
    parser.add_argument("--out", type=Path, default=Path("own_kernels.json"))
    parser.add_argument("--compile", type=int, help="a share of the settings, for a child")
    parser.add_argument("--calls", type=Path, help="a file for the calls alone, for a child")
    parser.add_argument("--once", choices=CALLS, help="three calls and no more, for a profiler")
    options = parser.parse_args()
    if options.once:
        case = CALLS[options.once]
        call = call_of(case, case.length, options.device, "triton")
        call(), call(), call()
        return
    if options.compile is not None:
        compile_some(options.compile, min(options.length, 1_501), options.device)
        return
    if options.calls is not None:
        options.calls.write_text(json.dumps(calls(options.device, by_default)))
        return
    own = Path(ring_dilated_attention.__file__).parents[1]
    found: dict[str, Any] = {"torch": torch.__version__, "checked": [], "sweep": []}
    found["calls by"] = {}
    if options.device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        device, length = ["--device", options.device], ["--length", str(options.length)]
        shares = [["--compile", str(share), *device, *length] for share in range(COMPILING)]
        for child in [] if options.no_sweep else children(shares, own):
            child.wait()
    if not options.no_sweep:
        for case in CHECKED:
            shape = case.head_dim, str(case.dtype), case.is_causal
            take(with_tails)
            row = errors(case, min(options.length, case.length), options.device)
            found["checked"].append([*shape, *row])
        found["sweep"] = sweep(options.device, options.length)
    if options.device == "cuda":
        if options.baseline:
            kept = options.out.with_suffix(".baseline.json")
            (child,) = children([["--calls", str(kept)]], options.baseline)
            child.wait()
            found["calls by"]["baseline"] = json.loads(kept.read_text())
        found["calls by"]["default"] = calls(options.device, by_default)
        if found["sweep"]:
            best = fastest(found["sweep"])
            print("fastest", best)
            found["calls by"]["fastest"] = calls(options.device, best.get)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    show(found)


if __name__ == "__main__":
    main()
