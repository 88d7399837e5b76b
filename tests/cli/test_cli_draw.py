"""`rda draw`: the mask in the terminal, pictures in files, one line for what is refused."""

import pytest
from typer.testing import CliRunner

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.cli import app
from ring_dilated_attention.draw import mask_text

SMALL = ["--segment-lengths=8,16,all", "--dilation-rates=1,2,4", "--causal", "--heads=4"]


def rda(*arguments):
    return CliRunner().invoke(app, ["draw", *arguments])


@pytest.mark.parametrize(("ranks", "by"), [(1, "branch"), (3, "rank")])
def test_rda_draw_prints_the_mask(ranks, by):
    done = rda(*SMALL, "--seq-len=50", f"--ranks={ranks}", "--head=1")
    pattern = DilatedPattern([8, 16, None], [1, 2, 4])
    layout = SequenceLayout.named("auto", 50, ranks, is_causal=True)
    plan = plan_attention(pattern, layout, is_causal=True, num_heads=4)
    assert done.exit_code == 0, done.output
    assert done.output.rstrip() == mask_text(plan, 1, by=by, in_color=False).plain.rstrip()


@pytest.mark.parametrize("what", ["mask", "exchange", "work", "timeline", "cache"])
def test_rda_draw_writes_pictures_that_differ_by_style_and_length(what, tmp_path):
    written = []
    for length, style in ((50, "light"), (50, "dark"), (70, "light")):
        file = tmp_path / f"{length}-{style}.svg"
        options = [f"--seq-len={length}", f"--style={style}", "--ranks=3", f"--out={file}"]
        done = rda(what, *SMALL, *options)
        assert done.exit_code == 0, done.output
        assert done.output == f"wrote {file}\n"
        written.append(file.read_bytes())
    assert len(set(written)) == 3


def test_rda_draw_takes_a_billion_positions_on_many_ranks(tmp_path):
    billion = ["--seq-len=1G", "--segment-lengths=2048,1M,all", "--dilation-rates=1,4,65536"]
    done = rda(*billion, "--ranks=256")
    assert done.exit_code == 0, done.output
    assert "1 cell = 32M × 32M positions" in done.output
    done = rda("exchange", *billion, "--ranks=256", f"--out={tmp_path / 'a.png'}")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["foo"], "'foo' is not one of"),
        (["--head=12"], "--head must lie in [0, 12), the query heads; got 12"),
        (["cache"], "rda draw cache needs --out; a terminal shows the mask alone"),
        (["--out=a.pdf"], "--out must be named *.png or *.svg; got 'a.pdf'"),
        (["--out=/no/such/folder/a.png"], "/no/such/folder/a.png cannot be written"),
        (["--style=blue"], "'blue' is not one of"),
        (["timeline", "--ranks=33", "--out=a.svg"], "at most 32 ranks; got 33"),
        (["--documents=0,5"], "documents must rise from 0 to the sequence length 8192"),
    ],
)
def test_rda_draw_refuses(arguments, message):
    done = rda(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert done.output.count("\n") == 1
