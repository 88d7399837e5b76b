"""The oracle itself, against loops that spell out the definition with Python's own arithmetic."""

import itertools
import math
from typing import Any

import pytest
import torch

from ring_dilated_attention import DilatedPattern, dilated_attention
from ring_dilated_attention.checks import key_counts, reference_attention


def loops(query, key, value, pattern, is_causal, documents):
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    out = torch.zeros_like(query)
    lse = torch.full((batch, heads, length), -math.inf, dtype=query.dtype)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        visible: list[list[int]] = [[] for _ in range(length)]
        for branch, (w, r) in enumerate(pattern.branches):
            offset = dict(pattern.heads(branch, kv_heads)).get(kv_head)
            for low, high in itertools.pairwise(documents):
                for start in range(low, high, w or high - low):
                    stop = min(start + (w or high - low), high)
                    cell = [] if offset is None else range(start + offset, stop, r)
                    for q in cell:
                        visible[q] += [k for k in cell if k <= q or not is_causal]
        for b in range(batch):
            for q, keys in enumerate(visible):
                if keys:
                    scores = [
                        float(query[b, q, head] @ key[b, k, kv_head]) / head_dim**0.5 for k in keys
                    ]
                    total = sum(map(math.exp, scores))
                    lse[b, head, q] = math.log(total)
                    for k, s in zip(keys, scores, strict=True):
                        out[b, q, head] += math.exp(s) / total * value[b, k, kv_head]
    return out, lse


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        DilatedPattern([4, 8, None], [1, 2, 3]),
        DilatedPattern([5, 3], [2, 7], head_offsets="blocked"),
        DilatedPattern([4, None], [1, 2], head_branches="split"),
        DilatedPattern([6, 6], [2, 2]),
    ],
)
def test_reference_is_the_definition(pattern, is_causal):
    torch.manual_seed(0)
    query = torch.randn(2, 13, 4, 3, dtype=torch.float64)
    key, value = torch.randn(2, 2, 13, 2, 3, dtype=torch.float64)
    for documents in ([0, 13], [0, 5, 6, 13]):
        out, lse = reference_attention(
            query, key, value, pattern, is_causal=is_causal, documents=documents
        )
        want_out, want_lse = loops(query, key, value, pattern, is_causal, documents)
        torch.testing.assert_close(out, want_out)
        torch.testing.assert_close(lse, want_lse)


def test_a_key_shown_by_two_branches_counts_twice():
    counts = key_counts(DilatedPattern([4, 8], [1, 2]), 8, 1)[0]
    assert counts[0, 0].tolist() == [2, 1, 2, 1, 1, 0, 1, 0]


def test_gradients_are_finite_where_nothing_is_visible():
    query, key, value = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64).requires_grad_().unbind(0)
    out, lse = reference_attention(query, key, value, DilatedPattern([3], [2]))
    assert torch.isneginf(lse[0, 0, 1])
    assert (out[0, 1, 0] == 0).all()
    gradients = torch.autograd.grad(out.sum() + out.square().sum(), (query, key, value))
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pattern": [4, 8]}, "pattern must be a DilatedPattern"),
        ({"query": torch.zeros(1, 6, 8)}, "query must have 4 dimensions"),
        ({"key": torch.zeros(1, 5, 2, 4)}, "the same local sequence length"),
        ({"documents": [0, 4]}, "documents must rise from 0 to the sequence length 6"),
        ({"documents": [1, 6]}, "documents must rise from 0"),
        ({"lengths": [7]}, r"lengths must lie in \[0, 6\]"),
        ({"lengths": [6, 6]}, "lengths must hold one number for each of 1 rows"),
        ({"branch_gradients": "exakt"}, "branch_gradients must be"),
        ({"is_causal": 1}, "is_causal must be a bool"),
        ({"head_slice": (0, 2)}, "head_slice must be"),
    ],
)
def test_reference_refuses_what_dilated_attention_refuses(given, message):
    query, key, value = (torch.zeros(1, 6, 2, 4) for _ in range(3))
    call = {
        "query": query,
        "key": key,
        "value": value,
        "pattern": DilatedPattern([4], [2]),
        **given,
    }
    for function in (reference_attention, dilated_attention):
        with pytest.raises((TypeError, ValueError), match=message):
            function(**call)


def test_zero_key_counts_by_hand():
    """n = 10 in segments of 7, rate 3: 3 rows a cell; positions 0-6 and 7-9, two heads."""
    pattern = DilatedPattern([7], [3], head_offsets="blocked", zero_keys=True)
    counts = key_counts(pattern, 10, 3)[1]
    expected = torch.zeros(3, 10, dtype=torch.int64)
    # Head 0 at offset 0 has 0 3 6 and 7: two zero keys in the tail. Heads 1 and 2: 1 4, 2 5.
    expected[0, 7] = expected[1, 8] = expected[2, 9] = 2
    expected[1, [1, 4]] = expected[2, [2, 5]] = 1
    assert torch.equal(counts, expected)
    assert not key_counts(pattern, 10, 3, is_causal=True)[1].any()
    # Segments are clamped to their document first: 4 of 7 positions are a whole segment.
    counts = key_counts(pattern, 8, 1, documents=[0, 4, 8])[1]
    assert not counts[0, [0, 3, 4, 7]].any()
    counts = key_counts(pattern, 9, 1, documents=[0, 0, 5, 9, 9])[1]  # two of length 0
    assert not counts.any()


def test_rows_with_lengths_are_calls_on_their_valid_positions():
    """Padding may be NaN: no valid position's out, lse or gradient has any of it."""
    pattern = DilatedPattern([4, None], [1, 3], zero_keys=True)
    lengths, documents = [11, 6, 0], [0, 5, 11]
    tensors = torch.randn(3, 3, 13, 2, 4, dtype=torch.float64)
    for row, length in enumerate(lengths):
        tensors[:, row, length:] = torch.nan
    leaves = [x.clone().requires_grad_() for x in tensors.unbind(0)]
    query, key, value = leaves
    packing: dict[str, Any] = {"documents": documents, "lengths": lengths}
    out, lse = reference_attention(query, key, value, pattern, **packing)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    for row, length in enumerate(lengths):
        assert not out[row, length:].any()
        assert torch.isneginf(lse[row, :, length:]).all()
        assert not any(g[row, length:].any() for g in gradients)
        if length:
            cut = [*(x for x in documents if x < length), length]
            own = [x.detach()[row : row + 1, :length].requires_grad_() for x in leaves]
            query, key, value = own
            want_out, want_lse = reference_attention(query, key, value, pattern, documents=cut)
            torch.testing.assert_close(out[row, :length], want_out[0])
            torch.testing.assert_close(lse[row, :, :length], want_lse[0])
            wanted = torch.autograd.grad(want_out.square().sum(), own)
            for got, want in zip(gradients, wanted, strict=True):
                torch.testing.assert_close(got[row, :length], want[0])
