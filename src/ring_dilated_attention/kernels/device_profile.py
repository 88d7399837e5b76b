"""What was tuned on an H200, on other devices.

Constants that say from how many operations on something is worthwhile were measured on an H200, and
hold on an H100, whose multiprocessors are the same. On a device that nobody has measured, as many
operations are taken as it does in the same time, by its multiprocessors, their clock and what they
do in a clock; and those blocks of kernels that fit into its shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch

# Half-precision operations that a multiprocessor does in a clock, by compute capability (NVIDIA's
# whitepapers of Volta to Blackwell). One that is not here counts as the last before it.
_OPERATIONS = {
    (7, 0): 1024,
    (8, 0): 2048,
    (8, 6): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 1024,
}
_H200_MULTIPROCESSORS, _H200_MHZ = 132, 1980
_H200_RATE = _H200_MULTIPROCESSORS * _H200_MHZ * _OPERATIONS[9, 0]


@dataclass(frozen=True)
class DeviceProfile:
    """A device, beside an H200.

    Attributes:
        capability: compute capability.
        multiprocessors: how many.
        shared_bytes: shared memory that a program of a kernel may take.
        rate: half-precision operations in a second, an H200's being 1.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    rate: float

    def flops(self, on_h200: float) -> float:
        """How many operations take as long as `on_h200` do on an H200."""
        return on_h200 * self.rate

    def rows(self, on_h200: int) -> int:
        """How many rows keep the device as busy as `on_h200` do an H200."""
        return max(1, on_h200 * self.multiprocessors // _H200_MULTIPROCESSORS)


H200 = DeviceProfile((9, 0), _H200_MULTIPROCESSORS, 227 << 10, 1.0)


@lru_cache(maxsize=64)
def profile_of(device: torch.device) -> DeviceProfile:
    """The profile of a CUDA device; that of an H200 for any other, as the interpreter takes."""
    if device.type != "cuda":
        return H200
    return profile_from(torch.cuda.get_device_properties(device))


def profile_from(properties: Any) -> DeviceProfile:
    """The profile that follows from what `torch.cuda.get_device_properties` returns."""
    capability = properties.major, properties.minor
    known = [each for each in _OPERATIONS if each <= capability]
    operations = _OPERATIONS[max(known, default=min(_OPERATIONS))]
    # Not every torch tells the clock, and of Hopper's what was measured counts.
    mhz = getattr(properties, "clock_rate", 0) / 1000 or _H200_MHZ
    if capability == (9, 0):
        mhz = _H200_MHZ
    count = properties.multi_processor_count
    # AMD's have no more than a block may have without asking.
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    shared = shared or properties.shared_memory_per_block
    return DeviceProfile(capability, count, shared, count * mhz * operations / _H200_RATE)


Kernel = Literal["forward", "dq", "dkdv", "own_forward", "own_dq", "own_dkdv"]


@dataclass(frozen=True)
class LaunchConfig:
    """How a kernel is launched.

    Attributes:
        block_m: queries per block, a power of two >= 16.
        block_n: keys per block, a power of two >= 16.
        num_warps: warps per program.
        num_stages: key (dkdv: query) blocks in flight.
        max_registers: of a thread; None: as many as the compiler likes. With fewer, more programs
            run on a multiprocessor at a time.
        tail: whether blocks have a second part for the columns beyond a power of two, where these
            are 16, 32 or 64; else columns are padded to the next power of two.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    tail: bool = False


class BackwardConfig(NamedTuple):
    """One configuration for each of the two backward kernels."""

    dq: LaunchConfig
    dkdv: LaunchConfig


# (kernel, bytes per element, head_dim up to). Those of 2 bytes are the fastest of a sweep
# on an H200; those of 4 fit registers and shared memory.
CONFIGS: dict[tuple[Kernel, int, int], LaunchConfig] = {
    ("forward", 2, 64): LaunchConfig(64, 64, 4, 3),
    ("forward", 2, 128): LaunchConfig(128, 64, 8, 3),
    ("forward", 2, 256): LaunchConfig(128, 64, 8, 2),
    ("forward", 4, 64): LaunchConfig(64, 32, 8, 2),
    ("forward", 4, 128): LaunchConfig(32, 32, 8, 1),
    ("forward", 4, 256): LaunchConfig(16, 32, 8, 2),
    ("dq", 2, 64): LaunchConfig(64, 64, 4, 3),
    ("dq", 2, 128): LaunchConfig(128, 64, 8, 3),
    ("dq", 2, 256): LaunchConfig(64, 32, 4, 2),
    ("dq", 4, 64): LaunchConfig(32, 32, 4, 2),
    ("dq", 4, 128): LaunchConfig(32, 16, 4, 2),
    ("dq", 4, 256): LaunchConfig(16, 16, 4, 1),
    ("dkdv", 2, 64): LaunchConfig(64, 64, 4, 2),
    ("dkdv", 2, 128): LaunchConfig(64, 64, 4, 2),
    ("dkdv", 2, 256): LaunchConfig(64, 64, 8, 1),
    ("dkdv", 4, 64): LaunchConfig(16, 32, 4, 2),
    ("dkdv", 4, 128): LaunchConfig(16, 32, 8, 1),
    ("dkdv", 4, 256): LaunchConfig(16, 16, 8, 1),
    # Where not said otherwise, those of tiles.
    ("own_forward", 2, 48): LaunchConfig(64, 64, 4, 3, 168, tail=True),
    ("own_forward", 2, 64): LaunchConfig(64, 64, 4, 3, 168),
    ("own_forward", 2, 128): LaunchConfig(64, 64, 4, 3),
    ("own_forward", 2, 256): LaunchConfig(64, 64, 4, 2),
    ("own_dq", 2, 48): LaunchConfig(64, 64, 4, 3, 168, tail=True),
    ("own_dq", 2, 64): LaunchConfig(64, 64, 4, 3, 168),
    ("own_dq", 2, 128): LaunchConfig(64, 64, 4, 2),
    ("own_dkdv", 2, 64): LaunchConfig(64, 64, 4, 3),
}

# Of those above that take more than 99 KiB of shared memory: how many bytes, as Triton compiles
# them for compute capability 8.0, and what fits into 99 KiB (8.6, 8.9, 12.0) with 66 to 80 KiB.
LARGE: dict[tuple[Kernel, int, int], tuple[int, LaunchConfig]] = {
    ("dq", 2, 128): (131_072, LaunchConfig(64, 64, 4, 2)),
    ("forward", 2, 256): (147_456, LaunchConfig(64, 32, 4, 2)),
    ("dq", 2, 256): (102_400, LaunchConfig(32, 32, 4, 2)),
    ("dkdv", 2, 256): (163_840, LaunchConfig(32, 32, 4, 1)),
    ("own_forward", 2, 256): (106_496, LaunchConfig(64, 32, 4, 2)),
}

_WGMMA_ROWS = 64
"""Rows of an accumulator from which products are those of a warp group."""


def head_dim_constants(head_dim: int, tail: bool) -> dict[str, int]:
    """What a kernel is compiled for: the head_dim, and the columns of both parts of its blocks.

    Args:
        head_dim: of the tensors.
        tail: whether blocks may have a second part; else one is padded.
    """
    columns = -(-head_dim // 16) * 16
    largest = 1 << (columns.bit_length() - 1)
    rest = columns - largest
    if not tail or rest.bit_count() != 1:
        largest, rest = power_of_two(head_dim), 0
    return {"HEAD_DIM": head_dim, "BLOCK_D": largest, "TAIL": rest}


def copies_of(config: LaunchConfig) -> dict[str, int]:
    """In how many copies the kernel of dk and dv loads lse and delta: as many as it has threads."""
    return {"COPIES": max(1, 16 * config.num_warps // config.block_m)}


def _key_of(kernel: Kernel, itemsize: int, head_dim: int) -> tuple[Kernel, int, int]:
    """What stands for a kernel in the table: that of tiles if none of its own fits as closely."""
    widths = [width for name, size, width in CONFIGS if (name, size) == (kernel, itemsize)]
    own = min((width for width in widths if width >= head_dim), default=math.inf)
    padded = max(64, power_of_two(head_dim))
    if own <= padded:
        return kernel, itemsize, int(own)
    of_tiles: Any = kernel.removeprefix("own_")
    return of_tiles, itemsize, padded


def default_config(
    kernel: Kernel,
    head_dim: int,
    dtype: torch.dtype,
    *,
    queries: int,
    keys: int,
    device: torch.device | None = None,
) -> LaunchConfig:
    """What a kernel runs with unless told otherwise.

    Args:
        kernel: which one.
        head_dim: of the tensors, at most 256.
        dtype: of q, k, v.
        queries: most queries in a tile: blocks need not be larger.
        keys: most keys in a tile: blocks need not be larger.
        device: where the kernel runs; None: on an H200.

    Returns:
        The configuration of the table, or what fits into the shared memory of the device, its
        blocks shrunk to the longest tile.
    """
    key = _key_of(kernel, dtype.itemsize, head_dim)
    best = CONFIGS[key]
    needed, smaller = LARGE.get(key, (0, best))
    if device is not None and profile_of(device).shared_bytes < needed:
        best = smaller
    block_m = min(best.block_m, power_of_two(queries))
    block_n = min(best.block_n, power_of_two(keys))
    of_keys = kernel.endswith("dkdv")
    if of_keys and dtype.itemsize == 2 and block_m < _WGMMA_ROWS:
        # As a wgmma over so few queries dk comes out wrong, and differently every time (Triton 3.6
        # on Hopper); dv and larger blocks do not.
        block_n = min(block_n, _WGMMA_ROWS // 2)
    # The accumulators have the rows of one side: as many warps per row as before, and the four
    # that a wgmma takes where there are 64 rows.
    rows, most = (block_n, best.block_n) if of_keys else (block_m, best.block_m)
    num_warps = max(2, min(4, rows // 16), best.num_warps * rows // most)
    return replace(best, block_m=block_m, block_n=block_n, num_warps=num_warps)


MOST_NEW_ROWS = 64
"""Positions that the decoding kernels take at a time: each sees those before it by a mask."""
MOST_WIDTH = 8192
"""Elements, at most, of a row of which one program normalises the GELU."""
_MOST_DECODE_QUERIES = 64
_DECODE_BYTES = 16 << 10
"""Of keys that a program of decoding loads at a time, and as many of values. All stages but one are
in shared memory: with four, two programs fit on a multiprocessor of an H100 or H200."""


def decode_config(
    head_dim: int, dtype: torch.dtype, *, queries: int, keys: int, device: torch.device
) -> LaunchConfig:
    """What decoding runs with, which takes as long as loading the keys and values.

    Args:
        head_dim: of the tensors, at most 256.
        dtype: of q, k, v.
        queries: of a KV head.
        keys: the most that a KV head's queries see: blocks need not be larger.
        device: where the kernel runs.
    """
    of_row = power_of_two(head_dim) * dtype.itemsize
    block_m = min(_MOST_DECODE_QUERIES, power_of_two(queries))
    shared_bytes = profile_of(device).shared_bytes
    # As Triton compiles it for compute capabilities 8.0 and 9.0, or somewhat less.
    most = (shared_bytes - 4 * _DECODE_BYTES) // (2 * of_row)
    while block_m > max(16, most):
        block_m //= 2
    # If a third program fitted, some multiprocessors would get three and others one.
    is_deep = 2 * (6 * _DECODE_BYTES + 2 * block_m * of_row) <= shared_bytes
    block_n = max(16, min(128, _DECODE_BYTES // of_row))
    return LaunchConfig(block_m, min(block_n, power_of_two(keys)), 4, 4 if is_deep else 3)


def power_of_two(size: int) -> int:
    """The smallest one that is no less than `size` and 16, the least that the kernels take."""
    return max(16, 1 << (size - 1).bit_length())
