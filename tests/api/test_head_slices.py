"""Calls of some of a layer's heads: they are those heads of the call that has all of them."""

# Arguments of wrong types are what is tested.
# mypy: disable-error-code="arg-type, call-arg, call-overload"

import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.on_ranks import on_ranks, out_and_gradients
from support.strategies import patterns
from support.tolerances import FLOAT64

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    HeadSlice,
    SequenceLayout,
    cached_attention,
    dilated_attention,
    plan_attention,
    replicated_query_attention,
)
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.nn import DilatedAttention
from ring_dilated_attention.plan import check_plan

INTERLEAVED = DilatedPattern([8, 19, None], [1, 2, 3])
EVERY_OPTION = {
    "interleaved": INTERLEAVED,
    "blocked": DilatedPattern([8, 19, None], [1, 2, 3], head_offsets="blocked"),
    "split": DilatedPattern([8, 19, None], [1, 2, 3], head_branches="split"),
    "no rate of 1": DilatedPattern([5, 13], [2, 4]),
    "zero keys": DilatedPattern([9, 16], [2, 4], head_offsets="blocked", zero_keys=True),
}
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 41, 10, 5, 8
SLICES = [(0, 2, KV_HEADS), (2, 3, KV_HEADS), (3, 5, KV_HEADS)]
UNEVEN = SequenceLayout([[(30, 41), (0, 3)], [(3, 4)], [(4, 30)]])


@settings(max_examples=300)
@given(patterns(), st.integers(1, 12), st.data())
def test_heads_of_a_slice_are_those_of_the_layer(pattern, total, data):
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    own = pattern.of_heads((start, stop, total), stop - start)
    for branch in range(len(pattern.branches)):
        every = pattern.heads(branch, total)
        wanted = [(head - start, offset) for head, offset in every if start <= head < stop]
        assert [*own.heads(branch, stop - start)] == wanted


