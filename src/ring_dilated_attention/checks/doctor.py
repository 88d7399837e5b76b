"""What a bug report should say: versions, GPUs, copies, kernels, and whether small calls work.

``python -m ring_dilated_attention.checks.doctor`` prints what `rda doctor` prints, without typer.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from itertools import combinations
from typing import Any, TypeAlias

import torch

from .. import __version__
from ..exchange import SoloExchange
from ..layout import SequenceLayout
from ..pattern import DilatedPattern
from ..tiles import BACKENDS, select_backend
from ..units import in_bytes
from .verify import TENSORS, Case, run_case

Report: TypeAlias = dict[str, dict[str, str]]
"""Lines by their name, by the title of their section."""

KERNELS = "Kernels, forward and backward, and their head_dims (+triton: for small tiles)"
COPIES = "Copies between GPUs"
CALLS = "Checked calls, forward and backward, with relative errors"
DTYPES = ("float32", "bfloat16", "float16", "float64")
HEAD_DIMS = (24, 48, 64, 96, 128, 192, 256)


def examine() -> Report:
    """Run every probe. None ends the program: one that fails is a line of the report."""
    gpus = torch.cuda.device_count()
    kinds = {said_by(_gpu, index): torch.device("cuda", index) for index in reversed(range(gpus))}
    devices = [torch.device("cpu"), *kinds.values()]  # the first GPU of each kind
    return {
        "Versions": _versions(),
        # Without a GPU, the error of asking for one says why.
        "GPUs": {f"cuda:{index}": said_by(_gpu, index) for index in range(max(gpus, 1))},
        COPIES: {
            f"cuda:{one} and cuda:{other}": said_by(_copies, one, other)
            for one, other in combinations(range(gpus), 2)
        }
        or {"not tried": "fewer than two GPUs"},
        KERNELS: {
            f"{device} {dtype}": said_by(_kernels, device, getattr(torch, dtype))
            for device in devices
            for dtype in DTYPES
        },
        CALLS: {
            f"{device} {backend} {dtype}": said_by(_call, backend, device, getattr(torch, dtype))
            for device in devices
            for backend in BACKENDS
            if backend != "sdpa"  # it stands for kernels that have names of their own
            for dtype in _dtypes(backend, device)[:1]
        },
    }


def failures(report: Report) -> list[str]:
    """The copies and checked calls that were wrong or raised an error."""
    return [
        f"{name}: {text}"
        for title in (COPIES, CALLS)
        for name, text in report[title].items()
        if name != "not tried" and not text.startswith("ok")
    ]


def as_text(report: Report) -> str:
    """The report as aligned lines."""
    lines = []
    for title, section in report.items():
        width = max(map(len, section)) + 2
        lines += [title, *(f"  {name:{width}}{text}" for name, text in section.items()), ""]
    return "\n".join(lines)


def said_by(probe: Callable[..., Any], *arguments: Any) -> Any:
    """What a probe says, or its error in a line.

    Everything is caught: in the broken installation that is to be described, an import, a driver or
    a kernel may raise anything, and then the other lines of the report are wanted most.
    """
    try:
        return probe(*arguments)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return text if len(text) <= 200 else f"{text[:196]} ..."


def _versions() -> dict[str, str]:
    cudnn: Any = torch.backends.cudnn
    nccl: Any = torch.cuda.nccl
    probes: dict[str, Callable[[], object]] = {
        "cuDNN of torch": cudnn.version,
        "NCCL of torch": lambda: ".".join(map(str, nccl.version())),
        "triton": lambda: version("triton"),
        "flash-attn-4": _flash_attn_4,
        "transformers": lambda: version("transformers"),
        "system": platform.platform,
        "CPUs": lambda: f"{os.cpu_count()}, {torch.backends.cpu.get_cpu_capability()}",
        "driver": _driver,
    }
    return {
        "ring-dilated-attention": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA of torch": str(torch.version.cuda),
        **{name: str(said_by(probe)) for name, probe in probes.items()},
    }


def _flash_attn_4() -> str:
    import_module("flash_attn.cute.interface")
    return f"{version('flash-attn-4')}, can be imported"


def _gpu(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, {in_bytes(found.total_memory)}, capability {found.major}.{found.minor}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.split("\n")[0]


def _copies(one: int, other: int) -> str:
    """Copy numbers both ways."""
    numbers = torch.arange(2**20, dtype=torch.int32)
    for source, target in ((one, other), (other, one)):
        there = numbers.to(f"cuda:{source}").to(f"cuda:{target}")
        if not torch.equal(there.cpu(), numbers):
            return f"wrong: a copy from cuda:{source} to cuda:{target} has other numbers"
    peer = "peer" if torch.cuda.can_device_access_peer(one, other) else "no peer"
    return f"ok both ways, {peer} access"


def _kernels(device: torch.device, dtype: torch.dtype) -> str:
    """What ``backend="auto"`` takes: ``fa4+triton 24 48 64, efficient+triton 96``."""
    sizes = defaultdict(list)
    for head_dim in HEAD_DIMS:
        name = "none"
        with suppress(ValueError):
            chosen = select_backend("auto", device, dtype, head_dim)
            shares = any(x.own or x.forward or x.backward for x in chosen.limits)
            name = (chosen.backend.name if chosen.backend else "triton") + "+triton" * shares
        sizes[name].append(str(head_dim))
    return ", ".join(" ".join([kernel, *sizes[kernel]]) for kernel in sizes)


def _dtypes(backend: str, device: torch.device) -> list[str]:
    """Those that a back end takes on a device, that of most programs first."""
    taken = []
    for dtype in DTYPES if device.type == "cpu" else ("bfloat16", *DTYPES):
        with suppress(Exception):  # of `_kernels`, too, where it is a line of the report
            select_backend(backend, device, getattr(torch, dtype), 64)
            taken.append(dtype)
    return taken


def _call(backend: Any, device: torch.device, dtype: torch.dtype) -> str:
    case = Case(
        pattern=DilatedPattern([32, None], [1, 4]),
        layout=SequenceLayout.contiguous(101, 1),
        head_dim=64,
        is_causal=True,
        dtype=dtype,
        backend=backend,
        device=str(device),
    )
    outcome = run_case(case, SoloExchange())
    errors = ", ".join(f"{name} {outcome.error(name):.0e}" for name in TENSORS)
    return f"{'ok' if outcome.passes(dtype) else 'wrong'}: {errors}"


if __name__ == "__main__":
    found = examine()
    print(as_text(found))
    sys.exit(1 if failures(found) else 0)
