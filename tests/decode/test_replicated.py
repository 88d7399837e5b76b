"""A query that every rank holds, against the rows of the reference."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import cases
from support.tolerances import BITS_MAY_DIFFER, assert_close_to

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    dilated_attention,
    plan_attention,
    replicated_query_attention,
)
from ring_dilated_attention.checks import Case, reference_attention, relative_error, run_ranks
from ring_dilated_attention.exchange import resolve_exchange, run_loopback
from ring_dilated_attention.plan import cache

NAMES = ("out", "lse", "dquery", "dkey", "dvalue")


@st.composite
def positions_within(draw, length):
    start = draw(st.integers(0, length - 1))
    return range(start, draw(st.just(start + 1) | st.integers(start + 1, length)))


def test_plans_do_not_grow_with_the_number_of_segments():
    pattern = DilatedPattern([2048, 4096, None], [1, 2, 65536])
    counts = []
    for length in (2**20, 2**30):
        plan = plan_attention(pattern, SequenceLayout.zigzag(length, 8), is_causal=True)
        groups = cache.replicated_groups(plan, range(100, length - 100), 3)
        counts.append(sum(len(group.tiles) for group in groups))
    assert counts[0] == counts[1] < 40


def expected(case, positions, dtype=torch.float64):
    """The rows of the reference: the gradients are those of its rows `positions` alone."""
    *inputs, dout = (x.to(dtype) for x in case.inputs())
    rows = slice(positions.start, positions.stop)
    query, key, value = leaves = [x.clone().requires_grad_() for x in inputs]
    out, lse = reference_attention(query, key, value, case.pattern, is_causal=case.is_causal)
    dquery, dkey, dvalue = torch.autograd.grad(out[:, rows], leaves, dout[:, rows])
    results = out.detach()[:, rows], lse.detach()[:, :, rows], dquery[:, rows], dkey, dvalue
    return dict(zip(NAMES, results, strict=True))


def run_rank(case, positions, ends):
    """What one rank returns, by name, and the bytes that it sent forward and backward."""
    rows = slice(positions.start, positions.stop)
    query, key, value, dout = (x.to(case.dtype) for x in case.inputs())
    shards = (case.layout.shard(x, ends.rank, 1) for x in (key, value))
    leaves = [x.clone().requires_grad_() for x in (query[:, rows], *shards)]
    sent = [ends.sent_bytes]
    out, lse = replicated_query_attention(
        leaves[0],
        leaves[1],
        leaves[2],
        case.pattern,
        positions,
        is_causal=case.is_causal,
        group=ends,
        layout=case.layout,
        backend=case.backend,
        return_lse=True,
    )
    sent.append(ends.sent_bytes)
    gradients = torch.autograd.grad(out, leaves, dout[:, rows])
    sent.append(ends.sent_bytes)
    results = dict(zip(NAMES, (out.detach(), lse, *gradients), strict=True))
    return results, (sent[1] - sent[0], sent[2] - sent[1])


def check_ranks(case, positions, by_rank):
    want, plain = expected(case, positions), expected(case, positions, case.dtype)
    lse_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    first, _ = by_rank[0]
    p, m = case.layout.world_size, len(positions)
    wide = max(case.dtype.itemsize, 4)
    for results, sent in by_rank:
        for name in ("out", "lse", "dquery"):
            assert torch.equal(results[name], first[name]), f"{name} differs between ranks"
        # No key and no value: only results of the query's rows.
        numbers = (p - 1) * case.batch * m * case.num_heads
        assert sent == (numbers * (case.head_dim + 1) * wide, numbers * case.head_dim * wide)
    got = dict(first)
    for name in ("dkey", "dvalue"):
        got[name] = case.layout.unshard([results[name] for results, _ in by_rank], 1)
    uncovered = torch.isneginf(want["lse"])
    assert torch.equal(torch.isneginf(got["lse"]), uncovered)
    for name in ("out", "dquery"):
        assert (got[name].transpose(1, 2)[uncovered] == 0).all()
    for name in NAMES:
        assert got[name].shape == want[name].shape
        assert got[name].dtype == (lse_dtype if name == "lse" else case.dtype)
        # A gradient can be a small difference of large numbers: then as much as plain torch errs.
        # Without FMA, which MKL_CBWR may mean, twice as much.
        factor = 8.0 if BITS_MAY_DIFFER else 4.0
        assert_close_to(got[name], want[name], plain=plain[name], factor=factor, terms=64)


@settings(max_examples=120)
@given(cases(windows=False), st.data())
def test_any_case_equals_rows_of_the_reference(case, data):
    positions = data.draw(positions_within(case.layout.length))
    by_rank = run_loopback(case.layout.world_size, partial(run_rank, case, positions))
    check_ranks(case, positions, by_rank)


CASE = Case(
    pattern=DilatedPattern([8, 21, None], [1, 3, 4]),
    layout=SequenceLayout.zigzag(67, 3),
    num_heads=6,
    num_kv_heads=3,
    batch=2,
    is_causal=True,
)


def case_with(**changes):
    return Case(**{**CASE.__dict__, **changes})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("positions", [range(66, 67), range(5, 45)], ids=str)
def test_half_precision(positions, dtype):
    case = case_with(dtype=dtype, head_dim=16)
    check_ranks(case, positions, run_loopback(3, partial(run_rank, case, positions)))


def test_gradients_behind_the_decoding_kernels():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the kernels are not interpreted where there is a GPU")
    layout = SequenceLayout([[(40, 67), (3, 40), (0, 3)]])  # the interpreter takes one thread
    case = case_with(layout=layout, dtype=torch.float32, backend="triton", head_dim=16)
    positions = range(30, 42)
    check_ranks(case, positions, run_loopback(1, partial(run_rank, case, positions)))


PACKED: dict[str, dict[str, Any]] = {
    "documents": {"documents": (0, 5, 6, 40, 67)},
    "lengths": {"lengths": (67, 21, 0, 21, 50)},
    "both": {"documents": torch.tensor([0, 30, 67]), "lengths": torch.tensor([8, 67, 31, 30, 8])},
    "workspace": {"workspace": 0.01},
}


@pytest.mark.parametrize("zero_keys", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_documents_and_lengths_are_those_of_the_whole_sequence(
    packed, world_size, is_causal, zero_keys
):
    torch.manual_seed(0)
    pattern = DilatedPattern([8, 21, None], [1, 3, 4], zero_keys=zero_keys)
    layout, rows = SequenceLayout.zigzag(67, world_size), range(17, 58)
    query, dout = torch.randn(2, 5, 67, 4, 8, dtype=torch.float64)
    key, value = torch.randn(2, 5, 67, 2, 8, dtype=torch.float64)
    dout[:, : rows.start] = dout[:, rows.stop :] = 0

    def run(attend, *tensors, **options):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = attend(*leaves, is_causal=is_causal, return_lse=True, **packed, **options)
        gradients = torch.autograd.grad(out, leaves, dout[:, rows] if len(options) else dout)
        return [out.detach(), lse, *gradients]

    def rank(ends):
        shards = (layout.shard(x, ends.rank, 1) for x in (key, value))
        attend = partial(replicated_query_attention, pattern=pattern, positions=rows)
        return run(attend, query[:, rows], *shards, group=ends, layout=layout)

    want = run(partial(dilated_attention, pattern=pattern), query, key, value)
    want[0], want[1], want[2] = want[0][:, rows], want[1][:, :, rows], want[2][:, rows]
    by_rank = run_loopback(world_size, rank)
    for index, expected in enumerate(want):
        got = by_rank[0][index]
        if index > 2:
            got = layout.unshard([results[index] for results in by_rank], 1)
        hidden = torch.isneginf(expected)
        assert torch.equal(torch.isneginf(got), hidden)
        error = relative_error(got.masked_fill(hidden, 0), expected.masked_fill(hidden, 0))
        assert error < 1e-12, NAMES[index]


def _process(rank, world_size, case, positions):
    return run_rank(case, positions, resolve_exchange(torch.distributed.group.WORLD))


@pytest.mark.parametrize(("dtype", "is_causal"), [(torch.float64, False), (torch.bfloat16, True)])
def test_processes(dtype, is_causal):
    case = case_with(dtype=dtype, is_causal=is_causal)
    check_ranks(case, range(20, 50), run_ranks(_process, 3, case, range(20, 50)))


def test_strides_of_the_inputs_do_not_matter():
    torch.manual_seed(0)
    pattern = DilatedPattern([5, None], [2, 4])
    packed = torch.randn(2, 23, 4, 16, dtype=torch.float64)
    query = torch.randn(2, 8, 4, 9, dtype=torch.float64).permute(0, 3, 2, 1)  # head_dim not last
    key, value = packed.split(8, -1)
    key = key[:1].expand(2, -1, -1, -1)

    def run(*tensors):
        q, k, v = (x.detach().requires_grad_() for x in tensors)
        out = replicated_query_attention(q, k, v, pattern, range(9, 18), is_causal=True)
        assert out.is_contiguous()
        return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]

    got, want = run(query, key, value), run(*(x.contiguous() for x in (query, key, value)))
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-13


def test_only_the_gradients_asked_for():
    """Where the query needs none, backward has nothing to send, and a rank may skip it."""
    pattern, layout = DilatedPattern([3, None], [2, 1]), SequenceLayout.contiguous(6, 2)
    query, key = torch.randn(1, 2, 2, 8), torch.randn(1, 6, 2, 8)

    def rank(ends):
        keys = layout.shard(key, ends.rank, 1).clone().requires_grad_(ends.rank == 0)
        out = replicated_query_attention(query, keys, keys, pattern, range(2, 4), group=ends)
        sent = ends.sent_bytes
        if ends.rank == 0:
            out.sum().backward()
        assert ends.sent_bytes == sent
        return keys.grad

    first, second = run_loopback(2, rank)
    assert first.abs().sum() > 0
    assert second is None


def test_lse_is_outside_of_autograd_and_double_backward_refused():
    query = torch.randn(1, 4, 1, 8, requires_grad=True)
    out, lse = replicated_query_attention(
        query, query, query, DilatedPattern.dense(), range(4), return_lse=True
    )
    assert out.requires_grad
    assert not lse.requires_grad
    (gradient,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="replicated_query_attention cannot be differentiated"):
        gradient.sum().backward()


def test_compiled_functions_call_it_between_graphs_and_autocast_casts_as_for_sdpa():
    torch._dynamo.reset()
    query, key, value = (torch.randn(1, n, 2, 8) for n in (3, 20, 20))

    def function(query, key, value):
        pattern, positions = DilatedPattern.dense(), range(10, 13)
        return replicated_query_attention(query * 2, key, value, pattern, positions) * 3

    with torch.autocast("cpu", torch.bfloat16):
        found = torch.compile(function, backend="aot_eager")(query, key, value)
    assert torch.equal(found, function(*(x.bfloat16() for x in (query, key, value))))


def call(group=None, **changes):
    arguments = {
        "query": torch.randn(1, 3, 4, 8),
        "key": torch.randn(1, 6, 2, 8),
        "value": torch.randn(1, 6, 2, 8),
        "pattern": DilatedPattern([4], [2]),
        "positions": range(1, 4),
        "group": group,
        **changes,
    }
    names = ("query", "key", "value", "pattern", "positions")
    return replicated_query_attention(*[arguments.pop(name) for name in names], **arguments)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"query": [1.0]}, TypeError, "query must be a tensor, got type list"),
    ({"query": torch.randn(1, 3, 3, 8)}, ValueError, "heads must be a multiple of kv_heads"),
    ({"value": torch.randn(1, 5, 2, 8)}, ValueError, "key and value must have the same shape"),
    ({"pattern": [(4, 2)]}, TypeError, "pattern must be a DilatedPattern"),
    ({"pattern": DilatedPattern.window(3)}, ValueError, "slice the keys that a window holds"),
    ({"positions": [1, 2, 3]}, TypeError, "positions must be a range or an int, got [1, 2, 3]"),
    ({"positions": range(0, 6, 2)}, ValueError, "must be consecutive and rising"),
    ({"positions": range(100, 103)}, ValueError, "must lie in [0, "),
    (
        {"positions": 2},
        ValueError,
        "a range of step 1; got range(2, 3) for 3 rows",
    ),
    ({"documents": [0, 7]}, ValueError, "documents"),
    ({"lengths": [7, 7]}, ValueError, "lengths must hold one number for each of 1 rows"),
    ({"workspace": 0}, ValueError, "workspace must be > 0 and finite"),
    ({"layout": SequenceLayout.contiguous(6, 4)}, ValueError, "the layout is for 4 ranks"),
    ({"exchange": "ring"}, TypeError, "has no option 'exchange': keys stay where they are"),
    ({"causal": True}, TypeError, "has no option 'causal'; AttentionOptions has is_causal"),
    ({"backend": "flash"}, ValueError, "backend='flash' cannot compute this attention"),
    (
        {"key": torch.randn(1, 0, 2, 8), "value": torch.randn(1, 0, 2, 8)},
        ValueError,
        "length must be >= 1",
    ),
]
ONE_SHARD_OF_11 = SequenceLayout([[(0, 6)], [(6, 17)], [(17, 18)]])
DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"positions": range(2, 5)}, "positions is range(1, 4) on ranks 0, 2, range(2, 5) on rank 1"),
    ({"is_causal": True}, "is_causal is False on ranks 0, 2, True on rank 1"),
    ({"lengths": [5]}, "lengths is None on ranks 0, 2, (5,) on rank 1"),
    ({"pattern": DilatedPattern([4], [3])}, "pattern is (4, 2) on ranks 0, 2, (4, 3) on rank 1"),
    ({"layout": SequenceLayout.zigzag(18, 3)}, "layout is"),
    ({"query": torch.randn(1, 3, 4, 8, requires_grad=True)}, "query needs a gradient is False on"),
    ({"layout": ONE_SHARD_OF_11}, "11 positions, its key has a local sequence length of 6"),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [*BAD, *((c, ValueError, message) for c, message in DIFFERENCES)],
)
def test_a_bad_call_of_one_rank_is_an_error_on_all(changes, error, message):
    def rank(ends):
        call(ends)
        with pytest.raises(error if ends.rank == 1 else ValueError) as caught:
            call(ends, **(changes if ends.rank == 1 else {}))
        return str(caught.value)

    for text in run_loopback(3, rank):
        assert message in text, text
