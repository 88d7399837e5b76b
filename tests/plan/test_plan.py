import os
import random
import subprocess
import sys
from bisect import bisect_right
from dataclasses import replace
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted_calls import count_calls
from support.strategies import layouts, patterns

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.plan import (
    RankPlan,
    Step,
    Tile,
    TileGroup,
    check_plan,
    costs,
    tiling,
)
from ring_dilated_attention.plan.check import PlanError
from ring_dilated_attention.plan.crossings import crossings_of
from ring_dilated_attention.plan.parts import cut_into_pieces, own_runs, parts_of

LONGNET = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])


@settings(max_examples=400)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 6), st.data())
def test_random_plans_are_proven(pattern, layout, is_causal, heads, data):
    cuts = data.draw(st.lists(st.integers(1, layout.length), max_size=4))
    documents = data.draw(st.just(None) | st.just(sorted({0, *cuts, layout.length})))
    plan = plan_attention(
        pattern, layout, is_causal=is_causal, num_heads=heads, documents=documents
    )
    check_plan(replace(plan, pieces=data.draw(st.sampled_from([1, layout_ranges(layout)]))))


@settings(max_examples=400)
@given(patterns(), st.integers(1, 3), st.lists(st.integers(0, 4), max_size=12), st.data())
def test_ranks_that_are_nearly_alike(pattern, size, owners, data):
    """Five ranks hold chunks of one size: many of them exchange alike messages, and some do not."""
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(5)]
    for chunk in data.draw(st.permutations(range(len(owners) + 1))):
        owner = [*owners, 0][chunk]
        ranges[owner].append((chunk * size, chunk * size + size))
    layout = SequenceLayout(ranges)
    border = data.draw(st.integers(1, layout.length))
    plan = plan_attention(
        pattern,
        layout,
        is_causal=data.draw(st.booleans()),
        num_heads=2,
        documents=sorted({0, border, layout.length}),
    )
    check_plan(replace(plan, pieces=data.draw(st.integers(1, 3))))


@settings(max_examples=200)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 6), st.booleans())
def test_additions_are_not_more_than_the_plan_says(pattern, layout, is_causal, heads, in_pieces):
    plan = plan_attention(pattern, layout, is_causal=is_causal, num_heads=heads)
    plan = replace(plan, pieces=layout_ranges(layout) if in_pieces else 1)
    for rank in map(plan.rank, range(layout.world_size)):
        tiles = [*rank.local, *(tile for step in rank.steps() for tile in step.tiles)]
        # A cell has a row more than its share where the rate does not divide it.
        additions = sum(t.segments * len(t.heads) * (t.queries.length - 1) for t in tiles)
        assert additions <= rank.mean_additions * layout.local_length(rank.index) * heads


def test_a_piece_that_a_segment_does_not_reach():
    """Of rank 1's rows 5 to 10 the first piece ends at 9: the segment from 9 on is not in it."""
    layout = SequenceLayout([[(0, 5), (22, 26)], [(5, 10), (18, 22)], [(10, 18)]])
    plan = plan_attention(DilatedPattern([3], [1]), layout, is_causal=False)
    check_plan(replace(plan, pieces=2))


def layout_ranges(layout: SequenceLayout) -> int:
    """The most ranges of a rank."""
    return max(map(len, layout.ranges))


def _plan(**changes):
    plan = plan_attention(
        DilatedPattern([5, None], [1, 3]),
        SequenceLayout.zigzag(29, 3),
        is_causal=True,
        num_heads=3,
    )
    return replace(plan, **changes)


def _broken(plan, change):
    rank = plan.rank(1)
    change(rank)
    return plan


def _one_group(*tiles: Tile) -> tuple[TileGroup, ...]:
    return (TileGroup(tiles),)


def _apart(*tiles: Tile) -> tuple[TileGroup, ...]:
    return tuple(TileGroup((tile,)) for tile in tiles)


def _drop_local_tile(rank: RankPlan) -> None:
    rank.local_groups = _apart(*rank.local[1:])


def _double_local_tile(rank: RankPlan) -> None:
    rank.local_groups = _apart(*rank.local, rank.local[0])


