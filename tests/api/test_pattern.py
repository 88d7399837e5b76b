import pytest

from ring_dilated_attention import DilatedPattern


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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([2, 4], [1]), ValueError, r"one value each per branch.*got 2 and 1 of them"),
        (([], []), ValueError, "at least one branch"),
        (([0], [1]), ValueError, "segment length must be >= 1, got 0"),
        (([4], [-2]), ValueError, "dilation rate must be >= 1, got -2"),
        (([4.0], [1]), TypeError, "segment length must be an int, got 4.0; None is the whole"),
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
