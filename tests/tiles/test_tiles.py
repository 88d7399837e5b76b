from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import pytest
import torch
from support.simulated_devices import simulated
from support.tolerances import FLOAT64, assert_close_to

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.engine import readable_in_backward
from ring_dilated_attention.resolve import forget_plans
from ring_dilated_attention.tiles import (
    BACKENDS,
    Backend,
    TileGradients,
    TileInputs,
    sdpa,
    select,
    select_backend,
)
from ring_dilated_attention.tiles.sdpa import EAGER, in_one_layout

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [1, 5, 16, 80, 256])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_fused_tiles_on_overlapping_views_equal_eager(rows, head_dim, is_causal):
    """Backward is given an out and lse merged with other keys', as the ring does."""
    torch.manual_seed(0)
    backend = select_backend("cpu_flash", CPU, torch.float64, head_dim).backend
    assert backend is not None
    n, heads = 2 * rows + 3, 3
    q, k, v, dout, other = torch.randn(5, 1, n, heads, head_dim, dtype=torch.float64)
    # Heads at their own offsets, every second row: strides overlap.
    q, k, v, dout = (
        x.as_strided(
            (1, heads, rows, head_dim), (0, heads * head_dim + head_dim, 2 * heads * head_dim, 1)
        )
        for x in (q, k, v, dout)
    )
    inputs = TileInputs(q, k, v, is_causal, 0.3)
    out, lse = EAGER.forward(inputs)
    got_out, got_lse = backend.forward(inputs)
    assert relative_error(got_out, out) < FLOAT64
    assert relative_error(got_lse, lse) < FLOAT64
    merged = 0.75 * out + 0.25 * other[:, :rows].transpose(1, 2)
    lse = lse - torch.tensor(0.75).log()
    want = EAGER.backward(inputs, TileGradients(dout, merged, lse))
    strided_lse = torch.stack([lse, lse], -1)[..., 0]
    got = backend.backward(inputs, TileGradients(dout, merged, strided_lse))
    for a, b in zip(got, want, strict=True):
        assert_close_to(a, b, terms=64 * 64)


def _name(*arguments):
    backend = select_backend(*arguments).backend
    return backend and backend.name


@pytest.mark.parametrize("warn_only", [False, True])
def test_kernels_whose_gradients_vary_are_no_deterministic_ones(warn_only, monkeypatch):
    kernels = [replace(x, refusal=lambda *_: None) for x in (sdpa.CUDNN, sdpa.FLASH)]
    groups = {"_SDPA": tuple(kernels), "AUTO": tuple(kernels), "_NAMED": {"cudnn": kernels[0]}}
    for group, backends in groups.items():
        monkeypatch.setattr(select, group, backends)
    with deterministic(warn_only=warn_only):
        for name in ("auto", "sdpa"):
            assert _name(name, CPU, torch.float16, 64) == ("cudnn" if warn_only else "flash")
        if not warn_only:
            with pytest.raises(ValueError, match=r"cudnn: its gradients may differ from run to"):
                select_backend("cudnn", CPU, torch.float16, 64)


def test_a_call_heeds_determinism_that_is_asked_for_later(monkeypatch):
    """The same call before chose another kernel."""
    chosen = []

    def note(name):
        def forward(tile):
            chosen.append(name)
            return EAGER.forward(tile)

        return replace(EAGER, name=name, forward=forward)

    kernels = replace(note("cudnn"), repeats=False), note("flash")
    monkeypatch.setattr(select, "AUTO", kernels)
    forget_plans()
    x = torch.randn(1, 40, 2, 8)
    for asked in (False, True, False):
        with deterministic(enabled=asked):
            dilated_attention(x, x, x, DilatedPattern([16], [1]))
        assert set(chosen) == {"flash" if asked else "cudnn"}
        chosen.clear()
    forget_plans()


@contextmanager
def deterministic(*, enabled=True, warn_only=False):
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def test_auto_prefers_a_fused_kernel():
    assert _name("auto", CPU, torch.float32, 64) == "cpu_flash"
    assert _name("sdpa", CPU, torch.bfloat16, 64) == "cpu_flash"