def _forget_causality(rank: RankPlan) -> None:
    rank.local_groups = _apart(*(tile._replace(is_causal=False) for tile in rank.local))


def _group_tiles_that_share_rows(rank: RankPlan) -> None:
    rank.local_groups = _one_group(*rank.local)


def _cover_too_early(rank: RankPlan) -> None:
    rank.local_groups = rank.local_groups[::-1]


def _replace_step(rank: RankPlan, changed: Step) -> None:
    """Have a rank take another first step."""
    make = rank.step
    vars(rank)["step"] = lambda step, piece=0: (
        changed if (step, piece) == (1, 0) else make(step, piece)
    )


def _send_nothing(rank: RankPlan) -> None:
    _replace_step(rank, rank.step(1)._replace(send=None))


def _read_wrong_slot(rank: RankPlan) -> None:
    step = rank.step(1)
    keys = step.tiles[0].keys
    tile = step.tiles[0]._replace(keys=keys._replace(start=keys.start + 1))
    _replace_step(rank, step._replace(groups=_apart(tile, *step.tiles[1:])))


def _send_a_row_nobody_needs(rank: RankPlan) -> None:
    step = rank.step(1)
    _replace_step(rank, step._replace(groups=_apart(*step.tiles[1:])))


@pytest.mark.parametrize(
    "change",
    [
        _drop_local_tile,
        _double_local_tile,
        _forget_causality,
        _group_tiles_that_share_rows,
        _cover_too_early,
        _send_nothing,
        _read_wrong_slot,
        _send_a_row_nobody_needs,
    ],
)
def test_the_checker_finds_a_broken_plan(change):
    check_plan(_plan())
    with pytest.raises((PlanError, IndexError)):
        check_plan(_broken(_plan(), change))


def test_segments_inside_one_rank_cost_no_communication():
    layout = SequenceLayout.contiguous(64, 4)
    plan = plan_attention(DilatedPattern([4, 8, 16], [1, 2, 4]), layout, is_causal=False)
    for rank in range(4):
        assert plan.rank(rank).total_received_rows == plan.rank(rank).total_sent_rows == 0
        assert all(step.send is None for step in plan.rank(rank).steps())


def test_a_row_that_two_branches_need_is_sent_once():
    layout = SequenceLayout.contiguous(32, 2)
    plan = plan_attention(DilatedPattern([None, None], [2, 4]), layout, is_causal=False)
    message = plan.rank(0).step(1).receive
    assert message is not None
    assert (message.rows, message.slots) == (8, 12)


def test_heads_that_repeat_offsets_are_packed_together():
    """Six heads of each offset are one pass over the rows, not one for each pair of heads."""
    layout = SequenceLayout.contiguous(64, 2)
    plan = plan_attention(DilatedPattern([64], [2]), layout, is_causal=False, num_heads=12)
    message = plan.rank(0).step(1).send
    assert message is not None
    assert [list(run.heads) for run in message.runs] == [[*range(0, 12, 2)], [*range(1, 12, 2)]]


def test_plan_size_does_not_grow_with_the_number_of_segments():
    sizes = [
        len(
            plan_attention(DilatedPattern(*LONGNET), layout, is_causal=True, num_heads=12)
            .rank(1)
            .local
        )
        for layout in (SequenceLayout.contiguous(2**k, 4) for k in (20, 30))
    ]
    assert sizes[0] == sizes[1]


def received_rows(layout, rate):
    """Rows that one of 4,096 ranks receives."""
    lengths, rates = LONGNET
    pattern = DilatedPattern([*lengths, None], [*rates, rate])
    plan = plan_attention(pattern, layout, is_causal=True, num_heads=12)
    return plan.rank(2047).total_received_rows


@pytest.mark.slow
@pytest.mark.parametrize("make", [SequenceLayout.contiguous, SequenceLayout.zigzag])
@pytest.mark.parametrize("rate", [1, 2**15])
def test_a_plan_of_a_billion_tokens_on_4096_ranks_is_little_work(make, rate):
    """Some 50 function calls for each other rank: less than 100 ms."""
    calls, rows = count_calls(received_rows, make(2**30, 4096), rate)
    assert rows > 0
    assert calls < 75 * 4096


