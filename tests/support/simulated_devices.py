"""GPUs as their properties tell of them, as far as choosing kernels and their blocks goes."""

from types import SimpleNamespace
from typing import Any

import torch

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


def properties(name, **changes):
    """What `torch.cuda.get_device_properties` returns for such a device."""
    device = DEVICES[name] | changes
    major, minor = device["capability"]
    return SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=device["count"],
        shared_memory_per_block_optin=device["shared"],
        **({"clock_rate": device["mhz"] * 1000} if device["mhz"] else {}),
    )


def simulated(patch, name):
    """A CUDA device of this kind, for as long as `patch` lasts. Each kind has an index of its own,
    which no machine has: profiles are kept by device."""
    made = torch.device("cuda", 100 + list(DEVICES).index(name))
    asked = {made: properties(name)}
    patch.setattr(torch.cuda, "get_device_properties", asked.__getitem__)
    return made
