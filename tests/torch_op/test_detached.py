"""Branch weights without a gradient: the mix of torchscale."""

import random
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.on_ranks import on_ranks, out_and_gradients
from support.strategies import layouts
from support.tolerances import FLOAT64, assert_close_to
from support.torchscale_definition import torchscale_by_definition
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    detached_dilated_attention,
    dilated_attention,
)
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.engine import ring_forward
from ring_dilated_attention.nn import MultiheadDilatedAttention, keep_attention
from ring_dilated_attention.torch_op import operator

PATTERN = DilatedPattern([6, 11, None], [1, 2, 3], head_offsets="blocked", zero_keys=True)


def close(got, want, bound=FLOAT64):
    """Relative, or absolute where the gradient is 0 but for rounding."""
    return relative_error(got, want) < bound or (got - want).abs().max() < bound


def check(definition, layout, pattern, whole, dout, **options):
    """Compare out, gradients and lse on loopback ranks with those of a definition."""
    *want, want_lse = out_and_gradients(whole, dout, definition)
    *got, lse = on_ranks(layout, pattern, whole, dout, detached_dilated_attention, **options)
    assert all(map(close, got, want))
    assert_close_to(lse, want_lse, terms=64 * 64)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9)), min_size=1, max_size=4),
    layouts(max_length=40),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 100),
)
def test_on_any_ranks_it_is_the_definition(branches, layout, heads, is_causal, seed):
    lengths, rates = zip(*branches, strict=True)
    pattern = DilatedPattern(lengths, rates, head_offsets="blocked", zero_keys=True)
    generator = torch.Generator().manual_seed(seed)
    *whole, dout = torch.randn(
        4, 1, layout.length, heads, 4, dtype=torch.float64, generator=generator
    )
    definition = partial(torchscale_by_definition, segment_lengths=lengths, rates=rates)
    definition = partial(definition, is_causal=is_causal)
    check(definition, layout, pattern, whole, dout, is_causal=is_causal)


@pytest.mark.parametrize("seed", range(16))
def test_with_any_option_it_is_the_definition(seed):
    """Documents, padding, grouped heads, causal, layouts of several ranges: on 1 to 3 ranks."""
    dice = random.Random(seed)
    ranks, kv_heads, heads_per_kv = 1 + seed % 3, dice.choice([1, 2, 3]), dice.choice([1, 2])
    length = dice.randint(12, 30)
    cuts = [0, *sorted(dice.sample(range(1, length), 2 * ranks - 1)), length]
    ranges = list(pairwise(cuts))
    dice.shuffle(ranges)
    layout = SequenceLayout([ranges[i::ranks] for i in range(ranks)])
    count = dice.randint(2, 4)
    pattern = DilatedPattern(
        [dice.choice([None, 3, 7, 12]) for _ in range(count)],
        [dice.randint(1, 4) for _ in range(count)],
        head_offsets=dice.choice(["interleaved", "blocked"]),
        zero_keys=dice.random() < 0.5,
    )
    options: dict[str, Any] = {"is_causal": dice.random() < 0.5, "scale": dice.choice([None, 0.4])}
    if dice.random() < 0.5:
        options["documents"] = [0, dice.randint(1, length - 1), length]
    if dice.random() < 0.5:
        options["lengths"] = [dice.randint(0, length), length]
    torch.manual_seed(seed)
    heads = kv_heads, kv_heads * heads_per_kv
    q, dout = torch.randn(2, 2, length, heads[1], 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, length, heads[0], 4, dtype=torch.float64)
    reference = partial(reference_attention, pattern=pattern, branch_gradients="detached")
    check(partial(reference, **options), layout, pattern, (q, k, v), dout, **options)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (SequenceLayout.contiguous(16, 4), {"documents": [0, 4, 16]}),
        (SequenceLayout.contiguous(16, 4), {"lengths": [10]}),  # the last rank is padding
        (SequenceLayout([[], [(0, 8)], [(8, 16)]]), {}),
    ],
)
@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_a_rank_that_exchanges_nothing_goes_through_the_same_branches(layout, options, exchange):
    """Once it left the others waiting: they compute backward by branches, and it did not."""
    torch.manual_seed(0)
    *whole, dout = torch.randn(4, 1, 16, 2, 8, dtype=torch.float64)
    pattern = DilatedPattern([None, None], [1, 2])
    reference = partial(reference_attention, pattern=pattern, branch_gradients="detached")
    reference = partial(reference, **options)
    check(reference, layout, pattern, whole, dout, exchange=exchange, **options)


def test_forward_is_exact_and_backward_is_not():
    torch.manual_seed(0)
    whole = [x.requires_grad_() for x in torch.randn(3, 1, 40, 4, 8, dtype=torch.float64)]
    q, k, v = whole
    outs = [f(q, k, v, PATTERN) for f in (dilated_attention, detached_dilated_attention)]
    assert relative_error(outs[1], outs[0]) < FLOAT64
    exact, detached = (torch.autograd.grad(out.square().sum(), whole) for out in outs)
    assert relative_error(detached[0], exact[0]) > 0.01
    assert relative_error(detached[2], exact[2]) < FLOAT64  # dvalue is the same


@pytest.mark.parametrize(
    "pattern",
    [DilatedPattern([7], [3]), DilatedPattern([7, 9], [3, 2], head_branches="split")],
)
def test_where_nothing_is_mixed_it_is_the_exact_gradient(pattern):
    x = torch.randn(1, 20, 4, 8, requires_grad=True)
    outs = [f(x, x, x, pattern) for f in (detached_dilated_attention, dilated_attention)]
    got, want = (torch.autograd.grad(out.square().sum(), x)[0] for out in outs)
    assert torch.equal(got, want)


def test_keep_attention_computes_forward_once(monkeypatch):
    calls = []
    forward = ring_forward

    def count(*arguments):
        calls.append(1)
        return forward(*arguments)

    monkeypatch.setattr(operator, "ring_forward", count)
    torch.manual_seed(0)
    block = MultiheadDilatedAttention(
        32,
        4,
        segment_lengths=PATTERN.segment_lengths,
        dilation_rates=PATTERN.dilation_rates,
        head_offsets="blocked",
        zero_keys=True,
        branch_gradients="detached",
        dtype=torch.float64,
    )
    x = torch.randn(1, 23, 32, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(block(x, x, x)[0].square().sum(), [x, *block.parameters()])
    calls.clear()
    out, _ = checkpoint(block, x, x, x, use_reentrant=False, context_fn=keep_attention)
    gradients = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
    assert len(calls) == 1
    for got, want in zip(gradients, expected, strict=True):
        assert close(got, want)