def planned_steps(layout, rates, lengths):
    """Steps of one of 4,096 ranks, all heads at once and then as a ring runs them."""
    plan = plan_attention(
        DilatedPattern(lengths, rates), layout, is_causal=True, num_heads=12, num_kv_heads=3
    )
    rounds = plan.rank(2047).rounds(gathers=plan.gathers)
    return sum(sum(1 for _ in one.steps()) for one in rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "rates", "runs"),
    [([*LONGNET[0], None], [*LONGNET[1], 2**16], 1), ([None], [1], 2 * 3)],
    ids=["LongNet", "dense"],
)
def test_all_steps_of_one_of_4096_ranks_are_little_work(lengths, rates, runs):
    """Of 4,095 steps few differ: 40 ms, and another 30 ms for each further run of the ring."""
    layout = SequenceLayout.zigzag(2**30, 4096)
    calls, steps = count_calls(planned_steps, layout, rates, lengths)
    assert steps == 4095 * runs
    assert calls < (50 + 25 * runs) * 4096


def test_plans_of_heads_share_what_crosses_ranks():
    """And whoever changes one of them gets a plan that shares nothing with it."""
    plan = plan_attention(
        DilatedPattern.dense(), SequenceLayout.zigzag(64, 4), is_causal=True, num_heads=4
    )
    one, other = plan.narrowed(range(1)), plan.narrowed(range(1, 3))
    assert crossings_of(one, 2) is crossings_of(other, 2) is crossings_of(plan, 2)
    changed = replace(one, pieces=2)
    assert crossings_of(changed, 2) is not crossings_of(plan, 2)
    assert len(list(changed.rank(2).steps())) == 2 * 3


def test_a_branch_that_covers_the_heads_of_a_plan_comes_first():
    """Branch 1 has every row of head 1, which runs no other."""
    pattern = DilatedPattern([30, 30], [2, 1], head_branches="split")
    layout = SequenceLayout.contiguous(60, 4)
    plan = plan_attention(pattern, layout, is_causal=False, num_heads=2)
    assert [span.branch for span in crossings_of(plan, 1).seen] == [0, 1]
    assert [span.branch for span in crossings_of(plan.narrowed(range(1, 2)), 1).seen] == [1, 0]


@pytest.mark.parametrize(
    "ranges",
    [
        # Rank 3 has its ranges in the opposite order.
        [[(12, 14)], [(2, 4), (8, 10)], [(0, 2), (4, 6)], [(10, 12), (6, 8)]],
        # A border of documents at 149 is in the range of rank 1, and between those of rank 2.
        [[(0, 51), (251, 300)], [(100, 200)], [(51, 100), (200, 251)]],
    ],
    ids=["order", "documents"],
)
def test_ranks_whose_rows_lie_alike_are_not_taken_for_each_other(ranges):
    layout = SequenceLayout(ranges)
    documents = [0, 149, 300] if layout.length > 149 else None
    plan = plan_attention(DilatedPattern.dense(), layout, is_causal=False, documents=documents)
    for pieces in (1, 2):
        check_plan(replace(plan, pieces=pieces))


def test_many_ranges_take_few_groups():
    """About as many as there are ranges, not as pairs of them; a group is one launch."""
    count = 12
    bounds = [(i * 10, i * 10 + 10) for i in range(2 * count)]
    shuffled = [bounds[i * 7 % (2 * count)] for i in range(2 * count)]
    layout = SequenceLayout([shuffled[::2], shuffled[1::2]])
    plan = plan_attention(DilatedPattern([None, None], [1, 3]), layout, is_causal=False)
    check_plan(plan)
    for rank in (plan.rank(0), plan.rank(1)):
        (step,) = rank.steps()
        for groups in (rank.local_groups, step.groups):
            assert sum(len(group.tiles) for group in groups) > 100
            assert len(groups) <= 3 * count  # 144 pairs in each of two branches


