"""Pictures say what the reference mask and the plan say, for sizes that divide nothing."""

import importlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from support.strategies import layouts, patterns

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.checks import key_counts
from ring_dilated_attention.draw import (
    STYLES,
    draw_cache,
    draw_exchange,
    draw_mask,
    draw_tiles,
    draw_timeline,
    draw_work,
    save,
)
from ring_dilated_attention.draw.mask import NOTHING, OWN, kept_keys, mask_cells, visible_cells
from ring_dilated_attention.draw.ranks import LINK_GB_S, TFLOPS, timeline
from ring_dilated_attention.plan import costs
from ring_dilated_attention.units import in_bytes

REPOSITORY = Path(__file__).parents[2]
SIZE = costs.TensorSize(batch=2, head_dim=8, element_size=2)
THREE = DilatedPattern([8, 16, None], [1, 2, 4])
DENSE = DilatedPattern.dense()
CASES = {  # pattern, length, ranks, layout, causal, documents
    "zigzag": (THREE, 47, 4, "zigzag", True, None),
    "documents": (THREE, 48, 3, "contiguous", False, [0, 5, 6, 31, 48]),
    "split": (
        DilatedPattern([7, None], [3, 2], head_branches="split"),
        *(37, 1, "zigzag", False, None),
    ),
    "blocked": (
        DilatedPattern([5, 13], [2, 7], head_offsets="blocked", zero_keys=True),
        *(1001, 3, "contiguous", True, [0, 500, 1001]),
    ),
    "empty ranks": (DENSE, 3, 5, "contiguous", True, None),
    "nothing seen": (DilatedPattern([9], [4]), 2, 2, "contiguous", False, None),
}


def plan_of(pattern, length, ranks, layout, causal, documents, heads=4, kv_heads=2):
    where = SequenceLayout.named(layout, length, ranks, is_causal=causal)
    return plan_attention(
        pattern,
        where,
        is_causal=causal,
        num_heads=heads,
        num_kv_heads=kv_heads,
        documents=documents,
    )


def owners(layout):
    found = np.zeros(layout.length, dtype=int)
    for piece in layout.pieces:
        found[piece.start : piece.stop] = piece.rank
    return found


