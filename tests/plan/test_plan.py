import random
from bisect import bisect_right
from dataclasses import replace
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.counted_calls import count_calls
from support.strategies import layouts, patterns

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.plan import Tile, TileGroup, check_plan, costs, lower
from ring_dilated_attention.plan.check import PlanError
from ring_dilated_attention.plan.program import Program
from ring_dilated_attention.plan.rows import cut, dilated_rows, intersect, own_runs, union_size

LONGNET = ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])


@settings(max_examples=400)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 6), st.data())
def test_random_plans_are_proven(pattern, layout, is_causal, heads, data):
    cuts = data.draw(st.lists(st.integers(1, layout.length), max_size=4))
    documents = data.draw(st.just(None) | st.just(sorted({0, *cuts, layout.length})))
    plan = plan_attention(
        pattern, layout, is_causal=is_causal, num_heads=heads, documents=documents
    )
    check_plan(plan)


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
    check_plan(plan)


@settings(max_examples=200)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 6))
def test_additions_are_not_more_than_the_plan_says(pattern, layout, is_causal, heads):
    plan = plan_attention(pattern, layout, is_causal=is_causal, num_heads=heads)
    for rank in map(plan.rank, range(layout.world_size)):
        tiles = [*rank.local, *(tile for step in rank.steps() for tile in step.tiles)]
        # A cell has a row more than its share where the rate does not divide it.
        additions = sum(t.segments * len(t.heads) * (t.queries.length - 1) for t in tiles)
        assert additions <= rank.mean_additions * layout.local_length(rank.index) * heads


def _plan(**changes):
    plan = plan_attention(
        DilatedPattern([5, None], [1, 3]),
        SequenceLayout.zigzag(29, 3),
        is_causal=True,
        num_heads=3,
    )
    return replace(plan, **changes)


def _apart(*tiles: Tile) -> tuple[TileGroup, ...]:
    return tuple(TileGroup((tile,)) for tile in tiles)


def _step(rank, change):
    """A rank's `step`, whose first one is another."""
    make, changed = rank.step, change(rank.step(1))
    return {"step": lambda step: changed if step == 1 else make(step)}


def _read_wrong_slot(step):
    first, *others = step.tiles
    keys = first.keys._replace(start=first.keys.start + 1)
    return step._replace(groups=_apart(first._replace(keys=keys), *others))


BREAKS = {
    "no tile": lambda x: {"local_groups": _apart(*x.local[1:])},
    "tile twice": lambda x: {"local_groups": _apart(*x.local, x.local[0])},
    "not causal": lambda x: {
        "local_groups": _apart(*(tile._replace(is_causal=False) for tile in x.local))
    },
    "shared rows": lambda x: {"local_groups": (TileGroup(x.local),)},
    "covers too early": lambda x: {"local_groups": x.local_groups[::-1]},
    "nothing sent": lambda x: _step(x, lambda step: step._replace(send=None)),
    "wrong slot": lambda x: _step(x, _read_wrong_slot),
    "row nobody needs": lambda x: _step(
        x, lambda step: step._replace(groups=_apart(*step.tiles[1:]))
    ),
}


@pytest.mark.parametrize("change", BREAKS.values(), ids=BREAKS)
def test_the_checker_finds_a_broken_plan(change):
    check_plan(_plan())
    plan = _plan()
    vars(plan.rank(1)).update(change(plan.rank(1)))
    with pytest.raises((PlanError, IndexError)):
        check_plan(plan)


def _move(program, kind, to):
    """The program with the last action of a kind elsewhere."""
    actions = list(program)
    found = max(i for i, action in enumerate(actions) if action.kind == kind)
    actions.insert(to, actions.pop(found))
    return Program(actions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: Program(x[:-1]), "not every message is waited for"),
        (lambda x: Program([a for a in x if a.kind != "tiles"]), "too many|missing"),
        (lambda x: _move(x, "return", 1), "what has not arrived last"),
        (lambda x: _move(x, "wait", len(x) - 1), "what has not arrived last"),
        # Before the return of step 1, which other ranks expect first.
        (lambda x: _move(x, "fetch", 4), "receives .* but .* is sent"),
        (lambda x: Program([x[2], *x[:2], *x[3:]]), "waits for a message before it is started"),
    ],
)
def test_the_checker_finds_a_broken_program(change, message, monkeypatch):
    plan = plan_attention(
        DilatedPattern.dense(), SequenceLayout.contiguous(16, 4), is_causal=False, num_heads=1
    )
    check_plan(plan)

    def broken(rank, **options):
        program = lower(rank, **options)
        given = (rank.index, *options.values())
        return change(program) if given == (1, False, True) else program

    monkeypatch.setattr("ring_dilated_attention.plan.check.lower", broken)
    with pytest.raises(PlanError, match=message):
        check_plan(plan)


def test_a_program_prints_an_action_a_line():
    plan = plan_attention(
        DilatedPattern([None, 4], [2, 1]), SequenceLayout.contiguous(16, 2), is_causal=False
    )
    program = lower(plan.rank(0), gathers=False, backward=True)
    assert str(program).splitlines() == [
        "fetch  step 1; 4 rows to rank 1; 4 rows from rank 1",
        "tiles  own rows, first group; 1 tiles, 32 pairs",
        "wait   step 1",
        "tiles  step 1; 1 tiles, 16 pairs",
        "return step 1; 4 rows to rank 1; 4 rows from rank 1",
        "tiles  own rows, others; 1 tiles, 16 pairs",
        "add    step 1",
    ]
    size = costs.TensorSize(batch=2, head_dim=8, element_size=2)
    assert sum(x.pairs for x in program) == plan.rank(0).pairs
    moved = [sum(x) for x in zip(*(x.nbytes(size) for x in program), strict=True)]
    traffic = costs.traffic(plan.rank(0), size)
    assert moved == [traffic.backward_sent, traffic.backward_received]


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