def test_zigzag_balances_causal_work():
    size = costs.TensorSize(batch=1, head_dim=4, element_size=4)
    imbalance = {}
    for make in (SequenceLayout.zigzag, SequenceLayout.contiguous):
        plan = plan_attention(DilatedPattern.dense(), make(1024, 4), is_causal=True)
        work = [costs.flops(plan.rank(rank), size) for rank in range(4)]
        assert sum(work) == 4 * 4 * 1024 * 1025 // 2
        imbalance[make.__name__] = max(work) / (sum(work) / 4)
    assert imbalance["zigzag"] < 1.01
    assert imbalance["contiguous"] > 1.7


def test_balance_step_by_step():
    """Contiguous causal ranks compute half a square, then at step s a whole one from rank s on."""

    def found(make):
        layout = make(4 * 1024, 4)
        plan = plan_attention(DilatedPattern.dense(), layout, is_causal=True, num_heads=2)
        return costs.step_imbalance(plan)

    assert found(SequenceLayout.contiguous) == pytest.approx(3.5 / 2, rel=1e-3)
    assert found(SequenceLayout.zigzag) == pytest.approx(1, rel=1e-3)


def test_costs_in_bytes():
    plan = plan_attention(
        DilatedPattern([None], [4]), SequenceLayout.contiguous(64, 2), is_causal=False, num_heads=4
    )
    size = costs.TensorSize(batch=2, head_dim=8, element_size=2)
    rank = plan.rank(0)
    rows = 8 * 4
    assert costs.traffic(rank, size).forward_sent == 2 * 2 * rows * 8 * 2
    assert costs.traffic(rank, size).backward_sent == 2 * 2 * rows * 8 * (2 + 2)
    held = costs.memory(rank, size)
    assert held.query == held.key == held.value == held.out == 2 * 32 * 4 * 8 * 2
    assert held.lse == 2 * 32 * 4 * 4
    assert held.buffers == costs.traffic(rank, size).forward_received
    assert held.total == 4 * held.query + held.lse + held.buffers


@pytest.mark.parametrize(("num_heads", "itemsize"), [(4, 2), (5, 4)])  # 2 parts x 4 or 5 members
def test_gradients_are_returned_wide_where_many_tiles_add(num_heads, itemsize):
    plan = plan_attention(
        DilatedPattern.dense(),
        SequenceLayout.zigzag(64, 2),
        is_causal=False,
        num_heads=num_heads,
        num_kv_heads=1,
    )
    assert plan.returns_wide == (itemsize == 4)
    size = costs.TensorSize(batch=1, head_dim=8, element_size=2)
    assert costs.traffic(plan.rank(0), size).backward_sent == 2 * 32 * 8 * (2 + itemsize)


def test_ring_buffers_are_two_messages():
    plan = plan_attention(DilatedPattern.dense(), SequenceLayout.contiguous(70, 7), is_causal=False)
    size = costs.TensorSize(batch=1, head_dim=1, element_size=4)
    assert costs.memory(plan.rank(3), size, gathers=False).buffers == 2 * 10 * 2 * 4
    assert costs.memory(plan.rank(3), size, gathers=True).buffers == 6 * 10 * 2 * 4
    alone = plan_attention(plan.pattern, SequenceLayout.contiguous(40, 1), is_causal=False)
    assert costs.memory(alone.rank(0), size, gathers=False).buffers == 0


def test_messages_of_the_first_and_the_last_step_are_not_held_together():
    """Of its two neighbours a rank receives at the first step and at the last."""
    layout = SequenceLayout([[pair] for pair in pairwise([0, 4, 12, 20, 28, 32])])
    plan = plan_attention(DilatedPattern([8], [1]), layout, is_causal=False)
    size = costs.TensorSize(batch=1, head_dim=1, element_size=4)
    received = [plan.rank(2).received_rows(rank) for rank in (1, 0, 4, 3)]
    assert received == [4, 0, 0, 4]
    assert costs.memory(plan.rank(2), size, gathers=False).buffers == 4 * 2 * 4
    assert costs.memory(plan.rank(2), size, gathers=True).buffers == 8 * 2 * 4


