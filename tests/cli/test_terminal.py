"""What the commands show: every number whole at 80 columns and in a pipe, progress, no colours."""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.bench_tables import bench_tables
from support.cli_tables import cli_tables
from support.small_ceilings import measure_little
from typer.testing import CliRunner

from ring_dilated_attention import DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.checks import Case, simulate
from ring_dilated_attention.cli import (
    app,
)
from ring_dilated_attention.terminal import (
    BYTES,
    FLOP,
    SECONDS,
    Column,
    Progress,
    Table,
    amounts,
    console,
    count_of,
    in_bytes,
    in_seconds,
    make_console,
    progress,
    show_table,
    show_text,
)

pytestmark = pytest.mark.xdist_group("terminal")  # its fixtures are made once

WIDTHS = (80, 40, console.UNLIMITED)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def all_tables() -> list[Table]:
    with pytest.MonkeyPatch.context() as patch:
        measure_little(patch)
        return [*cli_tables(), *bench_tables()]


def printed(table: Table, width: int) -> list[str]:
    """Its lines as a terminal of that width, or a pipe, would get them."""
    file = StringIO()
    show_table(Console(file=file, width=width), table)
    return file.getvalue().splitlines()


def check_whole(table: Table, width: int) -> int:
    """Every cell stands in the printed table, as often as its part is; returns how many parts."""
    lines = printed(table, width)
    count = len(table.parts(width))
    words = Counter(word for line in lines for word in line.split())
    expected = Counter[str]()
    for columns, times in ((table.keys, count), (table.columns, 1)):
        for column in columns:
            texts = [*column.cells, column.heading]
            for word in (word for text in texts for word in text.split()):
                expected[word] += times
    expected += Counter(table.note.split())
    numbered = [f"{table.title} ({i} of {count})" for i in range(1, count + 1)]
    titles = [table.title] if count == 1 else numbered
    expected += Counter(word for title in titles for word in title.split())
    rules = Counter(word for word in words.elements() if set(word) == {"─"})
    assert words - rules == expected
    assert "…" not in "".join(lines)
    return count


@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_of_every_command_is_whole(all_tables: list[Table], width: int) -> None:
    assert len(all_tables) > 20
    parts = [check_whole(table, width) for table in all_tables]
    for table in all_tables if width >= 80 else ():  # 40 are too few for some keys and numbers
        assert max(map(len, printed(table, width))) <= width
    assert (max(parts) > 1) is (width < console.UNLIMITED)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.lists(st.integers(1, 5), min_size=1, max_size=2),
    st.integers(10, 120),
)
def test_tables_are_whole_at_any_width(bits: list[int], keys: list[int], width: int) -> None:
    words = ["the", "(document, 65536)", "and"]
    table = Table(
        title="Some title of several words",
        keys=[
            Column(heading=f"key {i}", cells=(" ".join(words[:n] * n), "x"), is_text=True)
            for i, n in enumerate(keys)
        ],
        columns=[
            Column(heading=f"column number {i}", cells=(f"{3**b:,}", "-1.0e-17"))
            for i, b in enumerate(bits)
        ],
        totals=1,
        note="And a note below it",
    )
    check_whole(table, width)


@given(
    st.lists(st.integers(0, 2**62) | st.floats(1e-7, 1e5), min_size=1, max_size=5),
    st.sampled_from([BYTES, FLOP, SECONDS]),
)
def test_amounts_are_the_numbers_they_stand_for(values: list[float], units: Any) -> None:
    (column,) = amounts([("sent", values)], units)
    name = column.heading.removeprefix("sent ")
    factor = next(unit.factor for unit in units if unit.name == name)
    digits = {len(cell.partition(".")[2]) for cell in column.cells if cell != "0"} or {0}
    assert len(digits) == 1  # so that points stand below each other
    for value, cell in zip(values, column.cells, strict=True):
        shown = float(cell.replace(",", "")) * factor
        assert abs(shown - value) <= 0.51 * 10.0 ** -max(digits) * factor + 1e-12 * value


