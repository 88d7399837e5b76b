"""What was tuned on an H200, on other devices.

Constants that say from how many operations on something is worthwhile were measured on an H200, and
hold on an H100, whose multiprocessors are the same. On a device that nobody has measured, as many
operations are taken as it does in the same time, by its multiprocessors, their clock and what they
do in a clock; and those blocks of kernels that fit into its shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ..pattern import check_positive_float
from ..plan import costs

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
class DecodeTuning:
    """How attention of a few queries to a KV cache is cut into programs.

    Attributes:
        programs: of a multiprocessor at a time: as many as its shared memory takes.
        rounds: of that many programs, at most about. Each program writes its sums, which have to be
            merged; more of them fill the last round better.
        overlaps: whether a launch may begin while the one before it ends, on NVIDIA GPUs of compute
            capability 9.0 or more (programmatic dependent launch); no effect on others.
    """

    programs: int = 2
    rounds: int = 4
    overlaps: bool = True


@dataclass(frozen=True)
class DeviceProfile:
    """A device, beside an H200.

    Attributes:
        capability: compute capability.
        multiprocessors: how many.
        shared_bytes: shared memory that a program of a kernel may take.
        rate: half-precision operations in a second, an H200's being 1.
        decode: as tuned on an H200.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    rate: float
    decode: DecodeTuning = DecodeTuning()

    def flops(self, on_h200: float) -> float:
        """How many operations take as long as `on_h200` do on an H200."""
        return on_h200 * self.rate

    def rows(self, on_h200: int) -> int:
        """How many rows keep the device as busy as `on_h200` do an H200."""
        return max(1, on_h200 * self.multiprocessors // _H200_MULTIPROCESSORS)


# The cost model's constants. Fitted to the times of one and two H200 in
# benchmarks/results/many_gpus_x2.json: bfloat16 or float16, heads of 128 (many_hosts.md).
_FORWARD = costs.ComputeRates(flops=657e12, half_keys=340, group_seconds=15e-6, host_step=0.6e-3)
_BACKWARD = costs.ComputeRates(flops=618e12, half_keys=465, group_seconds=60e-6, host_step=0.8e-3)
_BESIDE_TRANSFERS = 1.035
# Of the rate with heads of 128, in half precision and in float32.
_HEADS_OF_64, _FLOAT32 = 0.81, 0.064
# Measured on their own: a call of two ranks that exchange nothing, and a step without rows.
_HOST_CALL, _HOST_EMPTY_STEP = 0.3e-3, 3e-6
# Not measured: of the first byte of a message.
_LATENCY_INSIDE, _LATENCY_ACROSS = 20e-6, 30e-6

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


def rates_on(
    profile: DeviceProfile, size: costs.TensorSize, *, link_gb_s: float, network_gb_s: float
) -> costs.Rates:
    """The rates of the cost model on a device: those of an H200, in proportion to its matmul rate.

    Args:
        profile: the device.
        size: of the rows that it computes with.
        link_gb_s: 10**9 bytes per second that a rank sends to ranks of its host, and receives.
        network_gb_s: the same to ranks of other hosts.

    Raises:
        ValueError: a rate is not above 0, or none is known of elements of that size.
    """
    for name, rate in (("link_gb_s", link_gb_s), ("network_gb_s", network_gb_s)):
        check_positive_float(name, rate)
    if size.element_size > 4:
        raise ValueError(
            "the cost model knows no rate of float64; allowed: bfloat16, float16, float32"
        )
    share = _FLOAT32 if size.element_size == 4 else _HEADS_OF_64 if size.head_dim < 128 else 1.0
    forward, backward = (
        replace(each, flops=each.flops * share * profile.rate) for each in (_FORWARD, _BACKWARD)
    )
    return costs.Rates(
        forward=forward,
        backward=backward,
        inside=costs.Link(bytes_per_second=link_gb_s * 1e9, latency=_LATENCY_INSIDE),
        across=costs.Link(bytes_per_second=network_gb_s * 1e9, latency=_LATENCY_ACROSS),
        beside_transfers=_BESIDE_TRANSFERS,
        host_call=_HOST_CALL,
        host_empty_step=_HOST_EMPTY_STEP,
    )
