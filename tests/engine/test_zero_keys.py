"""Zero keys: counted in the softmax as if they had been padded in, and never padded."""

import pytest
import torch
from support.tolerances import TOLERANCE, assert_close_to, rounding_bound

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention, plan_attention
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.engine import accumulate, merge_zero_keys
from ring_dilated_attention.plan import Rows, check_plan


def zero_pattern(segment_lengths, rates, **options):
    return DilatedPattern(segment_lengths, rates, head_offsets="blocked", zero_keys=True, **options)


@pytest.mark.parametrize(
    "broken",
    [
        lambda tile: tile._replace(keys=Rows(0, tile.keys.length + 1, 0, 0)),
        lambda tile: tile._replace(queries=tile.queries._replace(start=tile.queries.start + 1)),
        lambda tile: tile._replace(heads=tile.heads[:-1] or tile.heads),
    ],
)
def test_the_proof_can_fail(broken, monkeypatch):
    plan = plan_attention(
        zero_pattern([5, None], [2, 3]),
        SequenceLayout.contiguous(29, 3),
        is_causal=False,
        num_heads=6,
    )
    check_plan(plan)
    rank = plan.rank(2)
    (first, *rest), *groups = (group.tiles for group in rank.zero_keys)
    first = broken(max((first, *rest), key=lambda tile: len(tile.heads)))
    changed = [type(rank.zero_keys[0])((first, *rest)), *map(type(rank.zero_keys[0]), groups)]
    vars(rank)["zero_keys"] = tuple(changed)
    with pytest.raises(AssertionError, match="zero keys"):
        check_plan(plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    """A large lse swallows zero keys, a very negative one is swallowed by them: neither is NaN."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 21, 2, 8).to(dtype)
    pattern, doubles = zero_pattern([16], [2]), (query.double(), key.double(), value.double())
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for scale in (0.3, 40.0):
        out, lse = dilated_attention(query, key, value, pattern, scale=scale, return_lse=True)
        want, want_lse = reference_attention(*doubles, pattern, scale=scale)
        assert relative_error(out, want) < 2 * TOLERANCE[dtype]
        exact = reference_attention(*doubles, DilatedPattern.dense(), scale=scale)[1]
        plain = attend(q, k, v, scale=scale)[1]
        of_kernel = (plain.double() - exact).abs().max()  # its exponential is a quick one
        assert_close_to(lse, want_lse, plain=want_lse + of_kernel, terms=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_that_merges_on_gpus_takes_them(dtype, monkeypatch):
    """Triton's; interpreted where there is no GPU. What it reads has strides of 0."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    plan = plan_attention(
        zero_pattern([16, 30], [3, 4]), SequenceLayout.contiguous(61, 1), is_causal=False,
        num_heads=4, num_kv_heads=2,
    )  # fmt: skip
    groups = plan.rank(0).zero_keys
    out = torch.randn(2, 61, 4, 24, device=device).to(dtype)
    lse = torch.randn(2, 4, 61, device=device)
    results = []
    for runs_triton in (False, True):
        monkeypatch.setattr(accumulate, "runs_triton", lambda _, runs=runs_triton: runs)
        results.append((out.clone(), lse.clone()))
        merge_zero_keys(groups, results[-1][0], results[-1][1].transpose(1, 2), 2)
    assert not torch.equal(results[0][1], lse)
    assert relative_error(results[1][0], results[0][0]) < rounding_bound(dtype, 4)
    assert relative_error(results[1][1], results[0][1]) < rounding_bound(torch.float32, 4)