def planned_steps(layout, rates, lengths):
    """Steps of one of 4,096 ranks as it runs them, and the rows that it receives."""
    plan = plan_attention(
        DilatedPattern(lengths, rates), layout, is_causal=True, num_heads=12, num_kv_heads=3
    )
    rounds = plan.rank(2047).rounds(gathers=plan.gathers)
    return sum(sum(1 for _ in one.steps()) for one in rounds), rounds[0].total_received_rows


@pytest.mark.slow
@pytest.mark.parametrize("make", [SequenceLayout.contiguous, SequenceLayout.zigzag])
@pytest.mark.parametrize(
    ("lengths", "rates", "runs"),
    [([*LONGNET[0], None], [*LONGNET[1], 2**16], 1), ([None], [1], 3)],
    ids=["LongNet", "dense"],
)
def test_all_steps_of_one_of_4096_ranks_are_little_work(make, lengths, rates, runs):
    """Of 4,095 steps few differ: 100 ms for each run of the ring."""
    calls, (steps, rows) = count_calls(planned_steps, make(2**30, 4096), rates, lengths)
    assert steps == 4095 * runs
    assert rows > 0
    assert calls < 150 * runs * 4096


def test_a_branch_that_covers_the_heads_of_a_plan_comes_first():
    """Branch 1 has every row of head 1, which runs no other."""
    pattern = DilatedPattern([30, 30], [2, 1], head_branches="split")
    layout = SequenceLayout.contiguous(60, 4)
    plan = plan_attention(pattern, layout, is_causal=False, num_heads=2)
    assert plan.branches == [(0, 30), (1, 30)]
    assert replace(plan, narrowed_to=range(1, 2)).branches == [(1, 30), (0, 30)]


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
    check_plan(plan)


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


def test_auto_gathers_little_and_rings_much():
    layout = SequenceLayout.contiguous(4096, 4)
    assert not plan_attention(DilatedPattern.dense(), layout, is_causal=False).gathers
    assert plan_attention(DilatedPattern([64, None], [1, 16]), layout, is_causal=False).gathers


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "gathers"), [(8, 5, True), (8, 6, False), (16, 4, False), (32, 2, True)]
)
def test_auto_gathers_the_few_rows_of_grouped_queries(kv_heads, ranks, gathers):
    """A quarter as many KV heads: those of 4 other ranks are as large as query and out."""
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


def test_plans_are_values_that_print():
    assert "(5, 1) (document, 3) over 29 positions on 3 ranks" in str(_plan())
    assert _plan() == _plan()
    assert hash(_plan()) == hash(_plan())
    assert _plan() != _plan(is_causal=False)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 4}, ValueError, "multiple of kv_heads; got 6 and 4"),
        ({"num_heads": 0}, ValueError, "num_heads must be >= 1"),
        ({"documents": [0, 4, 3, 8]}, ValueError, "documents must rise from 0"),
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


def test_which_groups_of_a_step_may_write_over_its_slots():
    """Two branches that cross: what each of them reads is half of the slots, and no slot twice."""
    layout = SequenceLayout.contiguous(64, 2)
    plan = plan_attention(DilatedPattern([64, 64], [2, 4]), layout, is_causal=False, num_heads=4)
    step = plan.rank(0).step(1)
    assert len(step.groups) == step.storing == 2


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
        runs = own_runs(cut(layout.ranges[rank], borders, rank), length)
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
        assert runs.rows == len(rows)
        assert runs.squares == sum(x * x for x in sizes)
        assert runs.shorter_than(5) == sum(x < 5 for x in sizes)


@settings(max_examples=200)
@given(patterns(), layouts(max_length=150), st.booleans(), st.integers(1, 5), st.data())
def test_flops_by_rank_are_those_of_the_plan(pattern, layout, is_causal, heads, data):
    borders = data.draw(st.sets(st.integers(1, layout.length)))
    plan = plan_attention(
        pattern,
        layout,
        is_causal=is_causal,
        num_heads=2 * heads,
        num_kv_heads=heads,
        documents=sorted({0, layout.length, *borders}),
    )
    size = costs.TensorSize(batch=2, head_dim=3, element_size=4)
    work = costs.flops_by_rank(plan, size)
    assert work == [costs.flops(plan.rank(rank), size) for rank in range(layout.world_size)]
    found = costs.balance(work)
    assert 1 <= found.imbalance <= layout.world_size
    assert work[found.largest_rank] == max(work)


progressions = st.builds(range, st.integers(-20, 60), st.integers(-20, 90), st.integers(1, 12))


@given(progressions, progressions)
def test_intersection(a, b):
    assert sorted(set(a) & set(b)) == list(intersect(a, b))


@given(st.lists(progressions, max_size=6))
def test_union_size(many):
    assert union_size(many) == len(set().union(*many))


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 90), st.data())
def test_dilated_rows_are_the_cell_within_a_range(start, length, rate, low, data):
    offset = data.draw(st.integers(0, rate - 1))
    high = data.draw(st.integers(low, 100))
    cell = range(start + offset, start + length, rate)
    got = dilated_rows(start, start + length, offset, rate, low, high)
    assert list(got) == [x for x in cell if low <= x < high]
