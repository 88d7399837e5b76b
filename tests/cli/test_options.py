"""One set of options: each name has one meaning, spelling, type and default in every command."""

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from typer.testing import CliRunner

from ring_dilated_attention import DilatedPattern, __version__, checks, functional, tiles
from ring_dilated_attention.bench import (
    BASELINES,
    DEVICES,
    DTYPES,
    SCALINGS,
    SEQ_LEN,
    Options,
    Workload,
)
from ring_dilated_attention.checks import MOST_SEED
from ring_dilated_attention.cli import app, options, train_options
from ring_dilated_attention.cli import bench as bench_command
from ring_dilated_attention.cli.command import COMMANDS, values_of
from ring_dilated_attention.cli.option import Argument, Flag, Option
from ring_dilated_attention.nn import Checkpoint, LongNetConfig
from ring_dilated_attention.train import PRESETS, TrainConfig

OTHER_DEFAULTS = {
    **dict.fromkeys(
        [("plan", "ranks"), ("simulate", "ranks"), ("draw", "ranks")],
        "they run no ranks, and a plan of one rank shows no exchange",
    ),
    ("verify", "ranks"): "all of 1 to 4 are compared with the reference",
    ("bench", "ranks"): "it measures several numbers of ranks",
    ("draw", "out"): "it draws in the terminal unless it is given",
    ("verify", "device"): "its ranks are more than most machines have GPUs",
    **dict.fromkeys(
        [
            *(("train", "pattern"), ("train", "segment-lengths"), ("train", "dilation-rates")),
            *(("train", "head-offsets"), ("train", "head-branches"), ("train", "seq-len")),
            *(("train", "num-heads"), ("train", "dtype")),
        ],
        "a preset of train sets it, and patterns set it elsewhere",
    ),
}
"""Defaults that differ from the other commands', and why."""

OTHER_HELP = {
    ("verify", "ranks"): "several numbers",
    ("bench", "ranks"): "several numbers",
    ("draw", "out"): "a picture, not a folder",
    ("train", "dtype"): "fewer types",
}
"""Options whose help differs from the other commands', and why."""

SAMPLES = (
    "3",
    "0",
    "256K",
    "1M",
    "all",
    "0.5",
    "bf16",
    "float32",
    "auto",
    "zigzag",
    "longnet",
    "x",
)
OLD = (
    *("--length", "--sequence-length", "--heads", "--kv-heads", "--batch", "--precision"),
    *("--bytes", "--tokens", "--all", "--rank", "--checkpoint-blocks"),
)
CLICK = typer.main.get_command(app).commands  # type: ignore[attr-defined]
EACH = [
    (command, option) for command, known in COMMANDS.items() for option in known.options.values()
]


def by_name():
    found: dict[str, dict[str, Option]] = defaultdict(dict)
    for command, option in EACH:
        found[option.name][command] = option
    return found


SHARED = {name: uses for name, uses in by_name().items() if len(uses) > 1}


def answers(option):
    """What it makes of the samples: a value, or the reason why it is none."""
    found: list[Any] = []
    for text in SAMPLES:
        try:
            value = option.read(text, option.name)
        except ValueError as error:
            value = str(error)
        is_wrapped = option.is_list and isinstance(value, tuple) and len(value) == 1
        found.append(value[0] if is_wrapped else value)
    return found


def test_commands_share_options():
    assert len(SHARED) > 20
    assert {"seq-len", "ranks", "pattern", "dtype", "layout", "seed", "timeout"} < SHARED.keys()


@pytest.mark.parametrize("name", SHARED)
def test_a_name_has_one_meaning_and_type(name):
    uses = list(SHARED[name].values())
    helps = {x.help for command, x in SHARED[name].items() if (command, name) not in OTHER_HELP}
    assert len(helps) == 1, helps
    for option in uses[1:]:
        for attribute in ("panel", "metavar", "choices", "toml", "is_repeated"):
            assert getattr(option, attribute) == getattr(uses[0], attribute), attribute
        assert answers(option) == answers(uses[0])


