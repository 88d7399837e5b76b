"""What a run leaves to be looked at: run.toml, events of TensorBoard, the curve."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from support.toml_files import tomllib
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util
from typer.testing import CliRunner

from ring_dilated_attention.cli import app
from ring_dilated_attention.nn import LongNetConfig
from ring_dilated_attention.train import (
    PRESETS,
    TrainConfig,
    checkpoint,
    curve,
    preset_options,
    run_folder,
    run_toml,
    scalars,
)
from ring_dilated_attention.train.loop import run
from ring_dilated_attention.train.run_toml import to_toml

SMALL = (
    *("--seq-len=64", "--num-layers=1", "--embed-dim=16", "--num-heads=2", "--ffn-dim=16"),
    *("--segment-lengths=8,all", "--dilation-rates=1,2", "--eval-windows=2", "--device=cpu"),
)


def invoke(*arguments: Any) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {i} of a text, {i * i % 97}\n" for i in range(400)))
    return path


def make_config(out: Path, text: Path, **changes: Any) -> TrainConfig:
    config = TrainConfig(out=out, data=(str(text),), device="cpu").with_options(
        {
            **{"seq_len": 64, "num_layers": 1, "embed_dim": 16, "num_heads": 2},
            **{"ffn_dim": 16, "segment_lengths": (8, None), "dilation_rates": (1, 2)},
            **{"steps": 6, "eval_every": 2, "eval_windows": 2, "save_every": 4},
        }
    )
    return replace(config, **changes)


# --- run.toml


def read_back(toml: str, out: Path) -> TrainConfig:
    """The options that a run.toml stands for, over other defaults than its own."""
    options = {name.replace("-", "_"): value for name, value in tomllib.loads(toml).items()}
    assert options.pop("ranks") == 3
    for name, number in (("segment_lengths", int), ("dilation_rates", int)):
        parts = options[name].split(",")
        options[name] = tuple(None if part == "all" else number(part) for part in parts)
    return TrainConfig(out=out).with_options(options)


@pytest.mark.parametrize("preset", PRESETS)
def test_run_toml_is_read_back(preset: str) -> None:
    plain = TrainConfig(out=Path("run")).with_options(preset_options(preset))
    for config in (
        plain,
        replace(plain, warmup_steps=0, weight_decay=0.0, final_learning_rate=0.0, beta1=0.0),
        replace(plain, data=("a b", 'quote " and \\', "é\n\t\x7f", "漢")),
        replace(plain, tokenizer="x.json", chunk_rows=5, sequence_ranks=2, timeout=0.5),
        replace(plain, train_tokenizer=300, tensorboard=True, learning_rate=1e-30),
        replace(plain, model=replace(plain.model, num_kv_heads=1, rope_theta=1e6), beta1=0.1 + 0.2),
    ):
        expected = config
        if config.train_tokenizer is None and config.tokenizer is None:
            assert config.model.vocab_size == 256
        assert read_back(to_toml(config, ranks=3), config.out) == expected


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)))
def test_names_of_files_are_read_back(names: list[str]) -> None:
    config = TrainConfig(out=Path("run"), data=tuple(names))
    assert read_back(to_toml(config, ranks=3), config.out) == config


def test_what_is_not_utf8_is_left_to_the_user() -> None:
    toml = to_toml(TrainConfig(out=Path("run"), data=("a\udcff",)), ranks=3)
    assert "# data is not UTF-8, and cannot be said in TOML\n" in toml
    assert "data" not in tomllib.loads(toml)


def test_every_option_that_decides_a_run_is_written() -> None:
    plain = TrainConfig(out=Path("run"), data=("x",), sequence_ranks=1, chunk_rows=1, timeout=1.0)
    model = replace(plain.model, num_kv_heads=1)
    toml = to_toml(replace(plain, model=model, tokenizer="x", init_from="x"), ranks=3)
    written = {name.replace("-", "_") for name in tomllib.loads(toml)}
    names = {f.name for kind in (TrainConfig, LongNetConfig) for f in fields(kind)}
    assert names - written == {"out", "model", "vocab_size", "norm_eps", "train_tokenizer"}
    # Each is an option of the command line.
    command = typer.main.get_command(app).get_command(None, "train")  # type: ignore[attr-defined]
    assert written <= {parameter.name for parameter in command.params}


def test_a_run_is_run_again_by_its_run_toml(text: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    more = ("--steps=3", "--train-tokenizer=280", "--learning-rate=0.01")
    output = invoke("train", "--out", first, "--data", text, *more, *SMALL)
    assert f"  options     {first / run_toml.FILE}" in output
    invoke("train", "--out", second, "--config", first / run_toml.FILE)
    configs = [checkpoint.newest(out).config for out in (first, second)]
    assert replace(configs[0], out=second) == configs[1]
    losses = [
        [line["loss"] for line in run_folder.read_log(out) if "loss" in line]
        for out in (first, second)
    ]
    assert losses[0] == losses[1]


def test_resuming_writes_the_options_anew(text: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", text)
    run(config)
    run(replace(config, steps=7, batch_size=2), resume=True)
    options = tomllib.loads((config.out / run_toml.FILE).read_text())
    assert (options["steps"], options["batch-size"], options["ranks"]) == (7, 2, 1)


# --- TensorBoard


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every event of every file, by curve, with nothing left out as TensorBoard would."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted((folder / scalars.FOLDER).iterdir()):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                number = float(tensor_util.make_ndarray(value.tensor))
                found.setdefault(value.tag, []).append((event.step, number))
    return found


def logged(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What the log says, by curve."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in run_folder.read_log(folder):
        for key, tag in scalars.TAGS.get(line["kind"], {}).items():
            found.setdefault(tag, []).append((line["step"], line[key]))
    return found


def assert_events_are_logged(folder: Path) -> None:
    seen, wanted = events(folder), logged(folder)
    assert seen.keys() == wanted.keys()
    assert len(seen) == 8
    for tag in wanted:
        assert [step for step, _ in seen[tag]] == [step for step, _ in wanted[tag]], tag
        values = [value for _, value in wanted[tag]]
        assert [value for _, value in seen[tag]] == pytest.approx(values, rel=1e-6), tag


def test_events_are_the_log(text: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", text, tensorboard=True)
    run(config)
    assert_events_are_logged(config.out)
    seen = events(config.out)
    assert [step for step, _ in seen["loss/training (nats per token)"]] == list(range(1, 7))
    assert [step for step, _ in seen["bits per byte/held out"]] == [2, 4, 6]


def test_a_resumed_run_has_no_step_twice(text: Path, tmp_path: Path) -> None:
    """Steps 5 and 6 were lost with their checkpoint, and are done again."""
    config = make_config(tmp_path / "run", text, tensorboard=True)
    run(config)
    shutil.rmtree(config.out / checkpoint.FOLDER / "step_0000006")
    run(replace(config, steps=8), resume=True)
    assert_events_are_logged(config.out)
    steps = [step for step, _ in events(config.out)["loss/training (nats per token)"]]
    assert steps == list(range(1, 9))


def test_events_may_begin_when_a_run_is_resumed(text: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", text)
    run(config)
    assert not (config.out / scalars.FOLDER).exists()
    output = invoke("train", "--resume", "--out", config.out, "--steps=8", "--tensorboard")
    assert f"tensorboard --logdir {config.out / scalars.FOLDER}" in output
    assert_events_are_logged(config.out)


def test_without_the_package_the_message_says_what_to_install(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "tensorboard" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    out = tmp_path / "run"
    arguments = ["train", f"--out={out}", f"--data={text}", "--tensorboard", *SMALL]
    for ranks in (1, 2):
        result = CliRunner().invoke(app, [*arguments, f"--ranks={ranks}"])
        assert (result.exit_code, result.output) == (
            2,
            "error: --tensorboard needs the tensorboard package: "
            "pip install 'ring-dilated-attention[tensorboard]'\n",
        )
    assert not out.exists()


# --- the curve


def drawn(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: list[dict[str, Any]]) -> Any:
    """The axes of the curve of a log."""
    figures = []

    def saved(figure: Figure, path: Path, **_: Any) -> None:
        figures.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", saved)
    with run_folder.RunLog(folder, start=0) as log:
        for line in lines:
            log.write(**line)
    curve.plot_losses(folder)
    (axes,) = figures[0].axes
    return axes


def test_the_curve_tells_raw_from_mean_and_training_from_held_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = [
        {"kind": "step", "step": step, "bits_per_byte": 4 + (step % 2)} for step in range(1, 101)
    ]
    lines += [{"kind": "eval", "step": step, "bits_per_byte": 5.0} for step in (50, 100)]
    axes = drawn(monkeypatch, tmp_path / "run", lines)
    raw, mean, heldout = axes.lines
    assert list(raw.get_ydata()) == [4 + (step % 2) for step in range(1, 101)]
    assert list(mean.get_ydata())[-2:] == pytest.approx([4.6, 4.4])
    assert list(heldout.get_xdata()) == [50, 100]
    assert raw.get_color() == mean.get_color() != heldout.get_color()
    assert raw.get_alpha() < 0.5
    assert mean.get_alpha() is None
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "training text, each step",
        "training text, mean of the last 5 steps",
        "held-out text",
    ]
    assert axes.get_title(loc="left") == "Training of run: lower is better"
    assert axes.get_xlabel() == "optimizer steps"
    assert axes.get_ylabel() == "cross-entropy (bits per byte)"


def test_a_short_run_has_no_mean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [{"kind": "step", "step": step, "bits_per_byte": 5.0} for step in (1, 2, 3)]
    axes = drawn(monkeypatch, tmp_path, lines)
    assert [line.get_label() for line in axes.lines] == ["training text, each step"]
    assert drawn(monkeypatch, tmp_path / "empty", []).get_legend() is None
