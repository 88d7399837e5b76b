"""`rda` where standard output or standard error is closed or full: real processes, exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ring_dilated_attention.cli import app

RDA = f"{sys.executable} -m ring_dilated_attention.cli"
SMALL = (
    *("--device=cpu", "--seq-len=64", "--num-layers=1", "--embed-dim=16", "--ffn-dim=16"),
    *("--num-heads=2", "--segment-lengths=8,all", "--dilation-rates=1,2", "--eval-windows=1"),
)
pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def started(line):
    """A command line of the shell, whose standard streams it sends somewhere."""
    return subprocess.Popen(
        ["sh", "-c", f"{RDA} {line}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("arguments", ["--version", "plan --help"])
def test_a_full_standard_output_is_one_line(arguments):
    process = started(f"{arguments} >/dev/full")
    assert process.communicate() == (
        "",
        "error: cannot write standard output: No space left on device\n",
    )
    assert process.returncode == 2


def test_an_error_without_standard_error_is_an_exit_code():
    for where in ("2>&-", "2>/dev/full"):
        process = started(f"plan --seq-len=0 {where}")
        assert process.communicate() == ("", "")
        assert process.returncode == 2


def test_a_sample_needs_standard_output_alone(tmp_path):
    """Progress and the rate go to standard error, which may be closed or full."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("some text of a few words\n" * 99)
    trained = CliRunner().invoke(
        app,
        ["train", f"--data={text}", f"--out={run}", "--steps=1", *SMALL],
    )
    assert trained.exit_code == 0, trained.output
    sample = f"sample --checkpoint {run} --prompt some --max-new-tokens 5"
    closed, full, no_output = (
        started(f"{sample} {where}") for where in ("2>&-", "2>/dev/full", ">&-")
    )
    for process in (closed, full):
        out, _ = process.communicate()
        assert process.returncode == 0
        assert out.startswith("some")
        assert out.endswith("\n")
    _, error = no_output.communicate()
    assert error == "error: standard output is closed, and the text would be lost\n"
    assert no_output.returncode == 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_whose_reader_goes_away_leaves_a_checkpoint(tmp_path, ranks):
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("some text of a few words\n" * 99)
    options = [*SMALL, "--steps=100000", "--eval-every=10", "--save-every=100000"]
    with subprocess.Popen(
        [*RDA.split(), "train", f"--data={text}", f"--out={run}", f"--ranks={ranks}", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 10:"):
                break
        process.stdout.close()
        process.wait(timeout=120)
    (saved,) = (run / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step_")) > 10
