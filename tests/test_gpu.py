"""The same comparisons on CUDA devices; skipped where there are none."""

from dataclasses import replace

import pytest
import torch

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.testing import run_loopback, run_ranks
from ring_dilated_attention.verify import Case, combine, make_layout, run_case, run_cases, sweep

pytestmark = [
    pytest.mark.gpu,
    # Asking for NaN in uninitialised memory asks for determinism, which some kernels do not have.
    pytest.mark.filterwarnings("ignore:.*determinis.*"),
]

HALF_KERNELS = [
    (name, dtype)
    for name in ("cudnn", "flash", "efficient", "eager")
    for dtype in (torch.bfloat16, torch.float16)
]
KERNELS = [*HALF_KERNELS, ("efficient", torch.float32), ("eager", torch.float64)]


def kernel_cases(world_size, backend, dtype):
    pattern = DilatedPattern([48, 100, None], [1, 3, 4])
    for number, (length, head_dim) in enumerate([(257, 64), (331, 48), (64, 128), (7, 8)]):
        for layout in ("contiguous", "zigzag", "uneven"):
            yield Case(
                pattern=pattern,
                layout=make_layout(layout, length, world_size),
                num_heads=6,
                num_kv_heads=(6, 3)[number % 2],
                head_dim=head_dim,
                batch=1 + number % 2,
                is_causal=layout != "contiguous",
                dtype=dtype,
                backend=backend,
                seed=number,
                device="cuda",
            )


def failures(cases, outcomes):
    return [
        (case, {name: outcome.error(name) for name in outcome.squares}, outcome.valid)
        for case, outcome in zip(cases, outcomes, strict=True)
        if not outcome.passes(case.dtype)
    ]


def run_here(world_size, cases):
    """Every rank on one GPU, in this process."""
    return combine(run_loopback(world_size, lambda ends: [run_case(case, ends) for case in cases]))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("backend", "dtype"), KERNELS)
def test_every_kernel_on_one_gpu(backend, dtype, world_size):
    cases = list(kernel_cases(world_size, backend, dtype))
    assert not failures(cases, run_here(world_size, cases))


def test_the_sweep_on_one_gpu():
    cases = [replace(case, device="cuda") for case in sweep(4)]
    assert not failures(cases, run_here(4, cases))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl():
    world_size = torch.cuda.device_count()
    cases = [replace(case, device="cuda") for case in sweep(world_size)]
    cases += kernel_cases(world_size, "auto", torch.bfloat16)
    outcomes = combine(run_ranks(run_cases, world_size, cases, backend="nccl"))
    assert not failures(cases, outcomes)