def test_auto_gathers_little_and_rings_much():
    layout = SequenceLayout.contiguous(4096, 4)
    assert not plan_attention(DilatedPattern.dense(), layout, is_causal=False).gathers
    assert plan_attention(DilatedPattern([64, None], [1, 16]), layout, is_causal=False).gathers


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "gathers"), [(8, 4, True), (8, 5, False), (16, 4, False)]
)
def test_auto_gathers_the_few_rows_of_grouped_queries(kv_heads, ranks, gathers):
    """A quarter as many KV heads: all keys and values on 4 ranks are as large as query and out."""
    layout = SequenceLayout.contiguous(1000 * ranks, ranks)
    given = {"is_causal": True, "num_heads": 32, "num_kv_heads": kv_heads}
    assert plan_attention(DilatedPattern.dense(), layout, **given).gathers == gathers


@settings(max_examples=300)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 4), st.data())
def test_who_gathers_receives_no_more_than_the_largest_shard(pattern, layout, causal, heads, data):
    cuts = data.draw(st.lists(st.integers(1, layout.length), max_size=2))
    documents = sorted({0, *cuts, layout.length})
    plan = plan_attention(pattern, layout, is_causal=causal, num_heads=heads, documents=documents)
    if plan.gathers:
        for rank in map(plan.rank, range(layout.world_size)):
            assert rank.total_received_rows <= layout.max_local_length * heads


def test_a_rank_between_two_segments_receives_rows_of_both():
    """Each of them has as many rows as its shard; it holds 4 of both together."""
    borders = [0, *range(8, 128, 16), 128]
    layout = SequenceLayout([[pair] for pair in pairwise(borders)])
    plan = plan_attention(DilatedPattern([64], [4]), layout, is_causal=False)
    assert plan.rank(4).total_received_rows == 2 * 16 - 4 > layout.max_local_length
    assert not plan.gathers
    # The second of two segments may be short.
    shorter = SequenceLayout([[pair] for pair in pairwise([*borders[:-1], 127])])
    plan = plan_attention(DilatedPattern([64], [4]), shorter, is_causal=False)
    assert plan.rank(4).total_received_rows > shorter.max_local_length
    assert not plan.gathers
    # Of half as many rows, two segments are as many as a shard has.
    assert plan_attention(DilatedPattern([64], [8]), layout, is_causal=False).gathers


@pytest.mark.parametrize(
    ("ends", "borders"),
    [
        ([45, 100], (0, 45, 100)),  # a sixteenth of all rows from the middle, or less
        ([56, 100], (0, 56, 100)),
        ([43, 100], (0, 50, 100)),  # further away
        ([40, 100], (0, 50, 100)),
    ],
)
def test_a_piece_ends_with_a_range_that_ends_close_by(ends, borders):
    ranges = list(pairwise([0, *ends]))
    assert cut_into_pieces(ranges, ends, 2).borders == borders


def test_local_work_is_cut_in_two_only_where_gradients_return():
    dense = DilatedPattern.dense()
    apart = SequenceLayout.contiguous(64, 2)
    alone = plan_attention(DilatedPattern([32], [1]), apart, is_causal=False, num_heads=4).rank(0)
    assert alone.local_halves == (alone.local_groups, (), None)
    together = plan_attention(dense, apart, is_causal=False, num_heads=4).rank(0).local_halves
    assert together.late_heads == range(2, 4)
    assert {head for group in together.late for t in group.tiles for head in t.heads} == {2, 3}
    # The first rank of a causal sequence sees no other keys, but others return gradients to it.
    for rank in (0, 1):
        plan = plan_attention(dense, apart, is_causal=True, num_heads=4)
        assert plan.rank(rank).local_halves.late_heads == range(2, 4)


def test_a_plan_prints_as_a_table():
    text = str(_plan())
    assert "(5, 1) (document, 3) over 29 positions on 3 ranks" in text
    assert len(text.splitlines()) == 5
    assert "and 4080 more ranks" in str(
        plan_attention(
            DilatedPattern([4], [1]), SequenceLayout.contiguous(8192, 4096), is_causal=True
        )
    )