def test_a_named_backend_is_used_or_refused():
    assert _name("eager", CPU, torch.float32, 64) == "eager"
    with pytest.raises(ValueError, match="cudnn: it runs on cuda, the inputs are on cpu"):
        select_backend("cudnn", CPU, torch.float32, 64)
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match="multiple of 8 up to 256, not 12"):
        select_backend("flash", cuda, torch.bfloat16, 12)
    with pytest.raises(ValueError, match="it takes float16, bfloat16, the inputs are float64"):
        select_backend("cudnn", cuda, torch.float64, 64)
    with pytest.raises(ValueError, match=r"cpu_flash.*cudnn.*flash.*efficient"):
        select_backend("sdpa", cuda, torch.float64, 64)
    assert _name("auto", cuda, torch.float64, 64) == "eager"
    for head_dim in (12, 264):  # eager would take memory of rows^2: only when asked for
        with pytest.raises(ValueError, match=f"a multiple of 8 up to 256, not {head_dim}"):
            select_backend("auto", cuda, torch.bfloat16, head_dim)
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'sdpa'"):
        select_backend("fast", CPU, torch.float32, 64)
    assert BACKENDS[0] == "auto"


def test_tensors_in_one_layout_are_not_copied():
    a, b = torch.randn(2, 1, 5, 3, 8).transpose(2, 3).unbind()
    assert all(x is y for x, y in zip(in_one_layout(a, b), (a, b), strict=True))
    alike = b.as_strided(b.shape, (7, *b.stride()[1:]))  # where there is one element, any stride
    assert in_one_layout(a, alike)[1] is alike


def test_tensors_in_two_layouts_are_copied_into_one():
    shape = 2, 3, 5, 8
    whole = torch.randn(2, 5, 3, 16)
    tensors = torch.randn(shape), whole[..., :8].transpose(1, 2), whole[..., 8:].transpose(1, 2)
    for order in (tensors, tensors[1:] + tensors[:1]):
        found = in_one_layout(*order)
        assert {x.stride() for x in found} == {torch.empty(shape).stride()}
        assert all(torch.equal(x, y) for x, y in zip(found, order, strict=True))


def test_a_packed_query_is_copied_once_for_a_kernel_that_wants_one_layout(monkeypatch):
    device = simulated(monkeypatch, "H200")
    query, key, value = torch.randn(1, 6, 3, 2, 16).unbind(2)
    out, dout = torch.randn(2, 1, 6, 2, 16).unbind()
    for name, is_copied in (("cudnn", True), ("flash", False)):
        selection = select_backend(name, device, torch.bfloat16, 16)
        found = readable_in_backward(dout, query, key, value, out, selection)
        assert found[0] is dout
        assert found[4] is out
        assert (found[1].data_ptr() == query.data_ptr()) is not is_copied
        assert found[1].is_contiguous() is is_copied
        assert torch.equal(found[1], query)
        assert [x.data_ptr() for x in found[2:4]] == [key.data_ptr(), value.data_ptr()]


def test_the_type_of_backend_names_every_one():
    assert set(get_args(Backend)) == set(BACKENDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 7, 15, 16, 40])
def test_nan_in_a_query_comes_out_of_tiles_of_any_size(length, dtype):
    """torch's kernel gives 0 for it where a tile has few keys; rows beside it stay as they are."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, length, 2, 8).to(dtype)
    query = query.index_fill(1, torch.tensor(0), torch.nan).requires_grad_()
    pattern = DilatedPattern([8, None], [1, 2])
    out, lse = dilated_attention(query, key, value, pattern, return_lse=True)
    assert out[:, 0].isnan().all()
    assert lse[..., 0].isnan().all()
    assert out[:, 1:].isfinite().all()
    (dquery,) = torch.autograd.grad(out[:, 0].sum(), query)
    assert dquery[:, 0].isnan().all()


def test_rows_of_score_0_are_no_nan():
    """A single key of score 0 has lse 0, too, and an out of its own."""
    zero, value = torch.zeros(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    out, lse = dilated_attention(zero, zero, value, DilatedPattern([1], [1]), return_lse=True)
    assert torch.equal(out, value)
    assert not lse.any()