@pytest.mark.parametrize("name", SHARED)
def test_a_name_has_one_default(name):
    texts = {x.text for command, x in SHARED[name].items() if (command, name) not in OTHER_DEFAULTS}
    assert len(texts) == 1, texts
    for command, option in SHARED[name].items():
        if (command, name) in OTHER_DEFAULTS:
            assert option.text not in texts, f"{command} {name} is no exception"


@pytest.mark.parametrize(("command", "option"), EACH)
def test_help_is_about_this_command_alone(command, option):
    """`rda train -h` that explains bench's --ranks or draw's --out makes its reader solve it."""
    others = "|".join(set(COMMANDS) - {command})
    assert not re.search(rf"\b({others})( takes?\b|:| and \w+ take\b)", option.help)


def test_exceptions_are_options():
    for command, name in [*OTHER_DEFAULTS, *OTHER_HELP]:
        assert command not in COMMANDS or name in COMMANDS[command].options


@pytest.mark.parametrize(("command", "option"), EACH)
def test_a_name_has_one_spelling(command, option):
    (found,) = (x for x in CLICK[command].params if x.name == option.name.replace("-", "_"))
    if not isinstance(option, Argument):
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", option.name)
        assert found.opts == [f"--{option.name}"]
        has_no = isinstance(option, Flag) and option.has_no
        assert found.secondary_opts == ([f"--no-{option.name}"] if has_no else [])
    assert found.help == option.text
    assert option.help.endswith(".")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_set(command):
    names = [x.name.replace("_", "-") for x in CLICK[command].params]
    assert names == ["config", *COMMANDS[command].options]
    assert not {x.removeprefix("--") for x in OLD} & set(names)


@pytest.mark.parametrize("flag", OLD)
@pytest.mark.parametrize("command", COMMANDS)
def test_old_spellings_are_gone(command, flag):
    done = CliRunner().invoke(app, [command, f"{flag}=1"])
    assert done.exit_code == 2
    assert f"No such option: {flag}" in done.stderr


def test_values_of_other_rooms_are_as_they_say():
    assert options.BACKENDS == tiles.BACKENDS
    assert options.EXCHANGES == functional.EXCHANGES
    assert options.DEVICES == DEVICES
    assert tuple(options.DTYPES.values()) == DTYPES
    assert options.TIMEOUT == checks.RANK_TIMEOUT == TrainConfig(out=Path("x")).timeout
    assert options.MOST_SEED == MOST_SEED
    assert options.SEQ_LEN == SEQ_LEN
    assert bench_command.BASELINES == BASELINES
    assert bench_command.SCALING.choices == SCALINGS
    own = Workload(pattern=DilatedPattern.dense(), seq_len=1)
    assert f"({own.num_heads} with --segment-lengths)" in options.NUM_HEADS.text
    assert f"({own.head_dim} with --segment-lengths)" in options.HEAD_DIM.text
    assert tuple(PRESETS) == train_options.PRESETS
    assert get_args(Checkpoint) == train_options.CHECKPOINTS


def test_bench_has_the_defaults_of_its_options():
    own = Options()
    shown = {name.replace("-", "_"): x.default for name, x in COMMANDS["bench"].options.items()}
    shown["baselines"] = shown["baseline"]
    for name in vars(own):
        assert shown[name] == getattr(own, name), name


@pytest.mark.parametrize(
    ("text", "value"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("fp64", "float64")],
)
def test_short_and_long_names_of_dtypes(text, value):
    assert options.DTYPE.read(text, "") == options.DTYPE.read(value, "") == value


def test_numbers_of_positions():
    read = options.SEQ_LENGTH.read
    assert [read(x, "") for x in ("8192", "256K", "1M")] == [8192, 256 << 10, 1 << 20]
    assert options.SEGMENT_LENGTHS.read("2K, 4096,all", "") == (2048, 4096, None)
    for text in ("1G", "1.5K", "K", "1e6", "1 K", "1KB", "", "0x10"):
        with pytest.raises(ValueError, match="--seq-len must be a whole number such as 8192, 256K"):
            read(text, "--seq-len")