@settings(max_examples=200)
@given(patterns(), st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_plans_of_a_slice_are_proven(pattern, heads, before, is_causal):
    plan = plan_attention(
        pattern,
        SequenceLayout.zigzag(47, 3),
        is_causal=is_causal,
        num_heads=heads,
        head_slice=(before, before + heads, before + heads + 2),
    )
    check_plan(plan)


def whole(pattern, **options):
    """Inputs of all heads, the gradient of out; out, gradients and lse by brute force."""
    torch.manual_seed(0)
    query, dout = torch.randn(2, 2, LENGTH, HEADS, HEAD_DIM, dtype=torch.float64)
    inputs = [query, *torch.randn(2, 2, LENGTH, KV_HEADS, HEAD_DIM, dtype=torch.float64)]
    attend = partial(reference_attention, pattern=pattern, **options)
    return inputs, dout, out_and_gradients(inputs, dout, attend)


def heads_of(tensor, head_slice):
    """Those of a slice."""
    start, stop, total = head_slice
    each = tensor.shape[2] // total
    return tensor[:, :, start * each : stop * each]


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "not causal": {},
    "documents": {"documents": [0, 11, 12, LENGTH], "is_causal": True},
    "lengths": {"lengths": [LENGTH, 17]},
    "detached": {"branch_gradients": "detached", "is_causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("pattern", EVERY_OPTION.values(), ids=EVERY_OPTION)
def test_slices_are_the_heads_of_the_whole(pattern, options):
    inputs, dout, wanted = whole(pattern, **options)
    for head_slice in SLICES:
        *own, own_dout = (heads_of(x, head_slice) for x in (*inputs, dout))
        got = on_ranks(UNEVEN, pattern, own, own_dout, head_slice=head_slice, **options)
        for mine, theirs in zip(got, wanted, strict=True):
            theirs = heads_of(theirs, head_slice)
            torch.testing.assert_close(mine, theirs, rtol=FLOAT64, atol=FLOAT64)


@pytest.mark.parametrize("pattern", EVERY_OPTION.values(), ids=EVERY_OPTION)
def test_replicated_queries_and_caches(pattern):
    inputs, _, (wanted, *_) = whole(pattern, is_causal=True)
    layout, before = SequenceLayout.zigzag(LENGTH - 6, 2), LENGTH - 6
    for head_slice in SLICES:
        query, key, value = (heads_of(x, head_slice) for x in inputs)

        def rank(ends, query=query, key=key, value=value, head_slice=head_slice):
            ends_layout = SequenceLayout.contiguous(LENGTH, 2)
            keys = [ends_layout.shard(x, ends.rank, 1) for x in (key, value)]
            rows = replicated_query_attention(
                query[:, 9:14], keys[0], keys[1], pattern, range(9, 14), is_causal=True, group=ends,
                layout=ends_layout, head_slice=head_slice,
            )  # fmt: skip
            cache = DilatedKVCache(
                pattern, 2, key.shape[2], HEAD_DIM, max_length=LENGTH, dtype=torch.float64,
                group=ends, sharded=True, head_slice=head_slice,
            )  # fmt: skip
            prompt = [layout.shard(x[:, :before], ends.rank, 1) for x in (key, value)]
            cache.prefill(*prompt, layout=layout)
            new = [
                cached_attention(*(x[:, at : at + 1] for x in (query, key, value)), cache)
                for at in range(before, LENGTH)
            ]
            return rows, torch.cat(new, 1)

        for rows, new in run_loopback(2, rank):
            assert relative_error(rows, heads_of(wanted, head_slice)[:, 9:14]) < FLOAT64
            assert relative_error(new, heads_of(wanted, head_slice)[:, before:]) < FLOAT64


def test_a_module_of_some_heads_and_compile():
    inputs, _, (wanted, *_) = whole(INTERLEAVED)
    head_slice = SLICES[1]
    own = [heads_of(x, head_slice) for x in inputs]
    module = DilatedAttention(INTERLEAVED, head_slice=head_slice)
    assert relative_error(module(*own), heads_of(wanted, head_slice)) < FLOAT64
    assert "head_slice=(2, 3, 5)" in repr(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert relative_error(compiled(*own), heads_of(wanted, head_slice)) < FLOAT64


def test_slices_that_make_no_difference():
    """All heads, or a pattern that is the same for each: nothing is planned anew for a slice."""
    assert INTERLEAVED.of_heads((0, 4, 4), 4) is INTERLEAVED
    assert DilatedPattern.dense().of_heads((2, 4, 8), 2) == DilatedPattern.dense()
    own = INTERLEAVED.of_heads((2, 4, 8), 2)
    assert own.head_slice == HeadSlice(2, 4, 8)
    assert own.of_heads((2, 4, 8), 2) == own.of_heads(None, 2) == own
    assert [one.head_slice for one in own.single_branches()] == [own.head_slice] * 3
    assert str(own).endswith("head_slice=(2, 4, 8)")


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (2, TypeError, "head_slice must be (start, stop, total), KV heads start to stop"),
    "two numbers": ((0, 2), TypeError, "got type tuple of length 2"),
    "a float": ((0, 2.0, 4), TypeError, "head_slice must be an int, got 2.0"),
    "none of them": ((2, 2, 4), ValueError, "0 <= start < stop <= total; got (2, 2, 4)"),
    "beyond": ((3, 5, 4), ValueError, "got (3, 5, 4)"),
    "other heads": (
        (0, 3, 4),
        ValueError,
        "head_slice (0, 3, 4) names 3 of 4 KV heads; the call has 2",
    ),
}


@pytest.mark.parametrize(("value", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(value, error, message):
    tensors = torch.randn(3, 1, 5, 2, 8).unbind(0)
    key, held = tensors[1], SequenceLayout.contiguous(5, 1)
    calls = [
        lambda: dilated_attention(*tensors, INTERLEAVED, head_slice=value),
        lambda: replicated_query_attention(
            key, key, key, INTERLEAVED, range(5), layout=held, head_slice=value
        ),
        lambda: plan_attention(INTERLEAVED, held, is_causal=True, num_heads=2, head_slice=value),
        lambda: DilatedKVCache(INTERLEAVED, 1, 2, 8, max_length=9, head_slice=value),
        lambda: DilatedAttention(INTERLEAVED, head_slice=value)(*tensors),
    ]
    for call in calls:
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_a_pattern_of_other_heads():
    tensors = torch.randn(3, 1, 5, 2, 8).unbind(0)
    own = INTERLEAVED.of_heads((2, 5, 8), 3)
    with pytest.raises(ValueError, match=r"is for 3 KV heads \(head_slice \(2, 5, 8\)\); the call"):
        dilated_attention(*tensors, own)
    with pytest.raises(ValueError, match="the pattern is for head_slice"):
        dilated_attention(*tensors, own, head_slice=(2, 4, 8))


def test_ranks_of_a_group_have_the_same_heads():
    def rank(ends):
        tensors = torch.randn(3, 1, 5, 2, 8).unbind(0)
        first = 2 * (ends.rank == 1)
        with pytest.raises(ValueError, match=r"head_slice=\(2, 4, 4\) on rank 1"):
            dilated_attention(*tensors, INTERLEAVED, group=ends, head_slice=(first, first + 2, 4))

    run_loopback(3, rank)