def test_plans_are_values():
    assert _plan() == _plan()
    assert hash(_plan()) == hash(_plan())
    assert _plan() != _plan(is_causal=False)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, ValueError, "multiple of kv_heads; got 6 and 4"),
        ({"num_heads": 0}, ValueError, "num_heads must be >= 1"),
        ({"documents": [0, 4, 4, 8]}, ValueError, "documents must rise from 0"),
        ({"documents": [0, 4]}, ValueError, "documents must rise from 0"),
        ({"pattern": [4]}, TypeError, "pattern must be a DilatedPattern"),
        ({"layout": 8}, TypeError, "layout must be a SequenceLayout"),
    ],
)
def test_bad_arguments_are_refused(changes, error, message):
    arguments = {
        "pattern": DilatedPattern.dense(),
        "layout": SequenceLayout.contiguous(8, 2),
        "is_causal": False,
        **changes,
    }
    with pytest.raises(error, match=message):
        plan_attention(arguments.pop("pattern"), arguments.pop("layout"), **arguments)
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 3\), got 3"):
        _plan().rank(3)


@pytest.mark.parametrize("world_size", [2, 4, 7])
def test_a_step_of_dense_zigzag_is_one_tile(world_size):
    """Two chunks of queries that see one of keys, or one that sees two, are joined."""
    layout = SequenceLayout.zigzag(32 * world_size, world_size)
    plan = plan_attention(DilatedPattern.dense(), layout, is_causal=True, num_heads=6)
    for rank in map(plan.rank, range(world_size)):
        for step in rank.steps():
            assert len(step.tiles) == 1
            assert step.tiles[0].queries.length * step.tiles[0].keys.length == 2 * 16**2
            assert step.storing == 1


@pytest.mark.parametrize(
    ("ranges", "rate", "is_causal", "tiles"),
    [
        ([(0, 8), (24, 32)], 1, True, 1),
        ([(0, 8), (24, 32)], 4, True, 1),
        ([(0, 8), (24, 32)], 4, False, 1),
        ([(0, 8), (24, 32)], 3, True, 3),  # 16 positions between them: rows do not go on
        ([(0, 8), (12, 16), (24, 32)], 4, True, 1),
        ([(0, 8), (12, 16), (26, 32)], 4, True, 3),  # the first two alone are joined
        ([(24, 32), (0, 8)], 1, True, 3),  # later positions come first
        ([(24, 32), (0, 8)], 1, False, 4),
    ],
)
def test_ranges_of_a_segment_that_go_on_are_one_tile(ranges, rate, is_causal, tiles):
    others = [x for x in pairwise(sorted({0, 32, *chain.from_iterable(ranges)})) if x not in ranges]
    plan = plan_attention(
        DilatedPattern([None], [rate]), SequenceLayout([ranges, others]), is_causal=is_causal
    )
    check_plan(plan)
    assert len(plan.rank(0).local) == tiles


def test_tiles_between_ranges_are_worked_out_once():
    """Forward asks which runs go row by row, and backward may not."""
    dilated = DilatedPattern([None], [3])  # which does not divide what lies between the ranges
    rank = plan_attention(dilated, SequenceLayout.zigzag(100, 2), is_causal=True).rank(0)
    (group,) = rank.own_work(lambda branch, runs: [False] * len(runs)).crossing
    assert rank.local_groups[-1] is group


@pytest.mark.parametrize(
    ("ranges", "tiles"),
    [
        ([(0, 12), (14, 16)], 2),  # a whole segment, and half of one that both ranges are in
        ([(0, 4), (6, 8), (14, 16)], 3),  # the last two lie alike in their segments: one run of two
        ([(0, 4), (6, 12), (14, 20)], 3),  # each border lies in another segment
    ],
)
def test_ranges_that_reach_into_several_segments(ranges, tiles):
    others = [x for x in pairwise(sorted({0, 24, *chain.from_iterable(ranges)})) if x not in ranges]
    plan = plan_attention(
        DilatedPattern([8], [1]), SequenceLayout([ranges, others]), is_causal=True
    )
    check_plan(plan)
    assert len(plan.rank(0).local) == tiles