# --- help


@pytest.fixture
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


@pytest.mark.usefixtures("_narrow")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_at_80_columns(command, flag):
    done = CliRunner().invoke(app, [command, flag])
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80
    assert not re.search(r"…|<bool>|\[default: \(|None", done.output)
    words = set(re.split(r"[\s,]+", done.output))
    for option in COMMANDS[command].options.values():
        assert option.flag in words
    panels = set(re.findall(r"╭─ (.*?) ─", done.output))
    assert panels >= {option.panel for option in COMMANDS[command].options.values()} - {"Arguments"}
    assert 2 <= len(COMMANDS[command].examples) <= 3
    for example in COMMANDS[command].examples:
        assert f"  # {example.text}\n" in done.output
        assert all(f"  {line}" in done.output for line in example.line.split("\n"))


@pytest.mark.parametrize(
    ("command", "line"),
    [(command, x.line) for command, known in COMMANDS.items() for x in known.examples],
)
def test_examples_are_read(command, line):
    rda, name, *words = shlex.split(line.replace("\\\n", " "))
    assert (rda, name) == ("rda", command)
    with CLICK[name].make_context(name, words) as context:
        values = values_of(name, context.params)
    assert set(values) == set(COMMANDS[name].options)


@pytest.mark.parametrize("line", [x.line for x in COMMANDS["plan"].examples])
def test_examples_of_plan_run(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # one writes a file
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output


def test_the_version():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"rda {__version__}\n")


def test_completion_of_values():
    """As the script of a shell asks for them."""
    line = {"COMP_WORDS": "rda plan --layout ", "COMP_CWORD": "3"}
    environment = {"_RDA_COMPLETE": "complete_bash", **line}
    done = CliRunner().invoke(app, [], env=environment, prog_name="rda")
    assert done.output.split() == ["auto", "contiguous", "zigzag"]


# --- start-up

WITHOUT_TORCH = """
import sys
from typer.testing import CliRunner
from ring_dilated_attention.cli import app
for line, code in {lines!r}:
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == code, (line, done.output)
    assert "torch" not in sys.modules, line
"""
LINES = [
    *(("", 0), ("-h", 0), ("--help", 0), ("--version", 0), ("fly", 2), ("--fast", 2)),
    *((f"{command} --help", 0) for command in COMMANDS),
    *((f"{command} --no-such-option", 2) for command in COMMANDS),
    *(("plan --seq-len 1e6", 2), ("plan --seq-len 0", 2), ("plan --dtype int4", 2)),
    *(("plan --pattern plaid", 2), ("plan --layout spiral", 2), ("train --ranks 0", 2)),
    *(("train --preset huge", 2), ("bench --baseline typo", 2), ("verify --device tpu", 2)),
    *(("sample", 2), ("sample --prompt x --temperature -1", 2), ("simulate --seed -1", 2)),
    ("plan --config /no/such/file.toml", 2),
]


def test_help_and_errors_do_not_import_torch():
    script = WITHOUT_TORCH.format(lines=LINES)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


# --- --config


def values(command, *words):
    with CLICK[command].make_context(command, [*words]) as context:
        return values_of(command, context.params)


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return f"--config={path}"

    return write