def test_numbers_in_sentences() -> None:
    assert in_bytes(0) == "0 B"
    assert in_bytes(3 * 2**19) == "1.50 MiB"
    assert in_bytes(2**40) == "1 TiB"
    assert [in_seconds(x) for x in (0, 0.0722, 37.12, 725, 7320)] == [
        "0 s", "72.2 ms", "37.1 s", "12 min 5 s", "2 h 2 min",
    ]  # fmt: skip
    assert count_of(1, "rank") == "1 rank"
    assert count_of(4096, "rank") == "4,096 ranks"
    assert count_of(2, "index", "indices") == "2 indices"


def test_a_pipe_has_lines_of_any_length_unless_columns_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table(
        title="T",
        keys=[Column(heading="rank", cells=("0",))],
        columns=[Column(heading=f"c{i}", cells=("1,234,567",)) for i in range(20)],
    )
    for columns, lines in ((None, 5), ("80", 5 * 4), ("0", 5), ("x", 5)):
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        show_table(make_console(), table)
        found = capsys.readouterr().out
        assert len(found.splitlines()) == lines
        assert "\x1b" not in found
    show_text(make_console(), "a " * 200 + "/a/path/" + "x" * 100)
    assert capsys.readouterr().out.splitlines() == ["a " * 199 + "a /a/path/" + "x" * 100]


class Terminal:
    """A pseudo-terminal of 80 columns, whose other end is read."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def run(self, script: str, *, cwd: Path, **environment: str) -> str:
        """What a Python script shows there."""
        names = {"COLUMNS", "LINES", "NO_COLOR"}
        kept = {name: value for name, value in os.environ.items() if name not in names}
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=cwd,
            env={**kept, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment},
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
        )
        os.close(self.slave)
        found = b""
        while True:
            try:
                block = os.read(self.master, 1 << 16)
            except OSError:  # the last process that wrote there is gone
                break
            if not block:
                break
            found += block
        assert process.wait() == 0, found.decode(errors="replace")
        os.close(self.master)
        return found.decode(errors="replace")


MARK = "##### "
BIG_PLAN = (
    "plan --seq-len=1073741824 --ranks=4096 --show-ranks=17 --batch-size=64 --dtype=fp64 "
    "--segment-lengths=2048,32768,all --dilation-rates=1,12,65536"
)
COMMANDS = {
    "big plan": BIG_PLAN,
    "big cache": BIG_PLAN.replace("--show-ranks=17", "--decode"),
    "drawn cache": "draw cache --seq-len=1073741824 "
    "--segment-lengths=281474976710655,8191,all --dilation-rates=1,1234567,65537",
    "proof": "plan --seq-len=600 --ranks=3 --causal --tiles --num-heads=4 --check",
    "simulate": "simulate --seq-len=300 --ranks=9 --causal --num-heads=2 --head-dim=4 --seed=1",
    "verify": "verify --ranks=1 --seed=1",
    "bench": "bench --seq-len=64 --repeats=1 --baseline=sdpa,cp:allgather --no-errors --out=bench",
    "train": "train --out=run --data=texts --steps=12 --seq-len=64 --num-layers=1 "
    "--embed-dim=16 --num-heads=2 --ffn-dim=16 --segment-lengths=8,all --dilation-rates=1,2",
    "resume": "train --resume --out=run --steps=13",
    # A text may have no newline: with the prompt it fits into a line.
    "sample": "sample --checkpoint=run --prompt=def --max-new-tokens=75",
}
SCRIPT = f"""
import os, sys
import pytest
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from support.small_ceilings import measure_little
from ring_dilated_attention.cli import app
from ring_dilated_attention.terminal import Table, make_console, show_table, texts
measure_little(pytest.MonkeyPatch())
for name, command in {COMMANDS!r}.items():
    print({MARK!r} + name, flush=True)
    sys.argv = ["rda", *command.split()]
    try:
        app(sys.argv[1:])
    except SystemExit as end:
        assert not end.code, (name, end.code)
