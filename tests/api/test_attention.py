"""The sharded function against the reference, every rank inside this process."""

from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cut_rings import rings_cut
from support.on_ranks import on_ranks, out_and_gradients, outcome
from support.strategies import cases
from support.tolerances import FLOAT64, rounding_bound

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention, plan_attention
from ring_dilated_attention.checks import (
    Case,
    ViewKind,
    key_counts,
    reference_attention,
    relative_error,
)
from ring_dilated_attention.engine import executor, kernels_on
from ring_dilated_attention.plan import costs
from ring_dilated_attention.tiles import accumulate_dtype

PATTERN = DilatedPattern([4, None], [1, 3])


@settings(max_examples=150)
@given(cases(), st.none() | st.integers(1, 3000))
def test_any_case_equals_the_reference(case, round_pairs):
    """Also as a ring that computes few heads at a time."""
    with rings_cut(round_pairs):
        found = outcome(case)
    assert found.passes(case.dtype), found


def test_a_ring_cut_up_holds_less_and_moves_the_same():
    def dense(length):
        layout = SequenceLayout.zigzag(length, 4)
        return plan_attention(DilatedPattern.dense(), layout, is_causal=True, num_heads=16)

    # Fewer heads at a time where steps are long.
    assert [one.kv_heads for one in dense(2**16).rounds] == [range(8), range(8, 16)]
    plan = dense(2**18)
    assert [one.kv_heads for one in plan.rounds] == [range(i, i + 1) for i in range(16)]
    size = costs.TensorSize(batch=1, head_dim=128, element_size=2)
    for rank in map(plan.rank, range(4)):
        parts = rank.rounds(gathers=False)
        assert sum(part.total_received_rows for part in parts) == rank.total_received_rows
        assert sum(part.pairs for part in parts) == rank.pairs
        # Two messages of a sixteenth of the heads: of both ranges of a rank, or of the first alone
        # from earlier ranks, of whose second range no query sees anything.
        halves = [4, 4, 3, 2][rank.index]
        assert costs.memory(rank, size).buffers == halves * costs.memory(rank, size).key // 16


def test_sums_in_the_dtype_of_the_inputs(monkeypatch):
    """As on CUDA, where returned gradients are wider than what they are added to."""
    monkeypatch.setattr(executor, "sum_dtype", lambda query, plan: query.dtype)
    torch.manual_seed(0)
    pattern, layout = DilatedPattern([16, 40, None], [1, 3, 4]), SequenceLayout.zigzag(101, 3)
    *tensors, dout = torch.randn(4, 1, 101, 4, 16, dtype=torch.float64).to(torch.bfloat16)
    one = SequenceLayout.contiguous(101, 1)
    *wanted, _ = on_ranks(one, pattern, [x.double() for x in tensors], dout.double())
    *got, _ = on_ranks(layout, pattern, tensors, dout)
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        assert relative_error(a, b) < rounding_bound(torch.bfloat16)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_huge_logits_give_no_nan(dtype, is_causal):
    torch.manual_seed(0)
    pattern, layout = DilatedPattern([7, None], [2, 3]), SequenceLayout.zigzag(30, 3)
    query, key, value, dout = torch.randn(4, 1, 30, 3, 8, dtype=torch.float64)
    signs = torch.where(torch.rand(2, 1, 30, 3, 1) < 0.5, -1.0, 1.0)
    query, key = (100 * signs * torch.ones_like(query) / 8**0.5).to(dtype).unbind(0)
    tensors = [query, key, value.to(dtype)]  # logits are +-1e4
    options: dict[str, Any] = {"is_causal": is_causal, "scale": 1.0}
    out, *gradients, _ = on_ranks(layout, pattern, tensors, dout.to(dtype), **options)
    query, key, value = (x.double() for x in tensors)
    want, _ = reference_attention(query, key, value, pattern, **options)
    # A score of 1e4 is rounded to so much that its exponential is off by as many parts.
    of_scores = 1e4 * rounding_bound(accumulate_dtype(dtype), 8)
    assert relative_error(out, want) < of_scores + rounding_bound(dtype)
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "pattern", [DilatedPattern.dense(), DilatedPattern([16, 64, None], [1, 2, 4])]
)
@pytest.mark.parametrize("world_size", [1, 4])
def test_half_precision_errs_as_one_plain_sdpa_call(pattern, dtype, is_causal, world_size):
    torch.manual_seed(0)
    length, heads, head_dim = 256, 4, 64
    query, key, value, dout = torch.randn(4, 1, length, heads, head_dim).to(dtype)

    *want, _ = out_and_gradients(
        [x.double() for x in (query, key, value)],
        dout.double(),
        partial(reference_attention, pattern=pattern, is_causal=is_causal),
    )

    # One call over the same multiset of keys: each branch's keys, masked to what it shows.
    masks = [
        key_counts(DilatedPattern([w], [r]), length, heads, is_causal=is_causal)[0] > 0
        for w, r in pattern.branches
    ]
    plain = [x.clone().requires_grad_() for x in (query, key, value)]
    keys, values = (torch.cat([x] * len(masks), 1).transpose(1, 2) for x in plain[1:])
    mask = torch.cat(masks, -1)[None]
    try:
        out = F.scaled_dot_product_attention(
            plain[0].transpose(1, 2), keys, values, attn_mask=mask
        ).transpose(1, 2)
    except RuntimeError as error:  # bfloat16 with ATEN_CPU_CAPABILITY=default on AVX-512
        pytest.skip(f"torch's own kernel fails: {error}")
    sdpa = [out.detach(), *torch.autograd.grad(out, plain, dout)]

    layout = SequenceLayout.zigzag(length, world_size)
    *got, _ = on_ranks(layout, pattern, [query, key, value], dout, is_causal=is_causal)
    for ours, theirs, exactly in zip(got, sdpa, want, strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, exactly) <= 2 * relative_error(theirs, exactly)


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("kind", ViewKind.named())
def test_strides_of_the_inputs_do_not_matter(kind, backend):
    """Of each of query, key, value and dout in turn, and of all: on one rank, and on three."""
    others = ViewKind()
    for number, is_causal in enumerate((False, True, False, True, False)):
        views = [ViewKind.named()[kind] if number in (i, 4) else others for i in range(4)]
        for layout in (SequenceLayout.contiguous(11, 1), SequenceLayout.zigzag(11, 3)):
            case = Case(
                pattern=PATTERN,
                layout=layout,
                batch=2,
                num_kv_heads=2,
                is_causal=is_causal,
                dtype=torch.float32,
                backend=backend,
                seed=number,
                views=tuple(views),
            )
            found = outcome(case)
            assert found.passes(case.dtype), (case, found)


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("dim", range(4))
def test_strides_of_dimensions_of_one_element_do_not_matter(dim, backend):
    """torch calls such tensors contiguous, whatever the stride is."""
    torch.manual_seed(0)
    shape = [2, 7, 3, 8]
    shape[dim] = 1
    tensors = torch.randn(4, *shape, dtype=torch.float64).unbind(0)

    attend = partial(dilated_attention, pattern=PATTERN, backend=backend, return_lse=True)
    want = out_and_gradients(tensors[:3], tensors[3], attend)
    for stride in (0, 1, 10**15):
        strides = [stride if i == dim else x for i, x in enumerate(tensors[0].stride())]
        *given, dout = (x.as_strided(shape, strides) for x in tensors)
        got = out_and_gradients(given, dout, attend)
        for a, b in zip(got, want, strict=True):
            assert relative_error(a, b) < FLOAT64