def test_a_file_of_options(file):
    config = file(
        'seq-len = "1M"\nranks = 8\ncausal = true\ndtype = "bf16"\n'
        'segment-lengths = [2048, "all"]\ndilation-rates = "1,4"\n'
        'documents = [0, 100, "1M"]\nseed = 3\n[train]\nranks = 2\n'
        'data = ["a,b", "c"]\nlearning-rate = 1\nresume = true\n'
    )
    found = values("plan", config)
    assert (found["seq-len"], found["ranks"], found["causal"]) == (1 << 20, 8, True)
    assert (found["segment-lengths"], found["dilation-rates"]) == ((2048, None), (1, 4))
    assert (found["documents"], found["dtype"]) == ((0, 100, 1 << 20), "bfloat16")
    found = values("train", config)
    assert (found["ranks"], found["data"], found["resume"]) == (2, ("a,b", "c"), True)
    assert (found["learning-rate"], found["seed"], found["steps"]) == (1.0, 3, None)
    assert values("bench", config)["seq-len"] == (1 << 20,)


def test_a_table_takes_the_place_of_what_suits_other_commands(file):
    config = file("ranks = [1, 2]\n[train]\nranks = 2\n")
    assert values("train", config)["ranks"] == 2
    assert values("bench", config)["ranks"] == (1, 2)


def test_precedence(file, tmp_path):
    """The command line, the command's table, the top of the file, the preset, the default."""
    from ring_dilated_attention.train import make_config

    config = file(
        'preset = "longnet-base"\nsteps = 70\nkeep = 8\nseq-len = 512\n'
        "[train]\nsteps = 80\nkeep = 9\n"
    )
    found = values("train", config, "--steps=90")
    assert (found["steps"], found["keep"], found["seq-len"]) == (90, 9, 512)
    given = {k.replace("-", "_"): x for k, x in found.items() if x is not None}
    for name in ("preset", "resume", "restartable"):
        given.pop(name)
    run = make_config(tmp_path, given, preset=found["preset"], resume=False, runs=tmp_path)
    assert (run.steps, run.keep, run.seq_len) == (90, 9, 512)
    assert (run.dtype, run.warmup_steps) == ("bfloat16", 5)  # the preset's
    assert run.beta1 == 0.9  # the default
    assert values("plan", file("causal = true"), "--no-causal")["causal"] is False


@pytest.mark.parametrize(
    ("text", "line", "left"),
    [
        ('pattern = "dense"', "--segment-lengths=8 --dilation-rates=1", "segment-lengths"),
        ("segment-lengths = [8]\ndilation-rates = [1]", "--pattern=dense", "pattern"),
        ("segment-lengths = [8]\ndilation-rates = [1]\n[plan]\npattern = 'dense'", "", "pattern"),
    ],
)
def test_a_pattern_takes_the_place_of_branches_of_a_lower_level(file, text, line, left):
    found = values("plan", file(text), *line.split())
    names = ("pattern", "segment-lengths", "dilation-rates")
    assert next(name for name in names if found[name] is not None) == left
    assert (found["pattern"] is None) == (left != "pattern")


def test_a_named_pattern_brings_its_own_offsets(file):
    """Those of a file belong to the pattern of the file, as in the run.toml of a run."""
    path = file('segment-lengths = [8]\ndilation-rates = [1]\nhead-offsets = "interleaved"')
    assert values("plan", path)["head-offsets"] == "interleaved"
    assert values("plan", path, "--segment-lengths=9")["head-offsets"] == "interleaved"
    assert values("plan", path, "--pattern=gigapath")["head-offsets"] is None
    both = values("plan", path, "--pattern=gigapath", "--head-offsets=interleaved")
    assert both["head-offsets"] == "interleaved"


