"""`rda draw` and what it draws: the plan, read back from masks, figures and terminals."""

import importlib
import io
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch
from support.strategies import layouts, patterns
from typer.testing import CliRunner

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.checks import visible_counts
from ring_dilated_attention.cli import app
from ring_dilated_attention.draw import (
    DARK,
    LIGHT,
    NOBODY,
    CostModel,
    Grid,
    exchange_figure,
    exchange_text,
    pattern_figure,
    pattern_text,
    rows_sent,
    save,
    shown_to,
    timeline,
    timeline_figure,
    timeline_text,
    work_figure,
    work_text,
)
from ring_dilated_attention.plan import costs
from ring_dilated_attention.terminal import in_bytes

ROOT = Path(__file__).parents[2]
SIZE = costs.TensorSize(batch=2, head_dim=8, element_size=2)
THREE = DilatedPattern([8, 16, None], [1, 2, 4])
SPLIT = DilatedPattern([7, None], [3, 2], head_branches="split")
ODD = DilatedPattern([5, 13], [2, 7], head_offsets="blocked", zero_keys=True)
MAKE = {"contiguous": SequenceLayout.contiguous, "zigzag": SequenceLayout.zigzag}
CASES = [
    # pattern, length, ranks, layout, causal, documents
    (THREE, 48, 4, "zigzag", True, None),
    (THREE, 48, 4, "contiguous", False, [0, 5, 6, 31, 48]),
    (SPLIT, 37, 7, "zigzag", False, None),
    (ODD, 101, 3, "contiguous", True, None),
    (ODD, 1000, 8, "zigzag", True, [0, 500, 1000]),
    (DilatedPattern.dense(), 3, 5, "contiguous", True, None),  # two ranks hold nothing
    (DilatedPattern.dense(), 1, 1, "contiguous", False, None),
    (DilatedPattern([9], [4]), 2, 2, "contiguous", False, None),  # most heads see nothing
]


