"""Points in the plane or in space: an order in which segments are compact, and an embedding.

Dilated attention cuts a sequence into segments. Tiles of a slide in raster order make segments one
tile high and as wide as the slide; along a Hilbert curve they make patches. The order is the
caller's to apply and to undo::

    order = hilbert_order(coordinates)
    results = encoder(features[order], coordinates[order])[inverse_order(order)]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..pattern import in_brief, shape_in_brief

_KEY_BITS = 62  # of an int64 that is never negative


def hilbert_order(coordinates: Tensor) -> Tensor:
    """The order of points along a Hilbert curve through their bounding square or cube.

    Integer coordinates are cells of the curve as they are, where their extent is below 2^31 (in
    space 2^20); larger ones, and floating ones, are rounded down to 2^31 (2^20) cells along the
    longest axis. One unit is as long on every axis.

    The curve is computed bit by bit for all points at once, by the transposition of Skilling
    ("Programming the Hilbert curve", AIP Conference Proceedings 707, 2004).

    Args:
        coordinates: (n, 2) or (n, 3), integer or floating, on any device; n may be 0.

    Returns:
        int64 (n,): the permutation; ``coordinates[order]`` follow the curve. Points of one cell
        stay in the order given.

    Raises:
        TypeError: `coordinates` is not a tensor of integers or floating-point numbers.
        ValueError: it has another shape, or holds a number that is not finite.

    Examples:
        >>> hilbert_order(torch.tensor([[0, 0], [1, 1], [0, 1], [1, 0]])).tolist()
        [0, 2, 1, 3]
    """
    if not isinstance(coordinates, Tensor):
        raise TypeError(f"coordinates must be a tensor, got {in_brief(coordinates)}")
    if coordinates.dtype == torch.bool or coordinates.is_complex():
        raise TypeError(f"coordinates must be integer or floating; got {coordinates.dtype}")
    if coordinates.dim() != 2 or coordinates.shape[1] not in (2, 3):
        raise ValueError(
            f"coordinates must have shape (n, 2) or (n, 3); got {shape_in_brief(coordinates)}"
        )
    if coordinates.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=coordinates.device)
    most_bits = _KEY_BITS // coordinates.shape[1]
    cells, bits = _cells(coordinates, most_bits)
    return torch.argsort(_along_curve(list(cells.unbind(1)), bits), stable=True)


def inverse_order(order: Tensor) -> Tensor:
    """The permutation that undoes `order`: ``x[order][inverse_order(order)]`` is x.

    Args:
        order: int64 (n,), a permutation of 0 to n - 1.

    Returns:
        int64 (n,), on the device of `order`.

    Raises:
        TypeError: `order` is not a tensor.
        ValueError: it is not an int64 tensor of one dimension, or not a permutation.
    """
    if not isinstance(order, Tensor):
        raise TypeError(f"order must be a tensor, got {in_brief(order)}")
    if order.dim() == 1 and order.dtype == torch.int64:
        inverse = torch.argsort(order)
        if torch.equal(order[inverse], torch.arange(len(order), device=order.device)):
            return inverse
    raise ValueError(
        "order must be int64 of one dimension, each number from 0 to its length once; got "
        f"{order.dtype} {shape_in_brief(order)}"
    )


def _cells(coordinates: Tensor, most_bits: int) -> tuple[Tensor, int]:
    """Cells (n, d), int64 from 0 on, and the bits of the largest there can be."""
    if not coordinates.is_floating_point():
        low, high = coordinates.amin(0), coordinates.amax(0)
        extent = max(b - a for a, b in zip(low.tolist(), high.tolist(), strict=True))
        bits = max(extent.bit_length(), 1)
        if bits <= most_bits:
            return coordinates.to(torch.int64) - low.to(torch.int64), bits
    points = coordinates.double()
    if not torch.isfinite(points).all():
        raise ValueError("coordinates must be finite; got infinity or NaN among them")
    points = points / 2  # the extent of finite numbers may not be finite
    points = points - points.amin(0)
    extent = points.max()
    cells = points / torch.where(extent > 0, extent, 1) * (2**most_bits - 1)
    return cells.to(torch.int64), most_bits


def _along_curve(axes: list[Tensor], bits: int) -> Tensor:
    """How far along the curve each cell lies: int64 (n,); `axes` are (n,) each."""
    last = len(axes) - 1
    # From the coarsest square to the finest, undo how the curve is turned in it.
    for bit in range(bits - 1, 0, -1):
        below = (1 << bit) - 1
        for i in range(len(axes)):
            upper = (axes[i] >> bit & 1).bool()
            swapped = torch.where(upper, 0, (axes[0] ^ axes[i]) & below)
            axes[i] = axes[i] ^ swapped
            axes[0] = axes[0] ^ torch.where(upper, below, swapped)
    # What is left is a Gray code.
    for i in range(1, len(axes)):
        axes[i] = axes[i] ^ axes[i - 1]
    turned = torch.zeros_like(axes[last])
    for bit in range(bits - 1, 0, -1):
        turned = torch.where((axes[last] >> bit & 1).bool(), turned ^ ((1 << bit) - 1), turned)
    key = torch.zeros_like(turned)
    for bit in range(bits - 1, -1, -1):
        for axis in axes:
            key = key << 1 | ((axis ^ turned) >> bit & 1)
    return key


def sincos_positions(
    coordinates: Tensor, embed_dim: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Embed coordinates as sines and cosines (Vaswani et al. 2017), as encoders of images do.

    Each of the d axes has its own ``embed_dim / d`` features: first the sines, then the cosines, of
    ``x * 10000 ** (-i / m)`` for i in 0 .. m-1, with ``m = embed_dim / (2 d)``. Angles are computed
    in float64, for float32 up to whole turns: its errors stay below 2e-7 for coordinates up to
    2^20, and below 5e-7 up to 2^30.

    Args:
        coordinates: (..., d), integer or floating, in units in which neighbours are about 1 apart.
        embed_dim: a multiple of 2 d.
        dtype: of the sines: float32, the default, or float64.

    Returns:
        (..., embed_dim), of that dtype.

    Raises:
        ValueError: `embed_dim` is not a multiple of 2 d.
    """
    axes = coordinates.shape[-1]
    if embed_dim < 1 or embed_dim % (2 * axes):
        raise ValueError(f"embed_dim must be a multiple of {2 * axes}; got {embed_dim}")
    count = embed_dim // (2 * axes)
    steps = torch.arange(count, dtype=torch.float64, device=coordinates.device)
    if dtype == torch.float64:
        angles = coordinates.to(dtype).unsqueeze(-1) * 10_000.0 ** (-steps / count)
        return torch.cat((angles.sin(), angles.cos()), -1).flatten(-2)
    # Turns, of which whole ones are left out. All of it costs little, since a compiled model
    # computes it again in the kernel of each row that needs it: exp2, and no sine of a float64.
    frequencies = torch.exp2(steps * (-math.log2(10_000.0) / count) - math.log2(2 * math.pi))
    turns = coordinates.to(torch.float64).unsqueeze(-1) * frequencies
    angles = turns.sub_(turns.round()).mul_(2 * math.pi).float()
    return torch.cat((angles.sin(), angles.cos()), -1).flatten(-2)