@settings(max_examples=40)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 3), st.data())
def test_mask_cells_are_the_reference_mask(pattern, layout, is_causal, heads, data):
    borders = sorted({0, layout.length, *data.draw(st.sets(st.integers(1, layout.length)))})
    options = {"is_causal": is_causal, "documents": borders}
    plan = plan_attention(pattern, layout, num_heads=heads, **options)
    counts = key_counts(pattern, layout.length, heads, **options)[0].numpy()
    held, size = owners(layout), data.draw(st.integers(1, layout.length))
    for head, count in enumerate(counts):
        assert (visible_cells(plan, head, 1).sum(0) == count).all()
        by_rank = np.where(held[:, None] == held[None, :], OWN, held[None, :])
        assert (mask_cells(plan, head, "rank", 1) == np.where(count, by_rank, NOTHING)).all()
        blocks = np.zeros((-(-layout.length // size),) * 2, dtype=bool)
        blocks[tuple(x // size for x in np.nonzero(count))] = True
        assert (visible_cells(plan, head, size).any(0) == blocks).all()


def squares(axes):
    """The colour of each cell, by (query, key); of nested squares that of the innermost."""
    found = {}
    for item in axes.collections:
        if type(item) is PolyCollection:
            for path in item.get_paths():
                k, q = np.floor(np.asarray(path.vertices)[:4].mean(0)).astype(int)
                if min(q, k) >= 0:  # else it is in the strips of ranks
                    found[q, k] = to_hex(tuple(np.asarray(item.get_facecolor())[0]))
    return found


@pytest.mark.parametrize("by", ["branch", "rank"])
@pytest.mark.parametrize("case", ["zigzag", "documents"])
def test_draw_mask_colours_the_visible_keys(case, by):
    plan, style = plan_of(*CASES[case]), STYLES["dark"]
    shown = visible_cells(plan, 3, 1)
    last = len(shown) - 1 - shown[::-1].argmax(0)
    colors, held = style.branch_colors(len(shown)), owners(plan.layout)
    wanted = {}
    for q, k in zip(*np.nonzero(shown.any(0)), strict=True):
        sender = style.own if held[q] == held[k] else style.rank_color(held[k])
        wanted[q, k] = colors[last[q, k]] if by == "branch" else sender
    assert squares(draw_mask(plan, 3, by=by, style=style)) == wanted


def test_draw_mask_of_a_long_sequence_has_runs_of_cells():
    plan = plan_of(*CASES["blocked"])
    size = 8  # 126 cells
    covered = np.zeros((126, 126), dtype=int)
    axes = draw_mask(plan)
    for item in axes.collections[1:]:
        for path in item.get_paths():
            corners = np.asarray(path.vertices)
            (left, top), (right, bottom) = (corners.min(0) / size, corners.max(0) / size)
            covered[int(top) : int(bottom), int(left) : int(right)] += 1
    assert (covered == visible_cells(plan, 0, size).any(0)).all()
    assert axes.get_title() == "1 cell = 8 × 8 positions, set if any pair is visible"


@settings(max_examples=20)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 3))
def test_timeline_moves_and_computes_what_the_plan_says(pattern, layout, is_causal, heads):
    plan = plan_attention(pattern, layout, is_causal=is_causal, num_heads=2 * heads)
    done = timeline(plan, SIZE)
    for rank in range(layout.world_size):
        own = [x[1:] for x in done if x[0] == rank]
        seconds = dict.fromkeys(("compute", "receive", "wait"), 0.0)
        for kind, _, start, stop in own:
            seconds[kind] += stop - start
        received = costs.traffic(plan.rank(rank), SIZE).forward_received
        assert seconds["receive"] == pytest.approx(received / LINK_GB_S / 1e9)
        work = costs.flops(plan.rank(rank), SIZE)
        assert seconds["compute"] == pytest.approx(work / TFLOPS / 1e12)
        arrived = {peer: 0.0 for _, peer, *_ in own}
        for kind, peer, start, stop in own:  # nothing is computed before its first keys are there
            if kind == "receive":
                arrived[peer] = arrived[peer] or stop
            elif kind == "compute":
                assert start >= arrived[peer]
                assert peer == rank or arrived[peer] > 0


def test_draw_exchange_has_the_bytes_of_the_plan():
    plan = plan_of(*CASES["zigzag"])
    axes = draw_exchange(plan, SIZE)
    nbytes = np.array(
        [[SIZE.key_value_bytes(plan.rank(j).received_rows(i)) * (i != j) for j in range(4)]
         for i in range(4)]
    )  # fmt: skip
    assert [text.get_text() for text in axes.texts] == [
        in_bytes(x) if x else "·" for x in nbytes.flat
    ]
    shares = np.asarray(axes.collections[0].get_array()).reshape(4, 4)
    assert np.allclose(shares, nbytes / nbytes.max())
    assert (
        axes.get_title()
        == f"{in_bytes(nbytes.sum())}; at most {in_bytes(nbytes.max())} from one to another"
    )
    many = draw_exchange(plan_of(DENSE, 400, 100, "contiguous", True, None), SIZE)
    assert "among the first 64 ranks" in many.get_title()


def test_draw_work_has_the_flops_of_the_plan():
    plan = plan_of(DENSE, 97, 3, "contiguous", True, None)
    flops = np.array(costs.flops_by_rank(plan, SIZE))
    heights = [bar.get_height() for bar in draw_work(plan, SIZE).containers[0]]
    assert np.allclose(heights, flops / flops.mean())


@pytest.mark.parametrize("length", [1, 44, 130])
@pytest.mark.parametrize("pattern", [THREE, *(CASES[name][0] for name in ("split", "blocked"))])
def test_draw_cache_keeps_what_later_positions_see(pattern, length):
    plan = plan_of(pattern, length + 40, 1, "contiguous", True, None, kv_heads=4)
    for head in range(4):
        kept = kept_keys(pattern, 4, head, length)
        for keys, shown in zip(kept, visible_cells(plan, head, 1), strict=True):
            assert list(keys) == np.flatnonzero(shown[length:, :length].any(0)).tolist()
        axes = draw_cache(pattern, length, SIZE, num_kv_heads=4, kv_head=head)
        assert [text.get_text() for text in axes.texts] == [f" {len(keys)}" for keys in kept]


@pytest.mark.parametrize("case", CASES)
def test_save_writes_every_picture_of_every_case(case, tmp_path):
    plan = plan_of(*CASES[case])
    for number, style in enumerate(2 * list(STYLES.values())):
        by_size = (draw_exchange, draw_work, draw_timeline)[number - 1]
        axes = by_size(plan, SIZE, style=style) if number else draw_mask(plan, style=style)
        file = tmp_path / f"{number}.svg"
        save(axes, file)
        text = file.read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        assert style.page in text
        assert "<image" not in text  # pixels would be blurred


def test_save_writes_equal_files_and_png(tmp_path):
    folder = REPOSITORY / "src" / "ring_dilated_attention" / "draw"  # pyplot is its users' own
    assert not any("pyplot" in path.read_text() for path in folder.glob("*.py"))
    plan = plan_of(*CASES["zigzag"])
    for name in ("a.svg", "b.SVG", "c.png"):
        save(draw_mask(plan, by="rank").figure, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.SVG").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    return importlib.import_module("figures")


def test_figures_of_the_docs_are_there_in_both_styles_and_small(figures):
    wanted = {f"{name}-{style}.svg" for name in figures.FIGURES for style in STYLES}
    assert wanted == {path.name for path in figures.FOLDER.glob("*.svg")}
    for name in wanted:
        file = figures.FOLDER / name
        assert file.stat().st_size < 200_000
        root = ElementTree.parse(file).getroot()
        assert root.tag.endswith("svg")
        assert float(root.attrib["width"].removesuffix("pt")) < 400  # a phone: letters of 8 pixels


@pytest.mark.parametrize("name", ["hero", "slide-step"])
def test_figures_of_the_docs_are_drawn_the_same_again(figures, name, tmp_path):
    save(figures.FIGURES[name](STYLES["light"]), tmp_path / "again.svg", transparent=True)
    again = (tmp_path / "again.svg").read_bytes()
    save(figures.FIGURES[name](STYLES["light"]), tmp_path / "more.svg", transparent=True)
    assert again == (tmp_path / "more.svg").read_bytes()


def test_tiles_are_drawn_where_they_are():
    """Tiles of 100 that overlap none, at 3 of the 8 cells of a grid."""
    coordinates = np.array([[700, 50], [1000, 50], [800, 150]])
    axes = draw_tiles(coordinates, np.array([0.0, 1.0, 2.0]), 100.0, title="slide", note="scores")
    (image,) = axes.images
    assert tuple(image.get_extent()) == (700, 1100, 250, 50)  # y points down
    grid: Any = np.ma.filled(image.get_array(), np.nan)  # type: ignore[arg-type]
    assert np.array_equal(grid, [[0, np.nan, np.nan, 1], [np.nan, 2, np.nan, np.nan]], True)
    assert len(axes.figure.axes) == 2  # the colour bar's, too
    (single,) = draw_tiles(np.array([[5, 5]]), np.array([3.0]), 256.0).images
    assert tuple(single.get_extent())[:2] == (5, 261)
    thumbnail = np.zeros((20, 30, 3)), (3000, 2000)
    axes = draw_tiles(coordinates, np.array([0.0, 1.0, 2.0]), 100.0, thumbnail=thumbnail)
    over, below = axes.images
    assert over.get_alpha() == 0.5
    assert over.get_zorder() > below.get_zorder()
    assert tuple(below.get_extent()) == (0, 3000, 2000, 0)
    assert (axes.get_xlim(), axes.get_ylim()) == ((700, 1100), (250, 50))
