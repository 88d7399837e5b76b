import torch
from support.tolerances import assert_close_to, rounding_bound

from ring_dilated_attention.engine import merge_


def softmax(scores, values):
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None]) @ values, lse


def test_merging_parts_is_the_softmax_of_the_whole():
    torch.manual_seed(0)
    scores, values = (
        torch.randn(2, 5, 12, dtype=torch.float64) * 30,
        torch.randn(2, 12, 3, dtype=torch.float64),
    )
    out = torch.zeros(2, 5, 3, dtype=torch.float64)
    lse = torch.full((2, 5), -torch.inf, dtype=torch.float64)
    for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
        merge_(out, lse, *softmax(scores[..., part], values[:, part]))
    want_out, want_lse = softmax(scores, values)
    # Scores are as large as 100, and rounded to as much more.
    assert_close_to(out, want_out, terms=12 * 100**2)
    assert_close_to(lse, want_lse, terms=12)


def test_nothing_merged_with_nothing_stays_nothing():
    out, lse = torch.zeros(3, 2), torch.full((3,), -torch.inf)
    merge_(out, lse, torch.ones(3, 2), torch.full((3,), -torch.inf))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_huge_scores_neither_overflow_nor_vanish():
    out, lse = torch.ones(4, 2), torch.tensor([1e4, -1e4, 1e4, -torch.inf])
    merge_(out, lse, torch.full((4, 2), 3.0), torch.tensor([-1e4, 1e4, 1e4, -1e4]))
    assert lse.tolist()[:2] == [1e4, 1e4]
    assert out[:, 0].tolist() == [1, 3, 2, 3]


def test_half_precision_tiles_are_merged_in_float32():
    out, lse = torch.zeros(1, 1), torch.full((1,), -torch.inf)
    for step in range(256):
        merge_(out, lse, torch.tensor([[float(step)]], dtype=torch.bfloat16), torch.zeros(1))
    assert out.dtype == torch.float32
    assert abs(out.item() / 127.5 - 1) < rounding_bound(torch.float32, 256)
