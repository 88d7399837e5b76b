"""Zero keys: counted in the softmax as if they had been padded in, and never padded."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import cases, layouts, patterns
from support.tolerances import FLOAT64, TOLERANCE, assert_close_to, rounding_bound
from support.torchscale_definition import torchscale_by_definition

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    dilated_attention,
    plan_attention,
    replicated_query_attention,
)
from ring_dilated_attention.checks import combine, reference_attention, relative_error, run_case
from ring_dilated_attention.engine import accumulate, merge_zero_keys
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import Rows, check_plan


def zero_pattern(segment_lengths, rates, **options):
    return DilatedPattern(segment_lengths, rates, head_offsets="blocked", zero_keys=True, **options)


def test_an_option_of_the_pattern():
    pattern = zero_pattern([4, None], [1, 3])
    assert str(pattern) == "(4, 1) (document, 3), head_offsets='blocked', zero_keys=True"
    assert pattern != DilatedPattern([4, None], [1, 3], head_offsets="blocked")
    assert len({pattern, zero_pattern([4, None], [1, 3])}) == 1
    assert DilatedPattern([4], [1]).zero_keys is False
    with pytest.raises(TypeError, match="zero_keys must be a bool, got 1"):
        DilatedPattern([4], [1], zero_keys=1)  # type: ignore[arg-type]


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 50),
    st.integers(1, 6),
    st.booleans(),
    st.integers(0, 100),
)
def test_out_is_that_of_padding_with_zeros(branches, length, heads, is_causal, seed):
    lengths, rates = zip(*branches, strict=True)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, length, heads, 4, dtype=torch.float64, generator=generator)
    want, want_lse = torchscale_by_definition(q, k, v, lengths, rates, is_causal=is_causal)
    pattern = zero_pattern(lengths, rates)
    for out, lse in (
        dilated_attention(q, k, v, pattern, is_causal=is_causal, return_lse=True),
        reference_attention(q, k, v, pattern, is_causal=is_causal),
    ):
        assert relative_error(out, want) < FLOAT64
        assert_close_to(lse, want_lse, terms=64 * 64)


@settings(max_examples=60)
@given(cases())
def test_gradients_on_any_ranks_are_those_of_the_definition(case):
    """The reference's come from autograd through one softmax with the zero keys in it."""
    pattern = zero_pattern(case.pattern.segment_lengths, case.pattern.dilation_rates)
    case = type(case)(**{**vars(case), "pattern": pattern, "is_causal": False})
    ranks, wanted = case.layout.world_size, case.references()
    outcomes = run_loopback(ranks, lambda ends: [run_case(case, ends, wanted)])
    (outcome,) = combine(outcomes)
    assert outcome.passes(case.dtype), {x: outcome.error(x) for x in outcome.squares}


@settings(max_examples=200)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 6), st.data())
def test_random_plans_are_proven(pattern, layout, is_causal, heads, data):
    cuts = data.draw(st.lists(st.integers(1, layout.length), max_size=3))
    documents = data.draw(st.just(None) | st.just(sorted({0, *cuts, layout.length})))
    pattern = DilatedPattern(
        pattern.segment_lengths,
        pattern.dilation_rates,
        head_offsets=pattern.head_offsets,
        head_branches=pattern.head_branches,
        zero_keys=True,
    )
    plan = plan_attention(
        pattern, layout, is_causal=is_causal, num_heads=heads, documents=documents
    )
    check_plan(plan)


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


def test_plans_do_not_grow_with_the_number_of_segments():
    pattern = zero_pattern([1001, 5793, None], [2, 4, 65536])
    counts = []
    for length in (2**20 + 1, 2**30 + 1):
        plan = plan_attention(
            pattern, SequenceLayout.zigzag(length, 8), is_causal=False, num_heads=16
        )
        groups = plan.rank(3).zero_keys
        counts.append(sum(len(group.tiles) for group in groups))
    assert counts[1] <= counts[0] < 100


@pytest.mark.parametrize("num_kv_heads", [2, 4])
@pytest.mark.parametrize("positions", [range(0, 41), range(13, 30), range(40, 41)])
def test_replicated_queries_see_them(positions, num_kv_heads):
    torch.manual_seed(0)
    pattern = zero_pattern([7, 16, None], [2, 3, 4])
    query = torch.randn(2, 41, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 41, num_kv_heads, 8, dtype=torch.float64)
    layout = SequenceLayout.zigzag(41, 3)
    rows = slice(positions.start, positions.stop)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    want, want_lse = reference_attention(leaves[0], leaves[1], leaves[2], pattern)
    dout = torch.randn_like(want[:, rows])
    expected = torch.autograd.grad(want[:, rows], leaves, dout)

    def run(ends):
        shards = [layout.shard(x, ends.rank, 1) for x in (key, value)]
        own = [x.clone().requires_grad_() for x in (query[:, rows], *shards)]
        out, lse = replicated_query_attention(
            own[0],
            own[1],
            own[2],
            pattern,
            positions,
            group=ends,
            layout=layout,
            return_lse=True,
        )
        return out.detach(), lse, torch.autograd.grad(out, own, dout)

    ran = run_loopback(3, run)
    for out, lse, (dquery, _, _) in ran:
        assert relative_error(out, want[:, rows]) < FLOAT64
        assert_close_to(lse, want_lse[:, :, rows], terms=64 * 64)
        assert relative_error(dquery, expected[0][:, rows]) < FLOAT64
    for index in (1, 2):
        whole = layout.unshard([gradients[index] for _, _, gradients in ran], 1)
        assert relative_error(whole, expected[index]) < FLOAT64


def test_ranks_must_agree():
    layout = SequenceLayout.contiguous(12, 2)

    def run(ends):
        shard = torch.zeros(1, 6, 2, 4)
        pattern = DilatedPattern([5], [2], zero_keys=bool(ends.rank))
        with pytest.raises(
            ValueError, match=r"pattern is .* on rank 0, .*zero_keys=True on rank 1"
        ):
            dilated_attention(shard, shard, shard, pattern, group=ends, layout=layout)

    run_loopback(2, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision(dtype):
    """A large lse swallows zero keys, a very negative one is swallowed by them: neither is NaN."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 21, 2, 8).to(dtype)
    for scale in (0.3, 40.0, -40.0):
        out, lse = dilated_attention(
            query, key, value, zero_pattern([16], [2]), scale=scale, return_lse=True
        )
        want, want_lse = reference_attention(
            query.double(), key.double(), value.double(), zero_pattern([16], [2]), scale=scale
        )
        assert relative_error(out, want) < 2 * TOLERANCE[dtype]
        assert_close_to(lse, want_lse, terms=64)


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
