"""`rda draw cache`: what a KV cache keeps, read back from cells, figures and terminals."""

import io
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from support.strategies import patterns
from typer.testing import CliRunner

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.cli import app
from ring_dilated_attention.draw import (
    DARK,
    LIGHT,
    Grid,
    HeadCache,
    cache_end,
    cache_figure,
    cache_text,
    growth,
    kept_cells,
    kept_rows,
    rows_of,
)
from ring_dilated_attention.plan import costs

SIZE = costs.TensorSize(batch=2, head_dim=8, element_size=2)
THREE = DilatedPattern([8, 16, None], [1, 2, 4])
LONGNET = DilatedPattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
CASES = [
    # pattern, length, query heads, KV heads, documents
    (THREE, 44, 4, 2, None),
    (THREE, 48, 4, 4, [0, 5, 48]),
    (DilatedPattern([7, None], [3, 2], head_branches="split"), 37, 4, 4, None),
    (DilatedPattern([5, 13], [2, 7], head_offsets="blocked", zero_keys=True), 101, 4, 2, None),
    (DilatedPattern.dense(), 1, 4, 4, None),
    (DilatedPattern([9], [4]), 2, 4, 4, None),
    (DilatedPattern([2], [5]), 6, 4, 4, None),  # head 3 sees nothing
    (DilatedPattern([None, 3], [50, 60]), 10, 4, 4, None),
    (LONGNET, 1_000_000, 4, 4, None),
    (LONGNET, 1 << 30, 4, 4, None),
]


def plan_of(pattern, length, heads, kv_heads, documents):
    return plan_attention(
        pattern,
        SequenceLayout.contiguous(length, 1),
        is_causal=True,
        num_heads=heads,
        num_kv_heads=kv_heads,
        documents=documents,
    )


def states(pattern, kv_heads, kv_head, length, end):
    """One of "kept", "dropped", "ahead" and "" for each branch and position, one by one."""
    found = []
    for branch, (segment, rate) in enumerate(pattern.branches):
        offsets = {h.head: h.offset for h in pattern.heads(branch, kv_heads)}
        offset = offsets.get(kv_head)
        lane = []
        for key in range(end):
            start = 0 if segment is None else key // segment * segment
            stop = end + 2 * rate if segment is None else start + segment
            shown = [] if offset is None else range(start + offset, stop, rate)
            if key not in shown:
                lane.append("")
            elif key < length:
                lane.append("kept" if any(q >= length for q in shown) else "dropped")
            else:
                now = 0 if segment is None else length // segment * segment
                lane.append("ahead" if start == now else "")
        found.append(lane)
    return found


@settings(max_examples=60, deadline=None)
@given(patterns(), st.integers(1, 4), st.integers(1, 120), st.data())
def test_cells_are_what_is_kept(pattern, kv_heads, length, data):
    head = data.draw(st.integers(0, kv_heads - 1))
    end = cache_end(pattern, length)
    assert end > length
    wanted = states(pattern, kv_heads, head, length, end)
    start = data.draw(st.integers(0, end - 1))
    window = range(start, data.draw(st.integers(start + 1, end)))
    for grid in (Grid.of(end, end), Grid.of(end, data.draw(st.integers(1, end)), window)):
        # The last block is drawn whole, also where it reaches beyond the picture.
        far = states(pattern, kv_heads, head, length, max(grid.end, length))
        found = kept_cells(pattern, kv_heads, head, length, grid)
        for name, cells in zip(("dropped", "kept", "ahead"), found, strict=True):
            for lane, row in enumerate(cells):
                blocks = [grid.start + cell * grid.size for cell in range(grid.count)]
                assert row.tolist() == [name in far[lane][a : a + grid.size] for a in blocks]
    count = sum(lane.count("kept") for lane in wanted)
    assert kept_rows(pattern, kv_heads, head, length) == count
    assert count <= rows_of(pattern, kv_heads, head, length)


