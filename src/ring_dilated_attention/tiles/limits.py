"""Up to which size tiles share a launch, in place of a kernel call each.

A kernel call of few operations leaves the GPU idle, at its ends and between it and the next, and
takes the CPU as long as one of many. In short calls of attention the CPU decides, in longer ones
the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from ..kernels import DeviceProfile


class Limits(NamedTuple):
    """The most floating-point operations of a kernel call whose tiles share a launch instead.

    Operations are counted as those of forward, in backward too.

    Attributes:
        own: of tiles whose queries and keys one rank holds. They are computed in the launch that
            goes through several branches row by row, forward and backward.
        forward: of all other tiles, in forward. They are computed in a launch of the table-driven
            kernel.
        backward: the same in backward.
        least: operations of a whole call, in forward and on the rows that a rank holds, from which
            these limits count.
    """

    own: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    least: float = 0.0


_SHORT = Limits(3e10, 1.5e10, 1.5e10)
_LIMITS = {
    2: (_SHORT, Limits(2e10, 1.5e10, 1.5e10, least=8e10)),
    4: (Limits(3e9, 1.5e9, 1.5e9),),
}
"""By bytes of an element, on an H200: measured for 2 (benchmarks/results/attention_speed.md), and a
tenth of that, as the rate is, for 4."""
_LIMITS_OF_KEPT_CALLS = (
    _SHORT,
    Limits(1.5e10, 1.5e10, 1.5e10, least=5e10),
    Limits(1.2e10, 1.2e10, 1.2e10, least=1.5e11),
)
"""For elements of 2 bytes, with kernel calls that take the CPU little time: measured with
flash-attn-4, heads of 48 and 64 (heads of 128: no slower), on an H100."""
NARROW_HEAD_DIM = 64
"""Up to this head_dim the table-driven kernel is about as fast in forward as the others are on
tiles of twice as many operations, and costs the CPU less; but it takes none that are too large for
being computed row by row."""


def limits_on(
    profile: DeviceProfile, element_size: int, head_dim: int, *, keeps_calls: bool
) -> tuple[Limits, ...]:
    """The limits of calls of rising operations.

    Args:
        profile: of the device.
        element_size: bytes of an element of the inputs: 2 or 4.
        head_dim: elements of a row of a head.
        keeps_calls: see `TileBackend`; for elements of 2 bytes.
    """
    found = _LIMITS_OF_KEPT_CALLS if keeps_calls else _LIMITS[element_size]
    if head_dim <= NARROW_HEAD_DIM:
        found = tuple(x._replace(forward=min(2 * x.forward, x.own)) for x in found)
    return tuple(Limits._make(map(profile.flops, x)) for x in found)
