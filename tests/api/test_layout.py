import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import layouts

from ring_dilated_attention import SequenceLayout


def test_contiguous_gives_the_first_ranks_one_more():
    assert SequenceLayout.contiguous(7, 3).ranges == (((0, 3),), ((3, 5),), ((5, 7),))


def test_zigzag_pairs_early_and_late_chunks():
    assert SequenceLayout.zigzag(8, 2).ranges == (((0, 2), (6, 8)), ((2, 6),))


def test_shards_begin_at_multiples():
    assert SequenceLayout.contiguous(37, 2, multiple=8).ranges == (((0, 24),), ((24, 37),))
    assert SequenceLayout.contiguous(9, 3, multiple=8).ranges == (((0, 8),), ((8, 9),), ())
    zigzag = SequenceLayout.zigzag(37, 2, multiple=4)
    assert zigzag.ranges == (((0, 12), (32, 37)), ((12, 32),))


@given(st.integers(1, 300), st.integers(1, 7), st.integers(1, 20))
def test_shards_differ_by_a_multiple_at_most(length, ranks, multiple):
    layout = SequenceLayout.contiguous(length, ranks, multiple=multiple)
    sizes = [layout.local_length(rank) for rank in range(ranks)]
    assert all(piece.start % multiple == 0 for piece in layout.pieces)
    assert max(sizes) - min(sizes) < 2 * multiple
    assert max(sizes) < length / ranks + multiple


def test_more_ranks_than_positions_leaves_some_empty():
    for layout in (SequenceLayout.contiguous(2, 5), SequenceLayout.zigzag(2, 5)):
        assert sorted(map(layout.local_length, range(5))) == [0, 0, 0, 1, 1]
        assert layout.positions(4).shape == (layout.local_length(4),)


@given(layouts())
def test_shard_and_unshard_are_inverse(layout):
    whole = torch.arange(2 * layout.length).view(2, layout.length)
    shards = [layout.shard(whole, rank, 1) for rank in range(layout.world_size)]
    assert torch.equal(layout.unshard(shards, 1), whole)
    for rank, shard in enumerate(shards):
        assert shard.shape[1] == layout.local_length(rank)
        assert torch.equal(shard[0], layout.positions(rank))


def test_layouts_compare_by_value():
    layout = SequenceLayout([[(0, 4)], [(4, 9)]])
    same = SequenceLayout([[(0, 2), (2, 4)], [(4, 4), (4, 9)]])
    assert layout == same
    assert hash(layout) == hash(same)
    assert layout.digest == same.digest
    assert layout != SequenceLayout.contiguous(8, 2)


@pytest.mark.parametrize(
    ("ranges", "error", "message"),
    [
        ([], ValueError, "at least one rank"),
        ([[], []], ValueError, "at least one position"),
        ([[(0, 4)], [(5, 9)]], ValueError, "positions 4 to 4 are missing"),
        ([[(0, 4)], [(3, 9)]], ValueError, "positions 3 to 3 are held twice"),
        ([[(4, 2)]], ValueError, r"start <= stop < 2\*\*63; rank 0: \(4, 2\)"),
        ([[(0, 2.0)]], TypeError, "pairs of ints.* got 0 and 2.0 for rank 0"),
        ([[(0, 2, 3)]], TypeError, "pairs of ints"),
        ([(0, 2), (2, 4)], TypeError, r"as in SequenceLayout\(\[\[.*; got 0 for rank 0"),
        ([2, 2], TypeError, r"\(start, stop\) pairs of ints, as in .*; got 2 for rank 0"),
    ],
)
def test_bad_ranges_are_refused(ranges, error, message):
    with pytest.raises(error, match=message):
        SequenceLayout(ranges)


def test_bad_sizes_are_refused():
    for make in (SequenceLayout.contiguous, SequenceLayout.zigzag):
        with pytest.raises(ValueError, match="length must be >= 1, got 0"):
            make(0, 2)
        with pytest.raises(ValueError, match="world_size must be >= 1, got 0"):
            make(4, 0)
        with pytest.raises(TypeError, match="length must be an int"):
            make(4.0, 2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="multiple must be >= 1, got 0"):
            make(4, 2, multiple=0)


def test_shard_checks_the_length():
    layout = SequenceLayout.contiguous(6, 2)
    with pytest.raises(ValueError, match=r"6 positions; got shape \(2, 5\)"):
        layout.shard(torch.zeros(2, 5), 0, 1)
    with pytest.raises(ValueError, match="one shard per rank, 2; got 1"):
        layout.unshard([torch.zeros(3)], 0)
    with pytest.raises(ValueError, match="rank 1 must have 3 positions"):
        layout.unshard([torch.zeros(3), torch.zeros(2)], 0)
