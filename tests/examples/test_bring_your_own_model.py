"""The example "bring your own model", as its user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.launched import Ended, run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "bring_your_own_model.py"
SMALL = ("--seq-len=203", "--steps=2")  # a prime, so that shards are uneven


def done(*arguments: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str] | Ended:
    script, *given = arguments
    if ranks > 1:
        return run_program(Path(script), list(map(str, given)), ranks)
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_agrees_with_one_process(ranks: int, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("any text at all, é\n" * 30)
    result = done(SCRIPT, f"--text={text}", *SMALL, ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert re.search(rf"loss 5\.\d+ to \d\.\d+ in 2 steps; ranks: {ranks}\n", result.stdout)
    assert re.search(r"from 1 process: loss \de[-+]\d\d, gradients \de[-+]\d\d\n", result.stdout)


# Lines that know of the ranks, as one would write them for one process.
MISTAKES = {
    "positions": (
        "layout.positions(rank, device=device)",
        "torch.arange(layout.local_length(rank))",
    ),
    "mean": ('reduction="sum") / args.seq_len', 'reduction="mean")'),
    "sum": (
        "for tensor in (loss, *(p.grad for p in model.parameters())):",
        "for tensor in (loss,):",
    ),
}


@pytest.mark.parametrize("mistake", ["positions", "mean", "sum"])
def test_it_tells_a_mistake(mistake: str, tmp_path: Path) -> None:
    right, wrong = MISTAKES[mistake]
    code = SCRIPT.read_text()
    assert code.count(right) == 1
    script = tmp_path / "mistaken.py"
    script.write_text(code.replace(right, wrong))
    result = done(script, f"--text={SCRIPT}", *SMALL, ranks=2)
    assert "relative difference from 1 process" in result.stdout, result.stderr
    assert result.returncode == 1


def test_a_text_that_is_too_short_is_told(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    result = done(SCRIPT, f"--text={tmp_path / 'short.txt'}")
    assert result.returncode == 1
    assert "has 5 bytes; --seq-len 2048 needs more" in result.stderr


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 120
