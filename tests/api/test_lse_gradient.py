"""The gradient of lse: z-loss, and results that callers merge by hand."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.checks import reference_attention
from ring_dilated_attention.exchange import run_loopback

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 29, 4, 2, 8
PATTERNS = [
    DilatedPattern([7, None], [1, 3]),
    DilatedPattern([5, None], [2, 4], zero_keys=True, head_offsets="blocked"),
]


def tensors():
    generator = torch.Generator().manual_seed(0)

    def draw(heads):  # a view of a larger one
        shape = 2, LENGTH + 3, heads, HEAD_DIM
        return torch.randn(shape, generator=generator, dtype=torch.float64)[:, 2:-1]

    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


def loss(out, lse, weight):
    """Of out and lse; positions that no branch covers have lse -inf and count as 0."""
    z = torch.where(lse > -torch.inf, lse, 0.0).square()
    return (out * weight).sum() + 0.3 * z.sum()


def gradients(attend, whole, weight, **options):
    leaves = [x.clone().requires_grad_() for x in whole]
    out, lse = attend(*leaves, **options)
    return torch.autograd.grad(loss(out, lse, weight), leaves)


@pytest.mark.parametrize(
    ("pattern", "is_causal", "ranks"), [*product(PATTERNS, [False, True], [1, 2, 5])]
)
def test_gradient_of_lse_is_that_of_the_reference(pattern, is_causal, ranks):
    whole = tensors()
    options: Any = {"is_causal": is_causal, "documents": [0, 11, LENGTH]}
    weight = torch.randn(whole[0].shape, dtype=torch.float64)

    layout = SequenceLayout.zigzag(LENGTH, ranks)

    def one(ends):
        *mine, own = (layout.shard(x, ends.rank, dim=1) for x in (*whole, weight))
        attend = partial(dilated_attention, pattern=pattern, return_lse=True)
        return gradients(attend, mine, own, group=ends, layout=layout, **options)

    want = gradients(partial(reference_attention, pattern=pattern), whole, weight, **options)
    for parts, b in zip(zip(*run_loopback(ranks, one), strict=True), want, strict=True):
        a = layout.unshard(parts, dim=1)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_lse_alone_and_compiled():
    query, key, value = (x.requires_grad_() for x in map(torch.clone, tensors()))
    pattern, found = PATTERNS[0], []

    def attend(query, key, value):
        return dilated_attention(query, key, value, pattern, return_lse=True)[1].sum()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for function in (attend, compiled):
        found.append(torch.autograd.grad(function(query, key, value), (query, key, value)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert found[0][0].abs().max() > 0
    assert not found[0][2].any()


def test_merging_by_hand_is_one_softmax():
    """A dense call as its two halves, diagonal and below, merged by lse: gradients too."""
    query, key, value = (x.clone().requires_grad_() for x in tensors())
    half, pattern = slice(0, 14), DilatedPattern.dense()
    other = slice(14, 28)

    def attend(query, key, value, is_causal=False):
        return dilated_attention(query, key, value, pattern, is_causal=is_causal, return_lse=True)

    out_a, lse_a = attend(query[:, other], key[:, other], value[:, other], is_causal=True)
    out_b, lse_b = attend(query[:, other], key[:, half], value[:, half])
    lse = torch.logaddexp(lse_a, lse_b)
    weights = [(x - lse).exp().transpose(1, 2).unsqueeze(-1) for x in (lse_a, lse_b)]
    merged = out_a * weights[0] + out_b * weights[1]
    inputs = [x[:, :28] for x in (query, key, value)]
    want = attend(inputs[0], inputs[1], inputs[2], is_causal=True)[0][:, other]
    torch.testing.assert_close(merged, want)
    leaves, grad = (query, key, value), torch.randn_like(want)
    found = torch.autograd.grad(merged, leaves, grad)
    for a, b in zip(found, torch.autograd.grad(want, leaves, grad), strict=True):
        torch.testing.assert_close(a, b)


def test_lse_of_detached_branches_is_a_constant():
    query, key, value = (x.clone().requires_grad_() for x in tensors())
    options: Any = {"branch_gradients": "detached", "return_lse": True}
    out, lse = dilated_attention(query, key, value, PATTERNS[0], **options)
    assert out.requires_grad
    assert not lse.requires_grad
