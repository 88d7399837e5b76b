"""Constants that were tuned on an H200, on devices that nobody has measured: by simulation."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from ring_dilated_attention.kernels import default_config, profile_of
from ring_dilated_attention.kernels import device_profile as profiles
from ring_dilated_attention.kernels.tuning import _LARGE, Kernel
from ring_dilated_attention.tiles import select, select_backend
from ring_dilated_attention.tiles.sdpa import EFFICIENT

KIB = 1 << 10
DEVICES: dict[str, dict[str, Any]] = {
    "P100": {"capability": (6, 0), "count": 56, "mhz": 1480, "shared": 48 * KIB},
    "T4": {"capability": (7, 5), "count": 40, "mhz": 1590, "shared": 64 * KIB},
    "A100": {"capability": (8, 0), "count": 108, "mhz": 1410, "shared": 163 * KIB},
    "RTX 4090": {"capability": (8, 9), "count": 128, "mhz": 2520, "shared": 99 * KIB},
    "H100": {"capability": (9, 0), "count": 132, "mhz": 1755, "shared": 227 * KIB},
    "H200": {"capability": (9, 0), "count": 132, "mhz": 1980, "shared": 227 * KIB},
    "B200": {"capability": (10, 0), "count": 148, "mhz": 1965, "shared": 227 * KIB},
    "RTX 5090": {"capability": (12, 0), "count": 170, "mhz": 2407, "shared": 99 * KIB},
}


def profile(name, **changes):
    device = DEVICES[name] | changes
    major, minor = device["capability"]
    return profiles.profile_from(
        SimpleNamespace(
            major=major,
            minor=minor,
            multi_processor_count=device["count"],
            shared_memory_per_block_optin=device["shared"],
            **({"clock_rate": device["mhz"] * 1000} if device["mhz"] else {}),
        )
    )


def simulate(monkeypatch, name):
    """Have a CUDA device of this kind, as far as choosing kernels goes."""
    found = profile(name)
    for module in ("kernels.tuning", "tiles.select", "tiles.table", "tiles.fa4", "tiles.sdpa"):
        path = f"ring_dilated_attention.{module}"
        for attribute in ("profile_of", "_capability"):
            if hasattr(sys.modules[path], attribute):
                value = found if attribute == "profile_of" else found.capability[0]
                monkeypatch.setattr(f"{path}.{attribute}", lambda _, value=value: value)
    return found


def test_an_h200_is_an_h200():
    assert profile("H200") == profiles.H200 == profile_of(torch.device("cpu"))
    assert profile("H100").rate == 1
    assert profile("H100", count=66).rate == 0.5


@pytest.mark.parametrize(
    ("name", "rate"), [("T4", 0.06), ("A100", 0.29), ("RTX 4090", 0.31), ("B200", 2.2)]
)
def test_the_rate_of_others_follows_from_what_they_are(name, rate):
    """Beside published figures: 65, 312, 330 and 2,250 TFLOP/s, an H200's 989."""
    assert profile(name).rate == pytest.approx(rate, rel=0.05)
    assert profile(name, mhz=None).rate > 0
    assert profile(name).flops(1e10) == profile(name).rate * 1e10
    assert profile(name).rows(132) == DEVICES[name]["count"]


def test_a_later_device_counts_as_the_last_that_is_known():
    assert profile("B200", capability=(11, 0)).rate == profile("B200").rate
    assert profile("P100", capability=(5, 0)).rate > 0


@pytest.mark.parametrize("name", DEVICES)
def test_blocks_fit_into_shared_memory(name, monkeypatch):
    found, device = simulate(monkeypatch, name), torch.device("cuda", 0)
    changed = 0
    for kernel, dtype, head_dim in product(
        get_args(Kernel), (torch.float16, torch.float32), (16, 48, 64, 80, 128, 160, 256)
    ):
        best = default_config(kernel, head_dim, dtype, queries=4096, keys=4096)
        config = default_config(kernel, head_dim, dtype, queries=4096, keys=4096, device=device)
        changed += config != best
    assert bool(changed) == (found.shared_bytes < max(needed for needed, _ in _LARGE.values()))


@pytest.mark.parametrize("head_dim", [48, 64, 256])
@pytest.mark.parametrize("name", ["P100", "T4"])
def test_gpus_that_flash_attention_refuses(name, head_dim, monkeypatch):
    """GigaPath's heads of 48, too: by torch's memory-efficient kernels, but for bfloat16."""
    simulate(monkeypatch, name)
    device = torch.device("cuda", 0)
    for dtype in (torch.float16, torch.float32):
        for backend in ("auto", "sdpa", "efficient"):
            chosen = select_backend(backend, device, dtype, head_dim).backend
            assert chosen is not None
            assert chosen.name == "efficient"
    for backend in ("cudnn", "flash"):
        with pytest.raises(ValueError, match=r"compute capability 8\.0 and above, the device has"):
            select_backend(backend, device, torch.float16, min(head_dim, 128))
    with pytest.raises(ValueError, match=r"efficient: it takes bfloat16 from compute capability"):
        select_backend("auto", device, torch.bfloat16, head_dim)


def test_what_half_precision_has_from_ampere_on(monkeypatch):
    simulate(monkeypatch, "A100")
    for backend in ("cudnn", "flash", "efficient"):
        for dtype in (torch.float16, torch.bfloat16):
            chosen = select_backend(backend, torch.device("cuda", 0), dtype, 64).backend
            assert chosen is not None
            assert chosen.name == backend


@pytest.mark.parametrize("name", DEVICES)
def test_what_computes_small_tiles(name, monkeypatch):
    """A device that Triton's kernels are not for has torch's, and no error."""
    found, device = simulate(monkeypatch, name), torch.device("cuda", 0)
    monkeypatch.setattr(select, "_AUTO", (EFFICIENT,))
    monkeypatch.setattr("ring_dilated_attention.tiles.table.has_triton", lambda: True)
    chosen = select_backend("auto", device, torch.float16, 64)
    assert chosen.backend is EFFICIENT
    if found.capability < (8, 0):
        assert chosen.own_forward_flops == chosen.backward_table_flops == 0
        with pytest.raises(ValueError, match=r"compute capability 8\.0 and above, the device has"):
            select_backend("triton", device, torch.float16, 64)
    else:
        assert chosen.own_forward_flops == found.flops(select.OWN_FORWARD_FLOPS[2])
        assert chosen.backward_table_flops == found.flops(select.SMALL_FLOPS[2])


@pytest.mark.slow
def test_sizes_are_what_triton_compiles():
    """For compute capability 8.0, whose copies and products 8.6, 8.9 and 12.0 have too."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "compiled_sizes.py"
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


def test_the_interpreter_takes_no_bfloat16(monkeypatch):
    """Triton's keeps it as integers, and multiplies those."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("ring_dilated_attention.tiles.table.has_triton", lambda: True)
    cpu = torch.device("cpu")
    assert select_backend("triton", cpu, torch.float16, 64).backend is None
    with pytest.raises(ValueError, match="it takes float32, float16, the inputs are bfloat16"):
        select_backend("triton", cpu, torch.bfloat16, 64)
