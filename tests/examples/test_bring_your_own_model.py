"""The example "bring your own model", as its user runs it."""

import re

import pytest
from support.launched import EXAMPLES, run_program

SCRIPT = EXAMPLES / "bring_your_own_model.py"
SMALL = ("--seq-len=203", "--steps=2")  # a prime, so that shards are uneven


@pytest.mark.parametrize("ranks", [0, 2])
def test_bring_your_own_model_agrees_with_one_process(ranks, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("any text at all, é\n" * 30)
    done = run_program(SCRIPT, [f"--text={text}", *SMALL], ranks)
    assert done.returncode == 0, done.stderr
    found = rf"loss 5\.\d+ to \d\.\d+ in 2 steps; ranks: {ranks or 1}\n"
    assert re.search(found, done.stdout)
    assert re.search(r"from 1 process: loss \de[-+]\d\d, gradients \de[-+]\d\d\n", done.stdout)


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


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bring_your_own_model_tells_a_mistake(mistake, tmp_path):
    right, wrong = MISTAKES[mistake]
    code = SCRIPT.read_text()
    assert code.count(right) == 1
    script = tmp_path / "mistaken.py"
    script.write_text(code.replace(right, wrong))
    done = run_program(script, [f"--text={SCRIPT}", *SMALL], 2)
    assert "relative difference from 1 process" in done.stdout, done.stderr
    assert done.returncode == 1


def test_bring_your_own_model_is_short_and_tells_of_a_text_that_is_too_short(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    done = run_program(SCRIPT, [f"--text={tmp_path / 'short.txt'}"], 0)
    assert done.returncode == 1
    assert "has 5 bytes; --seq-len 2048 needs more" in done.stderr
    assert len(SCRIPT.read_text().splitlines()) < 120
