"""Segments of several ranks, computed with own and received keys side by side."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.strategies import patterns

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.checks import Case, ViewKind, combine, run_case
from ring_dilated_attention.engine import ring, transfer
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import Message, Rows, Run

VIEWS = tuple([*ViewKind.named().values()][:4])
SLIDE = DilatedPattern([8, 24, None, None], [1, 2, 8, 16], head_offsets="blocked")


@st.composite
def contiguous(draw, max_length=60):
    """One range for each rank, of any lengths."""
    length, ranks = draw(st.integers(2, max_length)), draw(st.integers(2, 5))
    cuts = draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1))
    bounds = [0, *sorted(cuts), length]
    return SequenceLayout([[(a, b)] if a < b else [] for a, b in pairwise(bounds)])


def _rows(tile, rows):
    """Of each head and segment of a tile, the numbers of its queries or keys."""
    for number, head in enumerate(tile.heads):
        for segment in range(tile.segments):
            first = rows.start + number * rows.head_stride + segment * rows.segment_stride
            yield head, [first + i * rows.stride for i in range(rows.length)]


def _pairs(tiles, query_of, key_of):
    """(branch, head, position of the query, of the key), as often as tiles compute each."""
    found: Counter[tuple[int, int, int, int]] = Counter()
    for tile in tiles:
        both = zip(_rows(tile, tile.queries), _rows(tile, tile.keys), strict=True)
        for (head, queries), (_, keys) in both:
            found.update(
                (tile.branch, head, query_of(q), key_of(head, k)) for q in queries for k in keys
            )
    return found


def _held(message, position_of):
    """The head and the position of each slot."""
    found: dict[int, tuple[int, int]] = {}
    for run in message.runs:
        for number, head in enumerate(run.heads):
            for i in range(run.rows.length):
                row = run.rows.start + number * run.rows.head_stride + i * run.rows.stride
                found[run.slot + number * run.rows.length + i] = head, position_of(row)
    return found


def _position(own, head, row):
    return own[row]


def _key_in(slots):
    def key_of(head, slot):
        held_by, position = slots[slot]
        assert held_by == head
        return position

    return key_of


@settings(max_examples=200)
@given(patterns(), contiguous(), st.sampled_from([1, 2, 4]), st.booleans())
def test_the_same_pairs_are_computed(pattern, layout, num_heads, by_rows):
    """With own runs left out and all segments joined, as step by step."""
    plan = plan_attention(pattern, layout, is_causal=False, num_heads=num_heads)
    ranks = [r for r in map(plan.rank, range(layout.world_size)) if r.joined is not None]
    assume(ranks)
    choose = (lambda branch, runs: [False] * len(runs)) if by_rows else None
    for rank in ranks:
        joined: Any = rank.joined
        own = dict(enumerate(layout.positions(rank.index).tolist()))
        here = own.__getitem__, partial(_position, own)
        step_by_step = _pairs(rank.local, *here)
        for step in rank.steps():
            if step.receive is not None:
                of_sender = layout.positions(step.receive.sender).tolist()
                slots = _held(step.receive, of_sender.__getitem__)
                step_by_step += _pairs(step.tiles, own.__getitem__, _key_in(slots))
        work = rank.own_work(choose, joined=joined)
        left = [tile for group in (*work.groups, *work.crossing) for tile in group.tiles]
        at_once = _pairs(left, *here)
        slots = _held(joined.message, int)
        tiles = [tile for group in joined.groups for tile in group.tiles]
        at_once += _pairs(tiles, own.__getitem__, _key_in(slots))
        assert at_once == step_by_step
        assert joined.reads_once
        assert sorted(slots) == [*range(joined.message.slots)]
        assert len(slots) <= len(own) * num_heads
        assert [x for branch in joined.branches for x in branch] == [*range(len(slots))]
        for branch in joined.branches:  # whose gradients are added without atomics
            assert len({slots[x] for x in branch}) == len(branch)


LAYOUTS = {
    "two ranks": (SequenceLayout.contiguous(401, 2), 2, "ring"),
    "two ranks, other rows": (SequenceLayout.contiguous(403, 2, multiple=16), 2, "auto"),
    "three ranks": (SequenceLayout.contiguous(403, 3), 3, "gather"),
    # The other rank holds what lies before and behind, out of order, and joins nothing.
    "in between": (SequenceLayout([[(120, 300)], [(300, 401), (0, 120)]]), 1, "auto"),
}
"""With how many ranks join, and how rows are exchanged."""


@pytest.mark.parametrize("zero_keys", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(("layout", "joining", "exchange"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_sharded_slide_is_exact(layout, joining, exchange, num_kv_heads, zero_keys, monkeypatch):
    joins = []

    def noted(*given):
        joins.append(given)
        return of_all(*given)

    of_all = ring.of_all
    monkeypatch.setattr(ring, "of_all", noted)
    lengths, rates = SLIDE.segment_lengths, SLIDE.dilation_rates
    case = Case(
        pattern=DilatedPattern(lengths, rates, head_offsets="blocked", zero_keys=zero_keys),
        layout=layout,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        batch=2,
        is_causal=False,
        exchange=exchange,
        views=VIEWS,
    )
    wanted = case.references()
    run = partial(_outcomes, case, wanted)
    (outcome,) = combine(run_loopback(layout.world_size, run))
    assert outcome.passes(torch.float64), outcome
    assert len(joins) == 2 * joining  # forward and backward


def _outcomes(case, wanted, ends):
    return [run_case(case, ends, wanted)]


@pytest.mark.parametrize("stride", [1, 7, 40, 1000])
def test_rows_are_numbered_however_far_apart_they_are(stride):
    """By a table of all numbers where these are dense, by sorting where they are not."""
    runs = [Run(range(2), Rows(5, 30, stride, 1), 0), Run(range(1, 2), Rows(5, 40, stride, 0), 60)]
    message = Message(0, 1, tuple(runs), slots=100, rows=70 if stride > 1 else 71)
    numbers = transfer.numbers_of(message, 2)
    distinct = transfer.received_numbers(message, 2)
    assert distinct.tolist() == sorted(set(numbers.tolist()))
    shuffled = distinct[torch.randperm(len(distinct), generator=torch.Generator().manual_seed(0))]
    assert torch.equal(shuffled[transfer.places_of(numbers, shuffled)], numbers)
    for missing in (int(distinct[3]), int(distinct[-1])):
        with pytest.raises(AssertionError, match="not been received"):
            transfer.places_of(numbers, distinct[distinct != missing])


def _joined(pattern, layout, **options):
    options = {"is_causal": False, "num_heads": 4, **options}
    return plan_attention(pattern, layout, **options).rank(0).joined


def test_what_is_not_joined():
    """Causal, packed or zigzag sequences; and more keys than the rank has rows."""
    layout = SequenceLayout.contiguous(200, 2)
    assert _joined(SLIDE, layout) is not None
    assert _joined(SLIDE, layout, is_causal=True) is None
    assert _joined(SLIDE, layout, documents=(0, 40, 200)) is None
    assert _joined(SLIDE, SequenceLayout.zigzag(200, 2)) is None
    assert _joined(DilatedPattern([None, None, None], [2, 2, 1]), layout) is None
    # Its own tiles are computed first, as they are.
    assert _joined(DilatedPattern.dense(), layout) is None
