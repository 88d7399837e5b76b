"""Which back end computes tiles, by name and device; and torch's kernels against eager code."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from support.plans import forget_plans
from support.simulated_devices import simulated
from support.tolerances import FLOAT64, assert_close_to

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import relative_error
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

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_H200 = CPU  # what is no GPU has an H200's profile
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


def name_of(*arguments):
    backend = select_backend(*arguments).backend
    return backend and backend.name


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [1, 5, 80, 256])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_fused_tiles_on_overlapping_views_equal_eager(rows, head_dim, is_causal):
    """Backward is given an out and lse merged with other keys', as the ring does."""
    torch.manual_seed(0)
    backend = select_backend("cpu_flash", CPU, torch.float64, head_dim).backend
    assert backend is not None
    n, heads = 2 * rows + 3, 3
    *tensors, other = torch.randn(5, 1, n, heads, head_dim, dtype=torch.float64)
    # Heads at their own offsets, every second row: strides overlap.
    shape, row = (1, heads, rows, head_dim), heads * head_dim
    q, k, v, dout = (x.as_strided(shape, (0, row + head_dim, 2 * row, 1)) for x in tensors)
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


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("auto", CPU, FLOAT32, 64), "cpu_flash"),
        (("sdpa", CPU, BFLOAT16, 64), "cpu_flash"),
        (("eager", CPU, FLOAT32, 64), "eager"),
        (("auto", CUDA, torch.float64, 64), "eager"),
    ],
)
def test_a_name_stands_for_what_can_compute_it(arguments, name):
    assert name_of(*arguments) == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cudnn", CPU, FLOAT32, 64), "cudnn: it runs on cuda, the inputs are on cpu"),
        (("flash", CUDA, BFLOAT16, 12), "multiple of 8 up to 256, not 12"),
        (("cudnn", CUDA, torch.float64, 64), "takes float16, bfloat16, the inputs are float64"),
        (("sdpa", CUDA, torch.float64, 64), r"cpu_flash.*cudnn.*flash.*efficient"),
        # Eager would take memory of rows^2: only when asked for.
        (("auto", CUDA, BFLOAT16, 12), "a multiple of 8 up to 256, not 12"),
        (("auto", CUDA, BFLOAT16, 264), "a multiple of 8 up to 256, not 264"),
        (("fast", CPU, FLOAT32, 64), "backend must be one of 'auto', 'sdpa'"),
    ],
)
def test_a_name_is_used_or_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        select_backend(*arguments)
    assert set(get_args(Backend)) == set(BACKENDS)


@pytest.mark.parametrize("head_dim", [48, 64, 256])
@pytest.mark.parametrize("name", ["P100", "T4"])
def test_gpus_that_flash_attention_refuses(name, head_dim, monkeypatch):
    """GigaPath's heads of 48, too: by torch's memory-efficient kernels, but for bfloat16."""
    device = simulated(monkeypatch, name)
    for dtype in (FLOAT16, FLOAT32):
        for backend in ("auto", "sdpa", "efficient"):
            assert name_of(backend, device, dtype, head_dim) == "efficient"
    monkeypatch.setattr(select, "has_triton", lambda: True)
    for backend in ("cudnn", "flash", "triton"):
        with pytest.raises(ValueError, match=r"compute capability 8\.0 and above, the device has"):
            select_backend(backend, device, FLOAT16, min(head_dim, 128))
    with pytest.raises(ValueError, match=r"efficient: it takes bfloat16 from compute capability"):
        select_backend("auto", device, BFLOAT16, head_dim)
    later = simulated(monkeypatch, "A100")
    for backend in ("cudnn", "flash", "efficient"):
        for dtype in (FLOAT16, BFLOAT16):
            assert name_of(backend, later, dtype, 64) == backend


