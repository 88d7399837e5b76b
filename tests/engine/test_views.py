import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import layouts, patterns

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.engine import blocks as views
from ring_dilated_attention.engine.blocks import families


def _rows(tile, rows, heads):
    """(batch 0) every row of a tile as (row, head), cell by cell."""
    return [
        [
            (rows.start + s * rows.segment_stride + j * rows.head_stride + i * rows.stride, head)
            for i in range(rows.length)
        ]
        for s in range(tile.segments)
        for j, head in enumerate(heads)
    ]


def _expected(tile, batch, group):
    """The cells of a tile: (entry, member, query rows with heads, key rows with heads)."""
    for member in range(group):
        query_heads = [head * group + member for head in tile.heads]
        for cell in zip(
            _rows(tile, tile.queries, query_heads), _rows(tile, tile.keys, tile.heads), strict=True
        ):
            for entry in range(batch):
                yield tile.is_causal, *((entry, tuple(rows)) for rows in cell)


def _cells(view, shape):
    """The cells of a view of `arange(...)` shaped (batch, rows, heads, 1)."""
    for cell in view.flatten(0, 1)[..., 0].tolist():
        places = [(x // shape[2] // shape[1], x // shape[2] % shape[1], x % shape[2]) for x in cell]
        (entry,) = {place[0] for place in places}
        yield entry, tuple((row, head) for _, row, head in places)


@given(
    patterns(), layouts(), st.booleans(), st.integers(1, 6), st.integers(1, 2), st.integers(1, 3)
)
def test_blocks_are_the_rows_of_their_tiles(pattern, layout, is_causal, heads, group, batch):
    plan = plan_attention(
        pattern, layout, is_causal=is_causal, num_heads=heads * group, num_kv_heads=heads
    ).rank(0)
    length = layout.local_length(0)
    q_shape, k_shape = (batch, length, heads * group, 1), (batch, length, heads, 1)
    queries, keys = (torch.arange(s[0] * s[1] * s[2]).view(s) for s in (q_shape, k_shape))
    for tiles in plan.local_groups:
        got: list[object] = []
        for family in families(tiles.tiles):
            for whole in family.blocks(batch, group):
                for block in whole.slices(most_rows=7):
                    q = block.place_queries(queries).of(queries)
                    k = block.place_keys(keys).of(keys)
                    assert block.pairs * 2 >= q.shape[:3].numel()
                    cells = zip(_cells(q, q_shape), _cells(k, k_shape), strict=True)
                    got.extend((block.is_causal, *cell) for cell in cells)
        expected = [cell for tile in tiles.tiles for cell in _expected(tile, batch, group)]
        assert sorted(got) == sorted(expected)  # type: ignore[type-var]


def test_heads_that_repeat_offsets_share_a_block():
    """12 heads at rate 4 are three alike tiles of four heads; in one segment, one call."""
    for offsets in ("interleaved", "blocked"):
        pattern = DilatedPattern([None], [4], head_offsets=offsets)
        plan = plan_attention(
            pattern, SequenceLayout.contiguous(4096, 1), is_causal=False, num_heads=12
        )
        (group,) = plan.rank(0).local_groups
        (family,) = families(group.tiles)
        (block,) = family.blocks(1, 1)
        assert {block.outer.size, block.inner.size} == {3, 4}


def test_slices_are_bounded():
    pattern = DilatedPattern([64], [1])
    plan = plan_attention(
        pattern, SequenceLayout.contiguous(64 * 10, 1), is_causal=False, num_heads=3
    )
    (family,) = families(plan.rank(0).local)
    (block,) = family.blocks(1, 1)
    assert block.rows == 64 * 10 * 3
    assert [part.rows for part in block.slices(2.5 * 64 * 3)] == [2 * 64 * 3] * 5
    assert [part.rows for part in block.slices(1000)] == [5 * 64 * 3] * 2
    assert list(block.slices(block.rows)) == [block]
    assert [part.rows for part in block.slices(2.5 * 64)] == [64, 2 * 64] * 10
    assert len(list(block.slices(1))) == 10 * 3  # a segment of a head is the smallest slice


def test_no_axis_is_longer_than_a_grid(monkeypatch):
    monkeypatch.setattr(views, "MOST_PROGRAMS", 5)
    plan = plan_attention(
        DilatedPattern([4], [1]), SequenceLayout.contiguous(92, 1), is_causal=False, num_heads=7
    ).rank(0)
    (family,) = families(plan.local_groups[0].tiles)
    (whole,) = family.blocks(1, 1)
    parts = list(whole.slices(math.inf))
    assert all(max(part.outer.size, part.inner.size) <= 5 for part in parts)
    assert sum(part.rows for part in parts) == whole.rows