BAD_FILES = [
    ("seq_len = 5", "there is no option for key 'seq_len' in {file}; allowed: "),
    ("seq_len = 5", ", seq-len, "),
    ("[plan]\nsteps = 5", "no option for key 'steps' in [plan] of {file}; allowed: "),
    ("[plot]\nsteps = 5", "no option for table 'plot' in {file}; allowed: "),
    ("[plot]\nsteps = 5", "tables: [train], [sample], "),
    ("config = 'x'", "there is no option for key 'config'"),
    ("seq-len = true", "seq-len in {file} must be a whole number or text; got true"),
    ("seq-len = 1.5", "seq-len in {file} must be a whole number or text; got 1.5"),
    ("seq-len = [8]", "seq-len in {file} must be a whole number or text; got a list"),
    ("seq-len = '1G'", "seq-len in {file} must be a whole number such as 8192, 256K or 1M"),
    ("[plan]\nranks = 0", "ranks in [plan] of {file} must be >= 1, got 0"),
    ("ranks = '2'", "ranks in {file} must be a whole number; got '2'"),
    ("causal = 1", "causal in {file} must be true or false; got 1"),
    ("pattern = 5", "pattern in {file} must be text; got 5"),
    ("pattern = 'plaid'", "pattern in {file} must be one of 'longnet'"),
    ("segment-lengths = [[8]]", "segment-lengths in {file} must be a whole number or text, or a l"),
    ("layout = {{}}", "layout in {file} must be text; got a table"),
    ("seq-len 5", "{file} is not TOML: "),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_a_bad_file_is_one_line(file, tmp_path, text, message):
    done = CliRunner().invoke(app, ["plan", file(text.replace("{{}}", "{}"))])
    assert done.exit_code == 2
    assert message.format(file=tmp_path / "run.toml") in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_file_that_cannot_be_read(tmp_path):
    for path, reason in ((tmp_path / "x", "No such file"), (tmp_path, "Is a directory")):
        done = CliRunner().invoke(app, ["plan", f"--config={path}"])
        assert done.exit_code == 2
        assert f"error: --config: cannot read {path}: {reason}" in done.stderr


# --- what the audit found


@pytest.mark.parametrize("command", ["plan", "simulate", "bench", "verify", "train"])
def test_no_ranks_are_refused_by_the_name_of_the_option(command):
    done = CliRunner().invoke(app, [command, "--ranks=0"])
    assert (done.exit_code, done.stderr) == (2, "error: --ranks must be >= 1, got 0\n")


def test_a_temperature_of_0_is_allowed_and_errors_say_so():
    assert values("sample", "--prompt=x", "--temperature=0")["temperature"] == 0
    done = CliRunner().invoke(app, ["sample", "--prompt=x", "--temperature=-1"])
    assert done.stderr == "error: --temperature must be finite and >= 0, got -1.0\n"


def test_a_slip_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "--baseline=typo"])
    allowed = ", ".join(BASELINES)
    assert done.stderr == f"error: --baseline has no 'typo'; allowed: {allowed}\n"
    assert list(tmp_path.iterdir()) == []


def test_one_rank_is_not_plural():
    done = CliRunner().invoke(app, ["plan", "--seq-len=9", "--ranks=1"])
    assert "1 ranks" not in done.output
    assert "on 1 rank " in done.output


def test_the_help_shows_the_defaults_of_the_config() -> None:
    defaults = {f.name: f.default for f in fields(TrainConfig)}
    default_model = TrainConfig(out=Path("run")).model
    defaults.update({f.name: getattr(default_model, f.name) for f in fields(LongNetConfig)})
    in_words = {"data", "sequence_ranks", "num_kv_heads", "chunk_rows"}
    in_words |= {"tokenizer", "train_tokenizer", "init_from", "tensorboard"}
    options = {name.replace("-", "_"): x for name, x in COMMANDS["train"].options.items()}
    others = {"out", "resume", "restartable", "ranks", "preset", "pattern"}
    assert set(options) == set(defaults) - {"model", "vocab_size", "norm_eps"} | others
    for name, option in options.items():
        assert option.default is None or name in (
            "resume",
            "restartable",
        )  # so that a run keeps its own values
        if name in others | in_words:
            continue
        shown = option.shown.removeprefix("the preset's (small: ").removesuffix(")")
        value = option.read(shown, name)
        assert value == defaults[name], name
    assert in_words < set(options)


def test_the_help_says_what_presets_change() -> None:
    options = {name.replace("-", "_"): x for name, x in COMMANDS["train"].options.items()}
    for name in PRESETS["longnet-base"]:
        assert options[name].shown.startswith("the preset's (small: "), name