@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [2.0**-64, 1e-3, 2.5])
def test_any_scale(scale, dtype, backend):
    for is_causal in (False, True):
        case = Case(
            pattern=DilatedPattern([8, None], [1, 3]),
            layout=SequenceLayout.zigzag(23, 2),
            num_kv_heads=2,
            is_causal=is_causal,
            dtype=dtype,
            backend=backend,
            scale=scale,
        )
        found = outcome(case)
        assert found.passes(dtype), found


def test_autocast_casts_as_for_sdpa():
    torch.manual_seed(0)
    pattern = DilatedPattern([4], [1])
    leaves = torch.randn(3, 1, 12, 2, 8).unbind(0)

    def run(*tensors: torch.Tensor, autocast: bool, backend: Any) -> list[torch.Tensor]:
        query, key, value = (x.clone().requires_grad_() for x in tensors)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = dilated_attention(query, key, value, pattern, backend=backend)
            # Backward inside the region, too, must compute as it does outside.
            gradients = torch.autograd.grad(out, (query, key, value), torch.ones_like(out))
        return [out.detach(), *gradients]

    for backend in ("auto", "eager"):
        inside = run(*leaves, autocast=True, backend=backend)
        outside = run(*(x.bfloat16() for x in leaves), autocast=False, backend=backend)
        assert inside[0].dtype == torch.bfloat16
        assert inside[1].dtype == torch.float32
        for a, b in zip(inside, outside, strict=True):
            assert torch.equal(a, b.to(a.dtype))
    doubles = [x.double() for x in leaves]
    assert run(*doubles, autocast=True, backend="auto")[0].dtype == torch.float64
    mixed = run(leaves[0], leaves[1], leaves[2].bfloat16(), autocast=True, backend="auto")
    assert mixed[0].dtype == torch.bfloat16


def test_kernels_are_launched_where_the_tensors_are(monkeypatch):
    """The current device may be another one; torch's operators see to that by themselves."""
    entered = []

    @contextmanager
    def on(device):
        entered.append(device.index)
        yield

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", on)
    for index in (0, 1):
        with kernels_on(torch.device("cuda", index)):
            pass
    assert entered == [1]