table = Table(title="title", keys=[texts("", ["ok", "WRONG"])], columns=[])
for name in ("colours", "no colours"):
    print({MARK!r} + name, flush=True)
    show_table(make_console(), table)
    os.environ["NO_COLOR"] = "1"
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of `COMMANDS` shows in a terminal of 80 columns, escape codes and all."""
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "texts" / ".hidden").mkdir(parents=True)
    for name, text in (
        ("a.txt", "".join(f"line {i} of a text\n" for i in range(500)).encode()),
        ("b.txt", b"held out, or not\n" * 90),
        ("empty.txt", b""),
        *((f"picture{i}.png", b"\x89PNG\0") for i in range(1234, 1239)),
    ):
        (folder / "texts" / name).write_bytes(text)
    found = Terminal().run(SCRIPT, cwd=folder)
    parts = re.split(f"{MARK}(.*)\r\n", found)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def lines_of(text: str) -> Iterator[str]:
    """The lines as they were written: a bar, and what takes it away, are pieces of their own."""
    for piece in re.split(r"[\r\n]|\x1b\[[0-9]*[AK]", text):
        if line := ESCAPE.sub("", piece).rstrip():
            yield line


@pytest.mark.parametrize("name", COMMANDS)
def test_a_terminal_of_80_columns_cuts_nothing(shown: dict[str, str], name: str) -> None:
    lines = list(lines_of(shown[name]))
    assert lines
    for line in lines:
        assert "…" not in line
        assert len(line) <= 80 or line.startswith(("wrote ", "resumed ", "  ")), line  # paths


def test_a_big_plan_has_the_same_numbers_in_a_terminal_and_in_a_pipe(shown: dict[str, str]) -> None:
    done = CliRunner().invoke(app, BIG_PLAN.split())
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert len(done.output.splitlines()[0]) > 80
    without_bar = [x for x in lines_of(shown["big plan"]) if not re.match(r"plan \d+/", x)]
    in_pipe, in_terminal = (
        Counter(word for line in lines for word in line.split() if word[0].isdigit())
        for lines in (done.stdout.splitlines(), without_bar)
    )
    assert in_pipe - in_terminal == Counter()
    assert set(in_terminal - in_pipe) <= {"17"}  # the key of parts
    assert in_pipe["1,073,741,824"] == 1


def test_commands_say_what_they_read_skip_and_prove(shown: dict[str, str]) -> None:
    said = {name: " ".join(" ".join(lines_of(text)).split()) for name, text in shown.items()}
    assert "proven: every (branch, head, query, visible key) is computed once" in said["proof"]
    assert "measuring 1 workload on 1 rank: ours, sdpa, cp:allgather" in said["bench"]
    assert "not measured: longnet n=64 12 x 64 float32, cp:allgather: refused:" in said["bench"]
    assert "read 2 files (10,920 bytes): texts" in said["train"]
    for skipped in (
        "1 hidden folder: .hidden",
        "1 empty file: empty.txt",
        "5 binary files: picture1234.png, picture1235.png, picture1236.png and 2 more",
    ):
        assert f"skipped {skipped}" in said["train"]
    assert "training on 10,374 bytes; 546 bytes (5.0%) are held out" in said["train"]
    assert "resumed from step 12: run/checkpoints/" in said["resume"]
    assert "ok: results match one device" in said["simulate"]
    assert "all within bounds" in said["verify"]


def test_progress_has_an_end_and_a_rate_and_goes_away(shown: dict[str, str]) -> None:
    assert re.search(r"train \d+/12 steps", shown["train"])
    assert re.search(r"verify \d+/72 cases", shown["verify"])
    assert re.search(r"sample \d+/75 tokens.*tokens/s", ESCAPE.sub("", shown["sample"]))
    for name in ("simulate", "verify", "bench", "train", "sample", "proof"):
        assert re.search(r"\d%", shown[name])
        after = re.split(r"\d%", shown[name])[-1]
        assert "\x1b[2K" in after, name  # the bar is erased


@pytest.mark.parametrize("command", ["plan", "draw pattern --seq-len=64", "simulate --seq-len=64"])
def test_commands_end_without_a_word_where_nobody_reads_on(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-m", "ring_dilated_attention.cli", *command.split()]
    done = subprocess.run(line, stdout=writer, stderr=subprocess.PIPE, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr.decode()) == (1, "")


def test_no_color(shown: dict[str, str]) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]m")
    assert colour.search(shown["colours"])
    assert not colour.search(shown["no colours"])
    assert "WRONG" in shown["no colours"]


def test_progress_in_a_pipe_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "FIRST_LINE_S", 3.0)
    with Progress("verify", total=40, unit="cases") as shown_here:
        for done in range(1, 41):
            now += 1.0
            shown_here.update(done, "on 2 ranks")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "verify 3/40 cases, 8%, 1.0 cases/s, 37 s left, on 2 ranks",
        "verify 13/40 cases, 32%, 1.0 cases/s, 27 s left, on 2 ranks",
        "verify 23/40 cases, 57%, 1.0 cases/s, 17 s left, on 2 ranks",
        "verify 33/40 cases, 82%, 1.0 cases/s, 7 s left, on 2 ranks",
    ]
    with Progress("simulate", total=1e15, unit=FLOP) as shown_here:
        now += 5.0
        shown_here.update(0)  # there is no rate yet, and no end
        now += 5.0
        shown_here.update(2e14)
    with Progress("quick", total=2, unit="cases") as shown_here:
        shown_here.update(2)
    with Progress("train", total=2, unit="steps", bar_only=True) as shown_here:
        now += 100.0
        shown_here.update(1)
    assert capsys.readouterr().err.splitlines() == [
        "simulate 0.20/1.00 PFLOP, 20%, 40.0 TFLOP/s, 20 s left",
    ]


def test_a_line_that_waits_long_for_its_steps_has_the_speed_of_all_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "FIRST_LINE_S", 3.0)
    for speed_s, left in ((30.0, "53 min 20 s"), (600.0, "5 min 12 s")):
        with Progress("bench", total=1, unit="workloads", speed_s=speed_s) as shown_here:
            for seconds, done in ((1.0, 0.05), (1.0, 0.1), (50.0, 0.3), (50.0, 0.35), (50.0, 0.36)):
                now += seconds
                shown_here.update(done)
        assert capsys.readouterr().err.splitlines()[-1].endswith(f"{left} left"), left


@pytest.mark.parametrize("errors_too", [True, False])
def test_a_text_and_its_progress_do_not_mix_in_one_file(tmp_path: Path, errors_too: bool) -> None:
    """`rda sample ... > file 2>&1` had lines of progress in the middle of its words."""
    program = (
        "from ring_dilated_attention.terminal import progress\n"
        "progress.FIRST_LINE_S = progress.NEXT_LINE_S = 0.0\n"
        "texts = ((done, 'ab') for done in range(1, 4))\n"
        "progress.streamed(texts, shown='>', total=3, unit='tokens', what='sample')\n"
    )
    with (tmp_path / "out").open("w") as out:
        errors = subprocess.STDOUT if errors_too else subprocess.PIPE
        done = subprocess.run([sys.executable, "-c", program], stdout=out, stderr=errors, text=True)
    assert (tmp_path / "out").read_text() == ">ababab\n"
    assert done.returncode == 0
    assert errors_too or done.stderr.startswith("sample 1/3 tokens")
    assert errors_too or re.fullmatch(r"3 tokens, .* tokens/s", done.stderr.splitlines()[-1])


def test_a_bar_leaves_room_for_the_echo_of_ctrl_c() -> None:
    shown_here = Progress("simulate", total=1.5e12, unit=FLOP)
    for width, note in itertools.product((40, 60, 80, 81), range(1, 40)):
        shown_here.update(1.5e12, note * "x")  # without colours, only what is done is drawn
        console = Console(width=width, file=StringIO())
        lines = console.render_lines(progress.Bar(shown_here), pad=False)
        first = "".join(segment.text for segment in lines[0])
        assert len(first.rstrip()) <= width - len("^C")


def test_simulations_and_proofs_tell_how_far_they_are() -> None:
    from ring_dilated_attention.checks import simulated_flops
    from ring_dilated_attention.plan import check_plan, costs

    layout = SequenceLayout.contiguous(101, 5)
    case = Case(pattern=DilatedPattern([16, None], [1, 3]), layout=layout, dtype=torch.float32)
    told: list[float] = []
    simulate(case, told=lambda done, _: told.append(done))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(simulated_flops(case))
    assert len(set(told)) > 10
    counts: list[int] = []
    plan = plan_attention(case.pattern, layout, is_causal=True, num_heads=4, num_kv_heads=4)
    check_plan(plan, told=counts.append)
    assert counts == sorted(counts)
    assert counts[-1] == costs.proof_steps(plan)
