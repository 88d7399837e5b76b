"""Command lines that cannot be run: one line says why, and nothing has been started."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ring_dilated_attention.cli import app
from ring_dilated_attention.cli.common import MOST_CHARACTERS

HUGE, BEYOND = 2**62, 2**70  # 2**70 is no int64
MANY = f"--segment-lengths={'4,' * 9999}4 --dilation-rates={'1,' * 9999}1"

OF_ALL = [
    ("--seq-len=0", "--seq-len must be >= 1, got 0"),
    ("--seq-len=-1", "--seq-len must be >= 1, got -1"),
    (f"--seq-len={HUGE}", "seq_len must be <= 281,474,976,710,656 in this command"),
    (f"--seq-len={BEYOND}", "seq_len must be <="),
    (f"--seq-len={'9' * 5000}", "--seq-len must be a whole number"),
    ("--seq-len=nan", "--seq-len must be a whole number such as 8192, 256K or 1M; got 'nan'"),
    ("--seq-len=1e6", "got '1e6'"),
    ("--seq-len=1G", "got '1G'"),
    ("--seq-len=0K", "--seq-len must be >= 1, got 0"),
    ("--seq-len=1000000000M", "seq_len must be <= 281,474,976,710,656"),
    ("--seq-len=", "got ''"),
    ("--num-heads=0", "--num-heads must be >= 1, got 0"),
    (f"--num-heads={HUGE}", "num_heads must be <= 4,096"),
    (f"--num-heads={BEYOND}", "num_heads must be <= 4,096"),
    ("--num-heads=4 --num-kv-heads=3", "multiple of num_kv_heads; got 4 and 3"),
    (f"--num-kv-heads={HUGE}", "num_kv_heads"),
    ("--num-kv-heads=0", "--num-kv-heads must be >= 1, got 0"),
    ("--head-dim=0", "--head-dim must be >= 1, got 0"),
    (f"--head-dim={HUGE}", "head_dim must be <= 4,096"),
    (f"--head-dim={BEYOND}", "head_dim must be <= 4,096"),
    ("--batch-size=-1", "--batch-size must be >= 1, got -1"),
    (f"--batch-size={HUGE}", "batch_size must be <= 1,048,576"),
    (f"--batch-size={BEYOND}", "batch_size must be <= 1,048,576"),
    ("--dtype=int4", "--dtype must be one of bf16, fp16, fp32, fp64"),
    ("--dtype=", "--dtype must be one of bf16, fp16, fp32, fp64"),
    (
        "--segment-lengths= --dilation-rates=",
        "--segment-lengths must be a whole number such as 8192, 256K or 1M; got ''",
    ),
    (
        "--segment-lengths=, --dilation-rates=1",
        "--segment-lengths must be a whole number such as 8192, 256K or 1M; got ''",
    ),
    ("--segment-lengths=4,8 --dilation-rates=1", "one value each per branch"),
    ("--segment-lengths=0 --dilation-rates=1", "--segment-lengths must be >= 1, got 0"),
    ("--segment-lengths=-4 --dilation-rates=1", "--segment-lengths must be >= 1, got -4"),
    (
        "--segment-lengths=nan --dilation-rates=1",
        "--segment-lengths must be a whole number such as 8192, 256K or 1M; got 'nan'",
    ),
    (
        "--segment-lengths=inf --dilation-rates=1",
        "--segment-lengths must be a whole number such as 8192, 256K or 1M; got 'inf'",
    ),
    ("--segment-lengths=4 --dilation-rates=0", "--dilation-rates must be >= 1, got 0"),
    (
        "--segment-lengths=4 --dilation-rates=1.5",
        "--dilation-rates must be a whole number; got '1.5'",
    ),
    (f"--segment-lengths={BEYOND} --dilation-rates=1", "segment_lengths must be <="),
    (f"--segment-lengths=4 --dilation-rates={BEYOND}", "dilation_rates must be <="),
    (
        f"--segment-lengths={'x' * 9999} --dilation-rates=1",
        "--segment-lengths must be a whole number",
    ),
    (MANY, "a pattern has at most 1000 branches"),
    ("--head-offsets=both", "--head-offsets must be one of 'interleaved', 'blocked'"),
    ("--no-such-option", "No such option"),
    ("5", "unexpected extra argument"),
]
OF_RANKS = [
    ("--ranks=0", "--ranks must be >= 1, got 0"),
    ("--ranks=-3", "--ranks must be >= 1, got -3"),
    ("--ranks=1000000", "ranks must be <="),
    (f"--ranks={HUGE}", "ranks must be <="),
    (f"--ranks={BEYOND}", "ranks must be <="),
    ("--ranks=inf", ""),
    ("--ranks=", ""),
]
OF_PLANS = [
    *OF_RANKS,
    ("--layout=spiral", "--layout must be one of 'auto', 'contiguous', 'zigzag'; got 'spiral'"),
    ("--head-branches=none", "--head-branches must be one of 'all', 'split'"),
    ("--documents=", "--documents must be a whole number"),
    ("--documents=0", "documents must rise from 0"),
    ("--documents=5,100", "documents must rise from 0"),
    ("--documents=0,50,50,100", "documents must rise from 0"),
    ("--documents=0,70,30,100", "documents must rise from 0"),
    (f"--documents=0,{BEYOND}", "documents must rise from 0"),
    ("--documents=a,b", "--documents must be a whole number such as 8192, 256K or 1M; got 'a'"),
]
BAD = {
    "plan --seq-len=100": [
        *OF_ALL,
        *OF_PLANS,
        ("--show-ranks=4", "--show-ranks must name ranks from 0 to 3, of 4; got 4"),
        ("--show-ranks=-1", "--show-ranks must be >= 0, got -1"),
        ("--show-ranks=x", "--show-ranks must be a whole number; got 'x'"),
        ("--gpus-per-host=2", "--gpus-per-host 2 has a meaning with --hosts only"),
        ("--link-gb-s=3", "--link-gb-s 3.0 has a meaning with --hosts only"),
        ("--network-gb-s=3", "--network-gb-s 3.0 has a meaning with --hosts only"),
        ("--hosts=1 --link-gb-s=0", "--link-gb-s must be finite and above 0; got 0.0"),
        ("--hosts=1 --network-gb-s=nan", "--network-gb-s must be finite and above 0; got nan"),
        ("--seq-len=100000000 --ranks=3 --check", "pairs of positions, more than 2,000,000: take"),
        ("--check --num-heads=4096", "more than 2,000,000"),
        ("--check --check-limit=10", "more than 10: take a shorter length"),
        ("--check --check-limit=0", "--check-limit must be >= 1, got 0"),
        # Few pairs, but every position is looked at.
        (
            "--check --seq-len=10000000 --segment-lengths=all --dilation-rates=10000000 "
            "--num-heads=1",
            "would enumerate 10,000,",
        ),
    ],
    "plan --decode --seq-len=100": [*OF_ALL, *OF_PLANS],
    "simulate --seq-len=100 --device=cpu": [
        *OF_ALL,
        *OF_PLANS,
        ("--seq-len=10000000000 --head-dim=4096", "GiB at least, and there are"),
        ("--pattern=plaid", "--pattern must be one of 'longnet'"),
        ("--show-ranks=4", "--show-ranks must name ranks from 0 to 3, of 4; got 4"),
        ("--pattern=", "--pattern must be one of 'longnet'"),
        ("--segment-lengths=4", "--segment-lengths and --dilation-rates go together"),
        ("--exchange=bus", "--exchange must be one of 'auto', 'ring', 'gather'"),
        ("--backend=abacus", "--backend must be one of 'auto'"),
        ("--device=tpu", "--device must be one of 'auto', 'cpu', 'cuda'"),
        ("--seed=-1", "--seed must be >= 0, got -1"),
        (f"--seed={BEYOND}", "--seed must be from 0 to"),
        ("--json=/no/such/folder/file", "No such file or directory"),
        ("--json=", "--json must not be empty; for the current folder, write ."),
        ("--config=", "--config must not be empty"),
        ("--json=FOLDER", "is a directory"),
        ("--json=FIFO", "is a FIFO"),
        ("--json=FILE/below", "Not a directory"),
    ],
    "verify": [
        *OF_RANKS,
        ("--ranks=x", "--ranks must be a whole number; got 'x'"),
        ("--device=tpu", "--device must be one of 'auto', 'cpu', 'cuda'; got 'tpu'"),
        ("--device=cuda --ranks=100", "a CUDA device"),
        ("--seed=-1", "--seed must be >= 0, got -1"),
        (f"--seed={BEYOND}", "--seed must be from 0 to"),
        ("--timeout=0", "timeout must be > 0 and <= 2,592,000 seconds, got 0.0"),
        ("--timeout=-1", "timeout must be > 0"),
        ("--timeout=nan", "timeout must be > 0 and <= 2,592,000 seconds, got nan"),
        ("--timeout=inf", "timeout must be > 0"),
        ("--timeout=1e30", "timeout must be > 0"),
        ("--timeout=soon", "--timeout must be a number; got 'soon'"),
    ],
    "bench --device=cpu --out=OUT": [
        *OF_ALL,
        *OF_RANKS,
        ("--seq-len=10000000000 --head-dim=4096", "GiB at least, and there are"),
        ("--seq-len=10000000000 --head-dim=4096 --ranks=2", "GiB at least, and there are"),
        ("--seq-len=9 --ranks=2,x", "--ranks must be a whole number; got 'x'"),
        ("--pattern=shortnet", "--pattern must be one of 'longnet', 'gigapath'"),
        ("--segment-lengths=8", "--segment-lengths and --dilation-rates go together"),
        ("--device=tpu", "--device must be one of 'auto', 'cpu', 'cuda'"),
        ("--seq-len=9 --backend=cudnn", "it runs on cuda, the inputs are on cpu"),
        ("--repeats=0", "--repeats must be >= 1, got 0"),
        (f"--repeats={BEYOND}", "repeats must be <= 1,048,576"),
        ("--seconds=nan", "seconds must be > 0 and <= 2,592,000 seconds, got nan"),
        ("--seconds=inf", "seconds must be > 0"),
        ("--seconds=0", "seconds must be > 0"),
        ("--ranks=2 --sample-ms=nan", "sample_ms must be from 0 to 600,000, got nan"),
        ("--ranks=2 --sample-ms=inf", "sample_ms must be from 0 to"),
        ("--ranks=2 --timeout=0", "timeout must be > 0"),
        ("--ranks=2 --timeout=nan", "timeout must be > 0"),
        ("--timeout=0", "timeout must be > 0"),
        ("--ranks=2 --scaling=super", "--scaling must be one of 'strong', 'weak'"),
        ("--ranks=2 --layout=spiral", "--layout must be one of"),
        ("--seed=-1", "--seed must be >= 0, got -1"),
        (f"--seed={BEYOND}", "--seed must be from 0 to"),
        ("--out=FILE", "File exists"),
        ("--out=FILE/below", "Not a directory"),
        ("--out=FIFO", "File exists"),
        ("--out=TAKEN", "results.json is a FIFO"),
        ("--out=TAKEN --ranks=2", "results.json is a FIFO"),
    ],
    "draw": [("", "draw needs WHAT: one of pattern, exchange, work, timeline, cache")],
    "sample": [("--prompt=x --checkpoint=/nowhere", "in /nowhere: no such folder")],
    "": [
        ("fly", "No such command 'fly'; there are train, sample, export,"),
        ("--fast", "No such option"),
    ],
}
LINES = [(start, line, reason) for start, lines in BAD.items() for line, reason in lines]


def named(line):
    return line if len(line) < 80 else f"{line[:60]}... of {len(line)}"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Paths by name: of a file, a folder, a FIFO, and a folder whose results are a FIFO."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "FILE").touch()
    (folder / "FOLDER").mkdir()
    (folder / "TAKEN").mkdir()
    os.mkfifo(folder / "FIFO")
    os.mkfifo(folder / "TAKEN" / "results.json")
    return folder


@pytest.mark.parametrize(
    ("start", "line", "reason"),
    LINES,
    ids=[f"{start.split(' ')[0]} {named(line)}".strip() for start, line, _ in LINES],
)
def test_one_line_says_why(start, line, reason, places):
    words = f"{start} {line}".split()
    for name in ("FILE", "FOLDER", "FIFO", "TAKEN", "OUT"):
        words = [word.replace(f"={name}", f"={places / name}") for word in words]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    is_no_int64 = str(BEYOND) in line and "below 2**63" in done.stderr
    assert reason in done.stderr or is_no_int64
    assert len(done.stderr.strip().splitlines()) == 1
    assert len(done.stderr.strip()) <= MOST_CHARACTERS


def test_as_a_program():
    """A usage error, without arguments, and help."""
    for words, code, text in (
        (["sample"], 2, "error: sample needs --prompt: text to continue"),
        ([], 0, "Usage: "),
        (["--help"], 0, "Usage: "),
    ):
        command = [sys.executable, "-m", "ring_dilated_attention.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == code
        assert text in (done.stderr if code else done.stdout)
        assert len(done.stderr.splitlines()) == (code > 0)


def test_a_check_within_a_higher_limit():
    line = "plan --seq-len=300 --num-heads=1 --segment-lengths=all --dilation-rates=1 --check"
    for limit, code in ((1, 2), (100_000, 0)):
        done = CliRunner().invoke(app, [*line.split(), f"--check-limit={limit}"])
        assert done.exit_code == code, done.output
    assert "proven" in done.output