def test_which_groups_of_a_step_may_write_over_its_slots():
    """Two branches that cross: what each of them reads is half of the slots, and no slot twice."""
    layout = SequenceLayout.contiguous(64, 2)
    plan = plan_attention(DilatedPattern([64, 64], [2, 4]), layout, is_causal=False, num_heads=4)
    step = plan.rank(0).step(1)
    assert len(step.groups) == step.storing == 2


@pytest.mark.slow
def test_plans_do_not_depend_on_hash_seeds():
    """Processes of one group have different ones, and must plan the same messages."""
    code = (
        "from ring_dilated_attention import *\n"
        "pattern = DilatedPattern([5, 16, None], [1, 2, 3])\n"
        "layout = SequenceLayout.zigzag(61, 3)\n"
        "plan = plan_attention(pattern, layout, num_heads=6, num_kv_heads=3, is_causal=True)\n"
        "print([[step for step in plan.rank(rank).steps()] for rank in range(3)])\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(found[0]) > 1000
    assert found[0] == found[1]


def test_tiles_of_documents_of_ever_new_lengths_are_kept_up_to_a_number(monkeypatch):
    monkeypatch.setattr(tiling, "MOST_TWINS", 10)
    tiling.tiling_of.cache_clear()
    known = tiling.tiling_of(DilatedPattern([None], [64]), 1, False, range(1)).known_twins
    for length in range(65, 100):
        plan = plan_attention(
            DilatedPattern([None], [64]),
            SequenceLayout.contiguous(length, 1),
            is_causal=False,
            num_heads=1,
        )
        assert plan.rank(0).local_groups
        assert plan.tiling.known_twins is known
        assert 0 < len(known) <= 10
        check_plan(plan)


@pytest.mark.parametrize("seed", range(60))
def test_runs_are_what_a_rank_holds_of_segments(seed):
    """Row by row: in which document and segment it is, and how far behind its start."""
    dice = random.Random(seed)
    total, ranks = dice.randint(1, 200), dice.randint(1, 3)
    cuts = sorted({0, total, *(dice.randint(0, total) for _ in range(dice.randint(0, 4)))})
    ranges = list(pairwise(cuts))
    dice.shuffle(ranges)
    layout = SequenceLayout([ranges[rank::ranks] for rank in range(ranks)])
    size = dice.choice([1, 3, 20, 300])  # documents of one length, but for some
    borders = sorted({0, *range(0, total, size), *dice.sample(range(total), min(total, 2)), total})
    length = dice.choice([None, 1, 4, 7, 50])
    for rank in range(ranks):
        runs = own_runs(parts_of(layout, borders, rank), length)
        rows = []
        for position in chain(*(range(*each) for each in layout.ranges[rank])):
            start = borders[bisect_right(borders, position) - 1]
            segment, phase = divmod(position - start, length or total)
            rows.append(((start, segment), phase))
        found: list[int] = []
        for run in runs:
            assert run.local == len(found)
            found += [run.phase + i for _ in range(run.copies) for i in range(run.size)]
            pieces = rows[run.local : len(found)]
            for piece in range(0, len(pieces), run.size):  # each within one segment
                assert len({where for where, _ in pieces[piece : piece + run.size]}) == 1
        assert found == [phase for _, phase in rows]
        assert all(  # and all of it that is held here
            rows[i - 1][0] != rows[i][0] or rows[i - 1][1] + 1 != rows[i][1]
            for run in runs
            for i in range(run.local, run.local + run.size * run.copies, run.size)
            if i
        )
        sizes = [run.size for run in runs for _ in range(run.copies)]
        assert runs.sizes == (min(sizes, default=0), max(sizes, default=0))
        assert runs.rows == len(rows)
        assert runs.squares == sum(x * x for x in sizes)
        assert runs.most_copies == max((run.copies for run in runs), default=0)
        assert runs.shorter_than(5) == sum(x < 5 for x in sizes)
