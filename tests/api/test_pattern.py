import pytest
import torch

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.checks import key_counts


def offsets(pattern, branch, heads):
    return [tuple(h) for h in pattern.heads(branch, heads)]


def test_interleaved_offsets_are_head_modulo_rate():
    pattern = DilatedPattern([8, 8], [1, 3])
    assert offsets(pattern, 0, 4) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert offsets(pattern, 1, 5) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)]


def test_blocked_offsets_follow_torchscale():
    pattern = DilatedPattern([8], [3], head_offsets="blocked")
    assert offsets(pattern, 0, 7) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)]
    assert offsets(pattern, 0, 2) == [(0, 0), (1, 1)]


def test_split_heads_give_each_branch_a_group():
    pattern = DilatedPattern([4, 8, 16], [1, 2, 2], head_branches="split")
    assert offsets(pattern, 0, 8) == [(0, 0), (1, 0), (2, 0)]
    assert offsets(pattern, 1, 8) == [(3, 1), (4, 1), (5, 1)]
    assert offsets(pattern, 2, 8) == [(6, 0), (7, 0)]
    assert offsets(pattern, 2, 2) == []  # more branches than heads


def test_dense_is_one_branch_over_the_document():
    assert DilatedPattern.dense() == DilatedPattern([None], [1])
    assert hash(DilatedPattern.dense()) == hash(DilatedPattern([None], [1]))


def test_geometric_continues_the_series_until_a_segment_spans_the_sequence():
    paper = DilatedPattern([2048, 4096, 8192], [1, 2, 4], head_offsets="blocked", zero_keys=True)
    assert DilatedPattern.geometric(8192, head_offsets="blocked", zero_keys=True) == paper
    assert DilatedPattern.geometric(8193).segment_lengths[-1] == 16384
    assert DilatedPattern.geometric(27, 3, 3) == DilatedPattern([3, 9, 27], [1, 3, 9])
    assert DilatedPattern.geometric(5, first=8) == DilatedPattern([8], [1])  # dense


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 100])
@pytest.mark.parametrize(("first", "factor"), [(2, 2), (5, 5), (6, 3), (40, 2)])
def test_all_positions_of_a_geometric_pattern_influence_each_other(length, first, factor):
    pattern = DilatedPattern.geometric(length, first, factor)
    longest = pattern.segment_lengths[-1]
    assert longest >= length
    assert len(pattern.branches) == 1 or longest // factor < length
    for number, branch in enumerate(pattern.branches):
        for heads in (1, 3, 12):
            assert all(0 <= o < branch.dilation_rate for _, o in pattern.heads(number, heads))
    seen = key_counts(pattern, length, 1)[0][0].clamp(max=1).double()
    assert (torch.matrix_power(seen, 16) > 0).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "length must be >= 1, got 0"),
        ((8, 0), ValueError, "first must be >= 1, got 0"),
        ((8, 3, 2), ValueError, "first a multiple of factor; got first 3 and factor 2"),
        ((8, 2, 1), ValueError, "factor must be >= 2, or no segment would span"),
        ((8, 2, 1.5), TypeError, "factor must be an int, got 1.5"),
        ((2**63 - 1,), ValueError, r"a segment length must be below 2\*\*63"),
    ],
)
def test_bad_series_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        DilatedPattern.geometric(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([2, 4], [1]), ValueError, r"one value each per branch.*got 2 and 1 of them"),
        (([], []), ValueError, "at least one branch"),
        (([0], [1]), ValueError, "segment length must be >= 1, got 0"),
        (([4], [-2]), ValueError, "dilation rate must be >= 1, got -2"),
        (([4.0], [1]), TypeError, "segment length must be an int, got 4.0"),
        (([4], ["2"]), TypeError, "dilation rate must be an int, got '2'"),
        (([True], [1]), TypeError, "must be an int, got True"),
        (([4], [None]), TypeError, "must be an int, got None"),
        ((4, 1), TypeError, "segment_lengths must be a list"),
        (("[4]", "[1]"), TypeError, r"segment_lengths must be a list of ints.*got '\[4\]'"),
    ],
)
def test_bad_branches_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        DilatedPattern(*arguments)


def test_unknown_options_list_the_valid_ones():
    with pytest.raises(ValueError, match=r"head_offsets must be one of 'interleaved', 'blocked'"):
        DilatedPattern([4], [1], head_offsets="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"head_branches must be one of 'all', 'split'"):
        DilatedPattern([4], [1], head_branches="some")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must keep its default"):
        DilatedPattern([4], [1], head_offsets="blocked", head_branches="split")