@settings(max_examples=100, deadline=None)
@given(patterns(), st.integers(1, 4), st.data())
def test_growth_is_flat_unless_a_branch_is_the_whole_document(pattern, kv_heads, data):
    head = data.draw(st.integers(0, kv_heads - 1))
    lengths = [1, 2, 7, 71, 1000, 10**6, 10**9]
    found = growth(pattern, kv_heads, head, lengths)
    assert found.lengths == tuple(lengths)
    own = [
        (w, r, h.offset)
        for index, (w, r) in enumerate(pattern.branches)
        for h in pattern.heads(index, kv_heads)
        if h.head == head
    ]
    for length, rows in zip(lengths, found.rows, strict=True):
        visible = [(min(w or length, length), r, o) for w, r, o in own]
        assert rows == sum(-(-most // r) for most, r, offset in visible if offset < most)
    assert (found.rows[-1] == found.rows[-2]) == all(w is not None for w, _, _ in own)


def bars(axes):
    """By lanes a list of (face, edge, start, width), the background too."""
    found: dict[int, list[Any]] = defaultdict(list)
    for item in axes.collections:
        looks: list[Any] = [item.get_facecolor(), item.get_edgecolor()]
        face, edge = ("none" if len(x) == 0 or x[0][3] == 0 else to_hex(x[0]) for x in looks)
        for path in item.get_paths():
            corners = np.asarray(path.vertices)
            (left, top), (right, _) = corners.min(0), corners.max(0)
            found[int(top)].append((face, edge, left, right - left))
    return found


@pytest.mark.parametrize("style", [LIGHT, DARK])
@pytest.mark.parametrize("case", CASES[:4])
def test_drawn_squares_are_the_states(style, case):
    pattern, length, heads, kv_heads, documents = case
    plan = plan_of(*case)
    if documents:
        length = documents[-1] - documents[-2]
    end = cache_end(pattern, length)
    axes = cache_figure(plan, SIZE, heads - 1, style=style, window=range(min(end, 80))).axes[0]
    wanted = states(pattern, kv_heads, kv_heads - 1, length, min(end, 80))
    colors = style.branch_colors(len(pattern.branches))
    found = bars(axes)
    for lane, color in enumerate(colors):
        looks = {
            "dropped": (style.own, "none"),
            "kept": (color, "none"),
            "ahead": ("none", color),
        }
        drawn = {
            int(left): (face, edge)
            for face, edge, left, width in found[lane]
            if face != style.faint and width < 1
        }
        assert drawn == {p: looks[name] for p, name in enumerate(wanted[lane]) if name}
    assert length in [np.asarray(line.get_xdata())[0] for line in axes.lines]


def test_long_lanes_are_runs():
    case = (LONGNET, 1_000_000, 4, 4, None)
    figure = cache_figure(plan_of(*case), SIZE, 0, window=range(960_000, 1_000_000))
    found = bars(figure.axes[0])[4]  # the branch of 32,768
    kept = [(left, left + width) for face, _, left, width in found if face != LIGHT.faint]
    (dropped, (first, stop)) = kept
    assert dropped[1] == first
    assert first - 256 <= 30 * 32768 <= first + 256  # where the segment begins, by blocks of 256
    assert stop >= 1_000_000
    assert any("1 cell = 256 positions" in text.get_text() for text in figure.texts)


def test_drawn_lines_are_the_growth():
    figure = cache_figure(plan_of(LONGNET, 100_000, 4, 4, None), SIZE, 0)
    ours, dense = (np.asarray(line.get_xydata()).T.tolist() for line in figure.axes[1].lines[:2])
    assert dense[0] == dense[1] == ours[0]
    found = growth(LONGNET, 4, 0, [int(x) for x in ours[0]])
    assert ours[1] == list(found.rows)
    assert found.rows[-1] == 11_606
    assert "11,606 rows for any text beyond 32,768 positions" in [
        text.get_text() for text in figure.axes[1].texts
    ]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head", [0, 3])
def test_every_case_is_drawn(case, head):
    plan = plan_of(*case)
    for style in (LIGHT, DARK):
        drawn = io.BytesIO()
        cache_figure(plan, SIZE, head, style=style).savefig(drawn, format="png", dpi=50)
        assert drawn.tell() > 1000
    lines = cache_text(plan, SIZE, head)
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) <= 24  # a terminal
    assert "None" not in " ".join(lines)


@pytest.mark.parametrize("case", CASES[:4])
def test_text_shows_the_states(case):
    pattern, length, heads, kv_heads, documents = case
    if documents:
        length = documents[-1] - documents[-2]
    end = min(cache_end(pattern, length), 60)
    lines = cache_text(plan_of(*case), SIZE, heads - 1, window=range(end))
    wanted = states(pattern, kv_heads, kv_heads - 1, length, end)
    signs = {"dropped": "░", "kept": "█", "ahead": "·", "": " "}
    left = max(len(str(branch)) for branch in pattern.branches) + 1
    for branch, lane in zip(pattern.branches, wanted, strict=True):
        text = "".join(signs[name] for name in lane)
        assert f"{branch!s:<{left}}{text}".rstrip() in lines
    if length < end:
        (pointer,) = (line for line in lines if f"next position: {length:,}" in line)
        assert pointer.index("^") == left + length
    count = HeadCache(plan_of(*case), heads - 1).kept
    assert f" {count or 'no'} row" in " ".join(lines[:2])


def rda(*arguments):
    return CliRunner().invoke(app, ["draw", "cache", *arguments])


def test_a_picture_and_the_terminal(tmp_path):
    file = tmp_path / "cache.svg"
    words = ["--seq-len=1024M", "--num-heads=12", "--num-kv-heads=3", "--head=11", "--style=dark"]
    texts = []
    for _ in range(2):
        done = rda(*words, f"--out={file}", "--terminal")
        assert done.exit_code == 0, done.output
        *lines, wrote = done.output.splitlines()
        assert wrote == f"wrote {file}"
        assert lines[0].startswith("KV cache of head 11 (KV head 2) after 1,073,741,824 positions")
        assert "11,606 rows for any text" in done.output
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
        texts.append(file.read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head=12"], "must lie in [0, 12), the query heads; got 12"),
        (["--head=0,1"], "rda draw cache draws one head, as in --head 0; got 2"),
        (["--positions=5:5"], "0 <= START < STOP <= 10240, where the picture ends; got 5:5"),
        (["--positions=0:11K"], "<= 10240, where the picture ends; got 0:11264"),
        (["--documents=0,5"], "documents must rise from 0 to the sequence length 8192"),
        (["--seq-len=0"], "--seq-len must be >= 1, got 0"),
        (["--out=a.pdf"], "must be named *.png or *.svg; got 'a.pdf'"),
        (
            [f"--segment-lengths={'4,' * 24}4", f"--dilation-rates={'1,' * 24}1"],
            "the cache of at most 24 branches can be drawn; the pattern has 25",
        ),
    ],
)
def test_errors_say_what_is_allowed(arguments, message):
    done = rda(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert done.output.count("\n") == 1
