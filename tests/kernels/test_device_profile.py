"""Constants that were tuned on an H200, on devices that nobody has measured: by simulation."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from support.simulated_devices import DEVICES, KIB, properties, simulated

from ring_dilated_attention.kernels import Kernel, default_config, profile_of
from ring_dilated_attention.kernels.device_profile import H200, LARGE, profile_from


def profile(name, **changes):
    return profile_from(properties(name, **changes))


def test_an_h200_is_an_h200():
    assert profile("H200") == H200 == profile_of(torch.device("cpu"))
    assert profile("H100").rate == 1
    assert profile("H100", count=66).rate == 0.5


@pytest.mark.parametrize("name", DEVICES)
def test_blocks_fit_into_shared_memory(name, monkeypatch):
    device = simulated(monkeypatch, name)
    changed = 0
    for kernel, dtype, head_dim in product(
        get_args(Kernel), (torch.float16, torch.float32), (16, 48, 64, 80, 128, 160, 256)
    ):
        best = default_config(kernel, head_dim, dtype, queries=4096, keys=4096)
        config = default_config(kernel, head_dim, dtype, queries=4096, keys=4096, device=device)
        changed += config != best
    largest = max(needed for needed, _ in LARGE.values())
    assert bool(changed) == (profile_of(device).shared_bytes < largest)


@pytest.mark.slow
def test_sizes_are_what_triton_compiles():
    """For compute capability 8.0, whose copies and products 8.6, 8.9 and 12.0 have too."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "support" / "compiled_sizes.py"
    done = subprocess.run(
        [sys.executable, script, "80"],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, needed, size, smaller in json.loads(done.stdout):
        assert size <= needed, name
        assert smaller <= 99 * KIB, name
        assert needed == 0 or size > 99 * KIB, name