def test_the_interpreter_takes_no_bfloat16(monkeypatch):
    """Triton's keeps it as integers, and multiplies those."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(select, "has_triton", lambda: True)
    assert select_backend("triton", CPU, FLOAT16, 64).backend is None
    with pytest.raises(ValueError, match="it takes float32, float16, the inputs are bfloat16"):
        select_backend("triton", CPU, BFLOAT16, 64)


@contextmanager
def deterministic(*, enabled=True, warn_only=False):
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


@pytest.mark.parametrize("warn_only", [False, True])
def test_kernels_whose_gradients_vary_are_no_deterministic_ones(warn_only, monkeypatch):
    kernels = [replace(x, refusal=lambda *_: None) for x in (sdpa.CUDNN, sdpa.FLASH)]
    groups = {"_SDPA": tuple(kernels), "AUTO": tuple(kernels), "_NAMED": {"cudnn": kernels[0]}}
    for group, backends in groups.items():
        monkeypatch.setattr(select, group, backends)
    with deterministic(warn_only=warn_only):
        for name in ("auto", "sdpa"):
            assert name_of(name, CPU, FLOAT16, 64) == ("cudnn" if warn_only else "flash")
        if not warn_only:
            with pytest.raises(ValueError, match=r"cudnn: its gradients may differ from run to"):
                select_backend("cudnn", CPU, FLOAT16, 64)


def test_a_call_heeds_determinism_that_is_asked_for_later(monkeypatch):
    """The same call before chose another kernel."""
    chosen = []

    def note(name):
        def forward(tile):
            chosen.append(name)
            return EAGER.forward(tile)

        return replace(EAGER, name=name, forward=forward)

    monkeypatch.setattr(select, "AUTO", (replace(note("cudnn"), repeats=False), note("flash")))
    forget_plans()
    x = torch.randn(1, 40, 2, 8)
    for asked in (False, True, False):
        with deterministic(enabled=asked):
            dilated_attention(x, x, x, DilatedPattern([16], [1]))
        assert set(chosen) == {"flash" if asked else "cudnn"}
        chosen.clear()
    forget_plans()


def test_tensors_are_copied_into_one_layout_where_they_have_two():
    a, b = torch.randn(2, 1, 5, 3, 8).transpose(2, 3).unbind()
    assert all(x is y for x, y in zip(in_one_layout(a, b), (a, b), strict=True))
    alike = b.as_strided(b.shape, (7, *b.stride()[1:]))  # where there is one element, any stride
    assert in_one_layout(a, alike)[1] is alike
    shape, whole = (2, 3, 5, 8), torch.randn(2, 5, 3, 16)
    tensors = torch.randn(shape), whole[..., :8].transpose(1, 2), whole[..., 8:].transpose(1, 2)
    for order in (tensors, tensors[1:] + tensors[:1]):
        found = in_one_layout(*order)
        assert {x.stride() for x in found} == {torch.empty(shape).stride()}
        assert all(torch.equal(x, y) for x, y in zip(found, order, strict=True))


@pytest.mark.parametrize("dtype", [FLOAT32, torch.float64, BFLOAT16])
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


def seen_by_flash(queries, keys, left, right):
    """Pairs that torch's flash kernel computes: sides are cut, and -1 has no end."""
    left, right = (-1 if side >= keys else side for side in (left, right))
    left, right = (
        keys if side < 0 <= other else side for side, other in ((left, right), (right, left))
    )
    more, pairs = keys - queries, {(i, j) for i in range(queries) for j in range(keys)}
    is_whole = left < 0 and right < 0
    return {(i, j) for i, j in pairs if is_whole or -left <= j - i - more <= right}


def test_bands_that_torchs_flash_kernel_takes():
    """Others, of whose pairs it would miss some, are computed by eager code."""
    others = 0
    for queries, keys in product(range(1, 7), repeat=2):
        pairs = {(i, j) for i in range(queries) for j in range(keys)}
        for low, high in product(range(-7, 8), repeat=2):
            seen = {(i, j) for i, j in pairs if low <= j - i <= high}
            if not all(len({pair[x] for pair in seen}) == n for x, n in enumerate((queries, keys))):
                continue  # the plan trims tiles
            q, k = (torch.empty(1, 1, rows, 8) for rows in (queries, keys))
            tile = TileInputs(q, k, k, False, 1.0, band=(low, high))
            if sdpa.flash_takes(tile):
                assert seen_by_flash(queries, keys, *tile.sides(2)) == seen
            others += seen_by_flash(queries, keys, *tile.sides(2)) != seen
    assert others
