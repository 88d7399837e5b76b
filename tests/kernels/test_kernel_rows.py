"""Triton's row kernels against the torch code; interpreted where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from support.tolerances import assert_close_to, rounding_bound

from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.engine import merge_
from ring_dilated_attention.kernels.launch import Launcher
from ring_dilated_attention.kernels.rows import add_rows, merge_rows, row_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, HEADS = 19, 3
LENGTH = 4 * ROWS + HEADS


def _view(tensor):
    """Every second row, each head at its own offset: strides overlap."""
    _, heads, *dim = tensor.shape
    strides = tensor.stride()
    return tensor.as_strided(
        (2, heads, ROWS, *dim),
        (2 * ROWS * strides[0], strides[1] + strides[0], 2 * strides[0], *strides[2:]),
    )


def _random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, torch.float32), (24, torch.bfloat16), (128, torch.float32)]
)
def test_merge(head_dim, dtype):
    torch.manual_seed(0)
    out, lse = _random(LENGTH, HEADS, head_dim, dtype=dtype), 5 * _random(LENGTH, HEADS)
    lse[3:9] = -torch.inf  # nothing seen yet,
    out[3:9] = torch.nan  # so what is there must not count
    tile_out = _random(2, HEADS, ROWS, head_dim, dtype=dtype)
    tile_lse = 5 * _random(2, HEADS, ROWS)
    tile_lse[:, :, 4:6] = -torch.inf  # nothing to add
    tile_lse[:, :, 7], _view(lse)[:, :, 8] = 1e4, -1e4
    want_out, want_lse = out.double().nan_to_num(), lse.double()
    merge_(_view(want_out), _view(want_lse), tile_out.double(), tile_lse.double())
    untouched = torch.ones(LENGTH, HEADS, dtype=torch.bool, device=DEVICE)
    _view(untouched).fill_(False)
    before = out[untouched].clone()
    merge_rows(_view(out), _view(lse), tile_out, tile_lse, store=False)
    seen = ~torch.isneginf(want_lse) & ~untouched
    assert relative_error(out[seen], want_out[seen]) < rounding_bound(dtype, 16)
    assert_close_to(lse, want_lse, terms=16)
    assert torch.equal(out[untouched].nan_to_num(), before.nan_to_num())
    out.fill_(torch.nan), lse.fill_(torch.nan)
    merge_rows(_view(out), _view(lse), tile_out, tile_lse, store=True)  # which does not read
    assert torch.equal(_view(out), tile_out)
    assert torch.equal(_view(lse), tile_lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", [True, False])
def test_add(store, dtype):
    total = _random(LENGTH, HEADS, 48, dtype=dtype)
    part = _random(2, HEADS, ROWS, 48)
    want = total.float()
    if store:
        total.fill_(torch.nan), want.fill_(0)
    _view(want).add_(part)
    add_rows([_view(total)], [part], store=store)
    # The interpreter cuts off what bf16 cannot hold instead of rounding.
    assert relative_error(_view(total), _view(want)) < rounding_bound(dtype)


@pytest.mark.parametrize("store", [True, False])
def test_additions_that_are_alike_share_a_launch(store, monkeypatch):
    """Five are alike, two have another length, one another dtype."""
    launches = []
    call = Launcher.__call__

    def counted(self, launch, tensors):
        launches.append(launch.grid[1])
        call(self, launch, tensors)

    monkeypatch.setattr(Launcher, "__call__", counted)
    shapes = [(2, HEADS, n, 16) for n in (ROWS, 7, ROWS, ROWS, ROWS, 7, ROWS, ROWS)]
    parts = [_random(*shape) for shape in shapes]
    parts[3] = parts[3].to(torch.bfloat16)
    totals = [_random(*shape) for shape in shapes]
    pairs = list(zip(totals, parts, strict=True))
    want = [part.float() if store else total + part for total, part in pairs]
    add_rows(totals, parts, store=store)
    for total, expected in zip(totals, want, strict=True):
        assert_close_to(total, expected)
    assert launches == [3, 2, 2, 1]


@pytest.mark.parametrize("head_dim", [8, 48])
def test_row_sums(head_dim):
    dout, out = _random(2, 2, 37, HEADS, head_dim, dtype=torch.bfloat16)
    delta = torch.full((2, HEADS, 37), torch.nan, device=DEVICE)
    row_sums(dout.transpose(1, 2), out.transpose(1, 2), delta)
    want = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    assert relative_error(delta, want) < rounding_bound(torch.float32, head_dim)
