"""The order along a Hilbert curve."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ring_dilated_attention.nn import hilbert_order, inverse_order


def grid(axes, bits, **options):
    return torch.cartesian_prod(*[torch.arange(2**bits, **options)] * axes)


@pytest.mark.parametrize(("axes", "bits"), [(2, 1), (2, 2), (2, 3), (2, 6), (3, 1), (3, 2), (3, 4)])
def test_neighbours_on_the_curve_are_neighbours_in_space(axes, bits):
    """What defines a Hilbert curve: unit steps, and every aligned cube is one run of it."""
    cells = grid(axes, bits)
    torch.manual_seed(0)
    cells = cells[torch.randperm(len(cells))]
    walk = cells[hilbert_order(cells)]
    assert (walk.diff(dim=0).abs().sum(1) == 1).all()
    for level in range(1, bits):
        cubes = (walk >> level).view(-1, 2 ** (axes * level), axes)
        assert (cubes == cubes[:, :1]).all()


@given(
    st.integers(2, 3),
    st.integers(0, 40),
    st.sampled_from(
        [torch.int32, torch.int64, torch.uint8, torch.float16, torch.float32, torch.float64]
    ),
    st.integers(0, 100),
)
def test_it_is_a_permutation_and_undone_by_its_inverse(axes, count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(0, 9, (count, axes), generator=generator).to(dtype)
    order = hilbert_order(points)
    assert order.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(count))
    assert torch.equal(points[order][inverse_order(order)], points)
    # Points of one cell are together, and in the order given.
    seen = [tuple(point) for point in points[order].tolist()]
    assert len([cell for cell, _ in itertools.groupby(seen)]) == len(set(seen))
    where: dict = {}
    for index in order.tolist():
        assert where.get(tuple(points[index].tolist()), -1) < index
        where[tuple(points[index].tolist())] = index


@pytest.mark.parametrize("axes", [2, 3])
def test_where_the_origin_is_does_not_matter(axes):
    cells = grid(axes, 3)[torch.randperm(8**axes)]
    order = hilbert_order(cells)
    assert torch.equal(order, hilbert_order(cells - 1000))
    assert torch.equal(order, hilbert_order((cells + 2**40).to(torch.int64)))
    # The whole extent of int64 is rounded, not overflown.
    wide = torch.tensor([[-(2**63)] * axes, [2**63 - 1] * axes, [0] * axes, [-(2**63) + 5] * axes])
    assert hilbert_order(wide)[:2].tolist() == [0, 3]


def test_floats_are_rounded_to_fine_cells():
    torch.manual_seed(0)
    points = torch.rand(500, 2, dtype=torch.float64)
    order = hilbert_order(points)
    assert torch.equal(order, hilbert_order((points * (2**31 - 1) / points.max()).double()))
    walk = points[order]
    # Neighbours are near: the mean step of 500 random points is near 500 ** -0.5.
    assert walk.diff(dim=0).norm(dim=1).mean() < 1.5 * 500**-0.5
    huge = torch.tensor([[-1e308, 1e308], [1e308, -1e308], [0.0, 0.0]], dtype=torch.float64)
    assert sorted(hilbert_order(huge).tolist()) == [0, 1, 2]
    assert hilbert_order(torch.ones(4, 3)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("coordinates", "kind", "message"),
    [
        ([[0, 1]], TypeError, "coordinates must be a tensor, got"),
        (torch.zeros(3, 2, dtype=torch.bool), TypeError, "integer or floating; got torch.bool"),
        (torch.zeros(3, 2, dtype=torch.complex64), TypeError, "got torch.complex64"),
        (torch.zeros(3, 4), ValueError, r"shape \(n, 2\) or \(n, 3\); got \(3, 4\)"),
        (torch.zeros(2), ValueError, r"got \(2,\)"),
        (torch.tensor([[0.0, torch.nan]]), ValueError, "coordinates must be finite"),
        (torch.tensor([[0.0, torch.inf]]), ValueError, "coordinates must be finite"),
    ],
)
def test_refusals(coordinates, kind, message):
    with pytest.raises(kind, match=message):
        hilbert_order(coordinates)


@pytest.mark.parametrize("order", [torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)])
def test_inverse_refuses(order):
    with pytest.raises(ValueError, match=r"order must be int64 of one dimension, .*; got"):
        inverse_order(order)
