"""`rda draw` refuses options that change nothing in a picture, and takes those that do."""

import pytest
from typer.testing import CliRunner

from ring_dilated_attention.cli import app

# Causal: else layout "auto" is contiguous, too.
SMALL = ["--seq-len=64", "--segment-lengths=8,16,all", "--dilation-rates=1,2,4", "--causal"]
OTHERS = {
    **{"head-dim": "32", "batch-size": "3", "dtype": "fp32", "ranks": "3", "layout": "contiguous"},
    **{"exchange": "gather", "tflops": "1", "link-gb-s": "1", "head": "1", "positions": "8:32"},
}
"""Values other than the defaults."""
USED = {
    "pattern": {"head", "positions"},
    "exchange": OTHERS.keys() - {"exchange", "tflops", "link-gb-s"},
    "work": {"head-dim", "batch-size", "ranks"},
    "timeline": OTHERS.keys() - {"head", "positions"},
    "cache": {"head-dim", "batch-size", "dtype", "head", "positions"},
}
PICTURES = tuple(USED)


def rda(*arguments):
    return CliRunner().invoke(app, ["draw", *arguments])


@pytest.mark.parametrize("option", OTHERS)
@pytest.mark.parametrize("what", PICTURES)
def test_an_option_changes_the_picture_or_is_refused(what, option):
    plain, done = rda(what, *SMALL), rda(what, *SMALL, f"--{option}={OTHERS[option]}")
    assert plain.exit_code == 0
    if option in USED[what]:
        assert done.exit_code == 0, done.output
        assert done.output != plain.output
        return
    assert done.exit_code == 2
    others = ", ".join(picture for picture in PICTURES if option in USED[picture])
    said = f"--{option} changes nothing in rda draw {what}: leave it out; it is for {others}"
    assert said in done.output
    assert done.output.count("\n") == 1


def test_a_file_for_several_pictures_may_have_it(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("ranks = 4\n[draw]\nlayout = 'contiguous'\nhead = 1\n")
    for what in PICTURES:
        assert rda(what, *SMALL, f"--config={file}").exit_code == 0
    assert "--ranks changes nothing" in rda("cache", *SMALL, f"--config={file}", "--ranks=4").output


def test_a_style_needs_a_file_to_write(tmp_path):
    done = rda("work", *SMALL, "--style=dark")
    assert done.exit_code == 2
    assert "give --out too, or leave out --style" in done.output
    file = tmp_path / "run.toml"
    file.write_text(f"out = '{tmp_path / 'a.svg'}'\n")
    assert rda("work", *SMALL, "--style=dark", f"--config={file}").exit_code == 0