def plan_of(pattern, length, ranks, layout, causal, documents, heads=4, kv_heads=2):
    return plan_attention(
        pattern,
        MAKE[layout](length, ranks),
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


@settings(max_examples=100, deadline=None)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 4), st.data())
def test_masks_are_the_reference_s(pattern, layout, is_causal, heads, data):
    borders = sorted({0, layout.length, *data.draw(st.sets(st.integers(1, layout.length)))})
    options = {"is_causal": is_causal, "documents": borders}
    plan = plan_attention(pattern, layout, num_heads=heads, **options)
    counts = visible_counts(pattern, layout.length, heads, **options).numpy()
    coarse = Grid.of(layout.length, data.draw(st.integers(1, layout.length)))
    start = data.draw(st.integers(0, layout.length - 1))
    window = range(start, data.draw(st.integers(start + 1, layout.length)))
    for head in range(heads):
        shown = shown_to(plan, head, Grid.of(layout.length, layout.length))
        assert (shown.branches.sum(0) == counts[head]).all()
        held = np.where(counts[head] > 0, owners(layout), NOBODY)
        assert (shown.sender == held).all()
        blocks = np.zeros((coarse.count, coarse.count), dtype=bool)
        blocks[tuple(x // coarse.size for x in np.nonzero(counts[head]))] = True
        assert (shown_to(plan, head, coarse).branches.any(0) == blocks).all()
        part = shown_to(plan, head, Grid.of(layout.length, len(window), window))
        inside = slice(window.start, window.stop)
        assert (part.branches.sum(0) == counts[head][inside, inside]).all()


@settings(max_examples=40, deadline=None)
@given(patterns(), layouts(), st.booleans(), st.integers(1, 3))
def test_the_matrix_and_the_timeline_are_the_plan_s(pattern, layout, is_causal, heads):
    plan = plan_attention(pattern, layout, is_causal=is_causal, num_heads=2 * heads)
    sent, ranks = rows_sent(plan), range(layout.world_size)
    model = CostModel(tflops=1e-3, link_gb_s=0.01)
    for gathers in (None, False, True):
        found = timeline(plan, SIZE, model, gathers=gathers)
        for rank in ranks:
            moved = costs.traffic(plan.rank(rank), SIZE)
            assert SIZE.key_value_bytes(int(sent[rank].sum())) == moved.forward_sent
            own = [x for x in found.activities if x.rank == rank]
            received = sum(x.nbytes for x in own)
            assert received == moved.forward_received
            seconds = costs.flops(plan.rank(rank), SIZE) / 1e9
            assert found.seconds("compute", rank) == pytest.approx(seconds)
            assert found.seconds("receive", rank) == pytest.approx(received / 1e7)
            for lane in (("compute", "wait"), ("receive",)):
                busy = [x for x in own if x.kind in lane]
                assert all(a.stop <= b.start for a, b in pairwise(busy))
            arrivals = {x.stop for x in own if x.kind == "receive"}
            assert {x.stop for x in own if x.kind == "wait"} <= arrivals
            # Nothing is computed with rows of others that have not arrived.
            for peer in {x.peer for x in own if x.kind == "compute"} - {rank}:
                first = min(x.stop for x in own if x.kind == "receive" and x.peer == peer)
                begun = min(x.start for x in own if x.kind == "compute" and x.peer == peer)
                assert begun >= first


def test_a_slow_link_is_waited_for_and_a_fast_one_is_not():
    plan = plan_of(DilatedPattern.dense(), 4096, 4, "zigzag", True, None)
    slow = timeline(plan, SIZE, CostModel(tflops=1, link_gb_s=0.1))
    fast = timeline(plan, SIZE, CostModel(tflops=1, link_gb_s=1e6))
    assert slow.seconds("wait") > 0.5 * slow.total
    assert fast.seconds("wait") == 0
    assert fast.total == pytest.approx(max(costs.flops_by_rank(plan, SIZE)) / 1e12)


def squares(axes):
    """The colour of the cell of each square; of nested ones that of the last."""
    found = {}
    for patch in axes.patches:
        if isinstance(patch, PathPatch):
            for corners in np.asarray(patch.get_path().vertices).reshape(-1, 5, 2):
                k, q = np.floor(corners[:4].mean(0)).astype(int)
                found[q, k] = to_hex(patch.get_facecolor())
    return found


@pytest.mark.parametrize(("style", "case"), [(LIGHT, CASES[0]), (DARK, CASES[1])])
def test_drawn_cells_are_the_mask(style, case):
    plan = plan_of(*case)
    counts = visible_counts(
        plan.pattern, 48, 2, is_causal=plan.is_causal, documents=case[-1]
    ).numpy()
    for head, axes in zip((1, 2), pattern_figure(plan, (1, 2), style=style).axes, strict=True):
        shown = shown_to(plan, head // 2, Grid.of(48, 48))
        last = len(shown.branches) - 1 - shown.branches[::-1].argmax(0)
        colors = style.branch_colors(3)
        wanted = {
            (q, k): colors[last[q, k]] for q, k in zip(*np.nonzero(counts[head // 2]), strict=True)
        }
        assert squares(axes) == wanted
    held = owners(plan.layout)
    axes = exchange_figure(plan, SIZE, 3, style=style).axes[0]
    assert squares(axes) == {
        (q, k): style.own if held[q] == held[k] else style.rank_color(held[k])
        for q, k in zip(*np.nonzero(counts[1]), strict=True)
    }


def test_long_masks_are_drawn_as_pixels():
    plan = plan_of(*CASES[4])
    axes = pattern_figure(plan, (0,)).axes[0]
    pixels = np.asarray(axes.images[0].get_array())
    shown = shown_to(plan, 0, Grid(0, 1000, 8))
    empty = [int(LIGHT.faint[i : i + 2], 16) for i in (1, 3, 5)]
    assert np.array_equal(np.any(pixels != empty, axis=-1), shown.branches.any(0))
    assert any("8 × 8 positions" in text.get_text() for text in axes.figure.texts)


def test_bars_and_matrix_are_the_plan_s():
    plans = {name: plan_of(DilatedPattern.dense(), 96, 4, name, True, None) for name in MAKE}
    for axes, plan in zip(work_figure(plans, SIZE).axes, plans.values(), strict=True):
        work = np.array(costs.flops_by_rank(plan, SIZE))
        assert np.allclose([bar.get_height() for bar in axes.containers[0]], work / work.mean())
    plan = plan_of(*CASES[0])
    sent = rows_sent(plan)
    image = np.asarray(exchange_figure(plan, SIZE).axes[1].images[0].get_array())
    assert np.allclose(image, sent / sent.max())


@pytest.mark.parametrize(("ranks", "summed"), [(100, 100), (200, 36)])
def test_the_bytes_of_many_ranks_are_those_of_all_or_say_of_which(ranks, summed):
    """The matrix has the first 36 ranks; the last ones of a causal sequence receive the most."""
    plan = plan_of(DilatedPattern.dense(), 4 * ranks, ranks, "contiguous", True, None)
    rows = [plan.rank(rank) for rank in range(summed)]
    sent = sum(x.received_rows(y) for x in rows for y in range(summed) if x.index != y)
    lines = exchange_text(plan, SIZE)
    text, total = " ".join(lines), in_bytes(SIZE.key_value_bytes(sent))
    scope = "in all" if summed == ranks else f"among the first {summed} of {ranks} ranks"
    assert f"all heads: {total} {scope};" in text
    assert f"Drawn: the first 36 of {ranks} ranks." in lines
    figure = exchange_figure(plan, SIZE)
    said = " ".join(text.get_text() for axes in figure.axes for text in axes.texts)
    assert f"{total} in all" in said if summed == ranks else "among the first 64 of" in said


@pytest.mark.parametrize("case", CASES)
def test_every_picture_of_every_case(case, tmp_path):
    plan = plan_of(*case)
    plans = {"contiguous": plan, "zigzag": plan}
    for figure in (
        pattern_figure(plan, (0, 3), style=DARK),
        exchange_figure(plan, SIZE, 3, layout_name="any"),
        work_figure(plans, SIZE),
        timeline_figure(plan, SIZE),
    ):
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=50)
        assert drawn.tell() > 1000
    for lines in (
        pattern_text(plan, (0, 3)),
        exchange_text(plan, SIZE, 3, layout_name="any"),
        work_text(plans, SIZE),
        timeline_text(plan, SIZE),
    ):
        assert all(len(line) <= 80 for line in lines)


def test_text_has_a_unit_for_any_amount():
    plan = plan_of(DilatedPattern.dense(), 1 << 40, 2, "contiguous", False, None)
    lines = exchange_text(plan, costs.TensorSize(batch=1 << 20, head_dim=128, element_size=2), 0)
    assert lines[-3].startswith("EiB from")


def test_text_shows_the_mask():
    plan = plan_of(THREE, 20, 3, "zigzag", True, None)
    counts = visible_counts(THREE, 20, 2, is_causal=True).numpy()[1]
    rows = pattern_text(plan, (2,))[-20:]
    cells = [[line[3 + 2 * k : 5 + 2 * k] for k in range(20)] for line in rows]
    first = shown_to(plan, 1, Grid.of(20, 20)).branches.argmax(0)
    for q in range(20):
        for k in range(20):
            sign = str(first[q, k] + 1)
            wanted = ["· ", 2 * sign, f"{sign}+", f"{sign}+"][counts[q, k]]
            assert cells[q][k].ljust(2) == wanted.ljust(2)
    lines = exchange_text(plan, SIZE, 2)
    start = lines.index("Head 2 (KV head 1)") + 2
    held = owners(plan.layout)
    for q, line in enumerate(lines[start : start + 20]):
        for k in range(20):
            wanted = "· " if not counts[q, k] else 2 * ("█" if held[k] == held[q] else str(held[k]))
            assert line[5 + 2 * k : 7 + 2 * k].ljust(2) == wanted
    matrix = [line.split()[2:] for line in lines[-3:]]
    sent = rows_sent(plan)
    assert lines[-4].startswith("B from")
    for i in range(3):
        for j in range(3):
            nbytes = SIZE.key_value_bytes(int(sent[i, j]))
            assert matrix[i][j] == (str(nbytes) if nbytes else "·")


def test_text_shows_the_timeline():
    plan = plan_of(DilatedPattern.dense(), 4096, 3, "zigzag", True, None)
    model = CostModel(tflops=1, link_gb_s=0.2)
    found = timeline(plan, SIZE, model)
    lines = timeline_text(plan, SIZE, model)
    computes = [line[15:] for line in lines if " compute " in line and line.startswith("rank")]
    assert len(computes) == 3
    for rank, bar in enumerate(computes):
        share = found.seconds("wait", rank) / found.total
        assert bar.count(".") / (80 - 15) == pytest.approx(share, abs=0.05)


def rda(*arguments):
    return CliRunner().invoke(app, ["draw", *arguments])


BILLION = ["--seq-len=1024M", "--segment-lengths=2048,1M,all", "--dilation-rates=1,4,65536"]


@pytest.mark.parametrize("what", ["pattern", "exchange", "work"])
def test_a_billion_tokens_on_4096_ranks(what, tmp_path):
    ranks = [] if what == "pattern" else ["--ranks=4096"]
    done = rda(what, *BILLION, *ranks, "--terminal", f"--out={tmp_path / 'a.png'}")
    assert done.exit_code == 0, done.output
    *lines, wrote = done.output.splitlines()
    assert wrote == f"wrote {tmp_path / 'a.png'}"
    assert all(len(line) <= 80 for line in lines)
    said = {"pattern": "positions, set if any", "exchange": "the first 36 of 4,096 ranks"}
    assert said.get(what, "the largest of 256 ranks") in " ".join(done.output.split())
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_svg_is_the_same_again_and_names_no_date(tmp_path):
    options = ["--seq-len=48", "--pattern=longnet", "--ranks=3", "--causal"]
    files = [tmp_path / name for name in ("a.svg", "b.SVG")]
    for file in files:
        done = rda("exchange", *options, f"--out={file}", "--style=dark")
        assert done.output == f"wrote {file}\n"
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
    assert files[0].read_bytes() == files[1].read_bytes()
    assert b"<dc:date>" not in files[0].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["foo"], "'exchange', 'work', 'timeline', 'cache'; got 'foo'"),
        (["pattern", "--head=12"], "must lie in [0, 12), the query heads; got 12"),
        (["pattern", "--head=0,0"], "heads to draw must be 1 to 6 different ones"),
        (["pattern", "--head=0,1,2,3,4,5,6"], "heads to draw must be 1 to 6 different ones"),
        (["exchange", "--head=0,1"], "draws one head, as in --head 0; got 2"),
        (["pattern", "--positions=5"], "--positions must be START:STOP, as in 0:4K; got '5'"),
        (["pattern", "--positions=5:9000"], "0 <= START < STOP <= 8192"),
        (["pattern", "--seq-len=8k5"], "a whole number such as 8192, 256K or 1M; got '8k5'"),
        (["pattern", "--out=a.pdf"], "must be named *.png or *.svg; got 'a.pdf'"),
        (["pattern", "--out=/no/such/folder/a.png"], "there is no folder '/no/such/folder'"),
        (["pattern", "--style=blue"], "style must be one of 'light', 'dark'; got 'blue'"),
        (["exchange", "--layout=striped"], "'auto', 'contiguous', 'zigzag'; got 'striped'"),
        (["timeline", "--exchange=mail"], "'auto', 'ring', 'gather'; got 'mail'"),
        (["timeline", "--ranks=33"], "at most 32 ranks; got 33"),
        (["timeline", "--tflops=0"], "--tflops must be finite and above 0"),
        (["timeline", "--link-gb-s=nan"], "--link-gb-s must be finite and above 0"),
        (["work", "--ranks=0"], "ranks must be >= 1"),
        (["pattern", "--documents=0,5"], "documents must rise from 0 to the sequence length 8192"),
    ],
)
def test_errors_say_what_is_allowed(arguments, message):
    done = rda(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert done.output.count("\n") == 1


def test_too_many_steps_and_documents_are_refused():
    many = plan_of(DilatedPattern([1 << 28], [1]), 1 << 30, 32, "contiguous", False, None, 64, 64)
    with pytest.raises(ValueError, match=r"steps over all ranks .* at most 20,000 can be drawn"):
        timeline(many, SIZE, CostModel(), gathers=False)
    packed = plan_of(THREE, 5000, 2, "contiguous", False, list(range(5001)))
    for function in (pattern_figure, pattern_text):
        with pytest.raises(ValueError, match="at most 4,096 documents can be drawn; got 5,000"):
            function(packed)


@pytest.fixture
def docs_figures(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("figures")


def test_figures_of_the_docs_are_there_in_both_styles_and_small(docs_figures):
    wanted = {f"{name}-{style}.svg" for name in docs_figures.FIGURES for style in ("light", "dark")}
    assert wanted == {path.name for path in docs_figures.FOLDER.glob("*.svg")}
    for name in wanted:
        file = docs_figures.FOLDER / name
        assert file.stat().st_size < 200_000
        assert ElementTree.parse(file).getroot().tag.endswith("svg")


def test_a_figure_of_the_docs_is_the_same_again(docs_figures, tmp_path):
    drawn = []
    for name in ("a.svg", "b.svg"):
        figure = docs_figures.FIGURES["hero"](LIGHT).figure
        drawn.append(save(figure, tmp_path / name, transparent=True).read_bytes())
    assert drawn[0] == drawn[1]


def test_drawing_leaves_no_global_state_and_importing_is_light():
    script = """
import sys
import ring_dilated_attention.cli
assert "matplotlib" not in sys.modules
import ring_dilated_attention
assert "ring_dilated_attention.draw" not in sys.modules
import ring_dilated_attention.draw as draw
assert "matplotlib" not in sys.modules
plan = ring_dilated_attention.plan_attention(
    ring_dilated_attention.DilatedPattern.dense(),
    ring_dilated_attention.SequenceLayout.contiguous(9, 2), is_causal=True)
draw.pattern_figure(plan)
assert "matplotlib.pyplot" not in sys.modules
print("light")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "light", done.stderr


def test_only_png_and_svg_are_written(tmp_path):
    plan = plan_of(*CASES[0])
    with pytest.raises(ValueError, match=r"must be named \*\.png or \*\.svg; got 'a\.jpg'"):
        save(pattern_figure(plan), tmp_path / "a.jpg")
