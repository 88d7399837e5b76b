"""The training loop on one and on several ranks: curves, resuming, checkpoints, errors."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.nn import LongNet, LongNetConfig
from ring_dilated_attention.train import (
    PRESETS,
    TrainConfig,
    TrainingError,
    checked_files,
    checkpoint,
    data,
    decoded,
    preset_options,
    ranks,
    run_folder,
    sample_bytes,
    saving,
)
from ring_dilated_attention.train import make_config as make_run_config
from ring_dilated_attention.train.curve import CURVE
from ring_dilated_attention.train.loop import run
from ring_dilated_attention.train.ranks import BUCKET_NUMEL, StopRequest, joined

pytestmark = pytest.mark.xdist_group("train")  # its fixtures are made once

MODEL = LongNetConfig(
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=64,
    segment_lengths=(8, 24, None),
    dilation_rates=(1, 2, 3),
)
STEPS = 20
Curve = list[tuple[str, int, float]]


def make_config(folder: Path, **changes: Any) -> TrainConfig:
    """A run of seconds on a text of its own, in `folder`/run."""
    data = folder / "text.txt"
    if not data.exists():
        data.write_text("".join(f"line {i} of a text, {i * i % 97}\n" for i in range(700)))
    values: dict[str, Any] = {
        "out": folder / "run",
        "data": (str(data),),
        "model": MODEL,
        "seq_len": 61,  # prime: shards are uneven
        "batch_size": 3,
        "steps": STEPS,
        "warmup_steps": 3,
        "eval_every": 8,
        "eval_windows": 5,
        "save_every": 10,
        "device": "cpu",
    }
    return TrainConfig(**{**values, **changes})


def curve(folder: Path) -> Curve:
    return [
        (line["kind"], line["step"], line["bits_per_byte"])
        for line in run_folder.read_log(folder)
        if line["kind"] != "config"
    ]


def assert_same_curve(actual: Curve, expected: Curve, tolerance: float = 1e-4) -> None:
    assert [point[:2] for point in actual] == [point[:2] for point in expected]
    for (kind, step, value), (_, _, wanted) in zip(actual, expected, strict=True):
        assert value == pytest.approx(wanted, rel=tolerance), (kind, step)


def only_checkpoint(run_folder: Path, step: int, copy: Path) -> Path:
    """A copy of a run as if it had ended after `step`, but for its log."""
    shutil.copytree(run_folder, copy)
    for path in checkpoint.usable(copy):
        if path.name != f"step_{step:07d}":
            shutil.rmtree(path)
    return copy


def train_all(rank: int, world_size: int, runs: list[tuple[TrainConfig, bool]]) -> list[str]:
    """Run each; the message of a `ValueError` where one is raised, else an empty text."""
    messages = []
    for config, resume in runs:
        try:
            run(config, resume=resume)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of `STEPS` steps on one rank."""
    config = make_config(tmp_path_factory.mktemp("alone"))
    run(config)
    return config


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory, alone: TrainConfig) -> TrainConfig:
    """A run of fewer steps on one rank, beside which those on four ranks are held."""
    config = replace(
        alone, out=tmp_path_factory.mktemp("brief") / "run", steps=7, eval_every=4, save_every=7
    )
    run(config)
    return config


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """One of sequences shorter than four ranks, on one rank."""
    config = make_config(tmp_path_factory.mktemp("short"), seq_len=3, steps=6)
    run(config)
    return config


@pytest.fixture(scope="module")
def on_two(
    tmp_path_factory: pytest.TempPathFactory, alone: TrainConfig
) -> dict[str, tuple[Path, list[str]]]:
    """Runs on two ranks: their folders, and what each rank said."""
    folder = tmp_path_factory.mktemp("two")
    config = replace(make_config(folder), data=alone.data)
    from_one = only_checkpoint(alone.out, 10, folder / "from_one")
    other_model = replace(config, out=from_one, model=replace(MODEL, num_layers=3, ffn_dim=32))
    other_data = replace(config, out=from_one, data=(__file__,))
    runs = {
        "whole": (config, False),
        "again": (config, False),
        "other_model": (other_model, True),
        "other_data": (other_data, True),
        "from_one": (replace(config, out=from_one), True),
        "half": (replace(config, out=folder / "half", steps=10), False),
        "exact": (replace(config, out=folder / "exact"), True),
    }
    first = list(runs)[:-1]
    said = run_ranks(train_all, 2, [runs[name] for name in first])
    only_checkpoint(config.out, 10, folder / "exact")
    said_exact = run_ranks(train_all, 2, [runs["exact"]])
    results = {
        name: (runs[name][0].out, [rank[index] for rank in said])
        for index, name in enumerate(first)
    }
    results["exact"] = (folder / "exact", [rank[0] for rank in said_exact])
    return results


@pytest.fixture(scope="module")
def on_four(
    tmp_path_factory: pytest.TempPathFactory, brief: TrainConfig, short: TrainConfig
) -> dict[str, Path]:
    """Runs on four ranks."""
    folder = tmp_path_factory.mktemp("four")
    runs = {
        "zigzag": replace(brief, out=folder / "zigzag"),
        "contiguous": replace(brief, out=folder / "contiguous", layout="contiguous"),
        "grid": replace(brief, out=folder / "grid", sequence_ranks=2),
        "short": replace(short, out=folder / "short"),
        "chunked": replace(
            brief,
            out=folder / "chunked",
            activation_checkpoint="keep_attention",
            activation_checkpoint_blocks=2,
            chunk_rows=7,
        ),
        "short_chunked": replace(short, out=folder / "short_chunked", chunk_rows=1),
    }
    for rank in run_ranks(train_all, 4, [(config, False) for config in runs.values()]):
        assert rank == [""] * len(runs)
    return {name: config.out for name, config in runs.items()}


# --- curves


def test_loss_falls_and_everything_is_left(alone: TrainConfig) -> None:
    losses = {(kind, step): value for kind, step, value in curve(alone.out)}
    assert losses["step", 1] > 7
    assert losses["step", STEPS] < 6
    assert [step for kind, step in losses if kind == "eval"] == [8, 16, 20]
    first, *lines = run_folder.read_log(alone.out)
    assert (
        TrainConfig.from_dict(
            {k: v for k, v in first.items() if k not in ("kind", "time", "step", "ranks")}
        )
        == alone
    )
    step = next(line for line in lines if line["kind"] == "step")
    assert step["tokens_per_second"] > 0
    assert 10e6 < step["peak_memory_bytes"] < 10e9
    assert (alone.out / CURVE).read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in checkpoint.usable(alone.out)] == ["step_0000010", "step_0000020"]


def test_curve_on_two_ranks_is_that_of_one(
    alone: TrainConfig, on_two: dict[str, tuple[Path, list[str]]]
) -> None:
    folder, said = on_two["whole"]
    assert said == ["", ""]
    assert_same_curve(curve(folder), curve(alone.out))


@pytest.mark.parametrize("name", ["zigzag", "contiguous", "grid", "chunked"])
def test_curve_on_four_ranks_is_that_of_one(
    brief: TrainConfig, on_four: dict[str, Path], name: str
) -> None:
    assert_same_curve(curve(on_four[name]), curve(brief.out))


def test_ranks_without_tokens_take_part(short: TrainConfig, on_four: dict[str, Path]) -> None:
    assert 0 in map(short.sequence_layout(4).local_length, range(4))
    for name in ("short", "short_chunked"):
        assert_same_curve(curve(on_four[name]), curve(short.out))


# --- gradients

# In buckets of 8 elements: (5, 3), (20), (1, 6, 2), and (4) that fills no bucket.
GRADIENT_SIZES = (5, 3, 20, 1, 6, 2, 4)


def summed_gradients(rank: int, world_size: int, config: TrainConfig, numel: int) -> list[Tensor]:
    """Gradients of several sizes, shapes and types, other ones on every rank, and summed."""
    generator = torch.Generator().manual_seed(rank)
    parameters = []
    for index, size in enumerate(GRADIENT_SIZES):
        half = index in (1, 3, 4, 5)  # among others, and a bucket of them alone
        dtype = torch.bfloat16 if half else torch.float32
        parameter = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
        # Whole numbers: sums are exact in any order. In bfloat16, 256 + 1 would be 256.
        values = torch.randint(-99, 99, (size,), generator=generator)
        parameter.grad = (torch.full((size,), 1 if rank else 256) if half else values).to(dtype)
        parameters.append(parameter)
    parameters[2] = torch.nn.Parameter(parameters[2].detach().view(4, 5).t())
    parameters[2].grad = torch.randint(-99, 99, (4, 5), generator=generator).float().t()
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    with joined(config) as world:
        world.sum_gradients(parameters, bucket_numel=numel)
    after = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [*before, *after]


@pytest.mark.parametrize("numel", [8, BUCKET_NUMEL])
def test_every_bucket_of_gradients_is_summed(tmp_path: Path, numel: int) -> None:
    said = run_ranks(summed_gradients, 3, make_config(tmp_path), numel)
    count = len(GRADIENT_SIZES)
    for index in range(count):
        gradients = [rank[index] for rank in said]
        expected = torch.stack([g.float() for g in gradients]).sum(0).to(gradients[0].dtype)
        for rank in said:
            assert torch.equal(rank[count + index], expected), index


# --- what a run computes, beside the same written out


def bits_per_byte(model: LongNet, windows: list[Tensor]) -> Tensor:
    """Mean cross-entropy of windows, in bits, without anything that a run uses."""
    batch = torch.stack(windows).long()
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / math.log(2)


def test_a_run_is_adamw_on_clipped_gradients(tmp_path: Path) -> None:
    """Rates, windows, clipping, decay, moments, what is logged and held out: all recomputed."""
    config = make_config(
        tmp_path,
        steps=4,
        warmup_steps=1,
        learning_rate=0.01,
        weight_decay=5.0,  # so large that decay of a bias or a norm shows
        max_grad_norm=0.3,
        eval_every=2,
        beta1=0.7,
        beta2=0.8,
    )
    run(config)
    corpus = data.ByteCorpus.load(config.data, heldout_fraction=config.heldout_fraction)
    torch.manual_seed(config.seed)
    model = LongNet(MODEL)
    moments = {
        name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()
    }
    lines = run_folder.read_log(config.out)
    steps = [line for line in lines if line["kind"] == "step"]
    evals = {line["step"]: line["bits_per_byte"] for line in lines if line["kind"] == "eval"}
    for index, line in enumerate(steps):
        rate = (0.005, *(0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * i / 3))) for i in range(3)))[
            index
        ]
        windows = corpus.train_windows(61, seed=0, step=index, rows=range(3))
        model.zero_grad()
        bits = bits_per_byte(model, windows)
        (bits * math.log(2)).backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
        assert norm > 2 * config.max_grad_norm  # otherwise nothing is clipped
        assert line["step"] == index + 1
        assert line["bits_per_byte"] == pytest.approx(bits.item(), rel=1e-5)
        assert line["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        assert line["learning_rate"] == pytest.approx(rate)
        assert line["tokens_per_second"] == pytest.approx(3 * 61 / line["seconds"])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = gradients[name] * (config.max_grad_norm / norm)
                first, second = moments[name]
                first.mul_(0.7).add_(0.3 * gradient)
                second.mul_(0.8).add_(0.2 * gradient.square())
                if parameter.dim() == 2:  # not biases and norms
                    parameter.mul_(1 - rate * config.weight_decay)
                mean = first / (1 - 0.7 ** (index + 1))
                square = second / (1 - 0.8 ** (index + 1))
                parameter.sub_(rate * mean / (square.sqrt() + 1e-8))
        if index % 2:
            starts = corpus.heldout_starts(61, 5)
            assert len(starts) == 5
            with torch.no_grad():
                heldout = bits_per_byte(model, corpus.heldout_windows(61, starts))
            assert evals.pop(index + 1) == pytest.approx(heldout.item(), rel=1e-4)
    assert not evals
    found = checkpoint.newest(config.out)
    assert found.step == 4
    trained = LongNet(MODEL)
    optimizer = torch.optim.AdamW(trained.parameters())
    found.load(trained, optimizer)
    assert any(p.dim() == 1 for p in trained.parameters())
    for name, parameter in model.named_parameters():
        actual = trained.get_parameter(name)
        torch.testing.assert_close(actual, parameter, rtol=1e-3, atol=2e-4)
        first, second = moments[name]
        state = optimizer.state[actual]
        torch.testing.assert_close(state["exp_avg"], first, rtol=1e-2, atol=1e-5)
        torch.testing.assert_close(state["exp_avg_sq"], second, rtol=1e-2, atol=1e-7)
        assert state["step"] == 4


def test_evaluation_keeps_nothing_for_backward(
    alone: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[Tensor] = []
    loss = LongNet.loss

    def kept(*arguments: Any, **options: Any) -> Tensor:
        losses.append(loss(*arguments, **options))
        return losses[-1]

    monkeypatch.setattr(LongNet, "loss", kept)
    run(replace(alone, out=tmp_path / "run", steps=1, batch_size=2))
    # A step of two sequences, then five held-out ones, at most two at a time.
    assert [loss.requires_grad for loss in losses] == [True, False, False, False]


def test_sequence_groups_take_the_timeout_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def new_group(ranks: list[int], *, timeout: timedelta) -> str:
        made.append((ranks, timeout))
        return "group"

    monkeypatch.setattr(dist, "new_group", new_group)
    config = make_config(tmp_path, sequence_ranks=2, timeout=7.0)
    ranks.sequence_group(config, 4, 2, 1)
    seven = timedelta(seconds=7)
    assert made == [([0, 1], seven), ([2, 3], seven)]


# --- resuming


def test_resume_on_the_same_ranks_is_exact(on_two: dict[str, tuple[Path, list[str]]]) -> None:
    folder, said = on_two["exact"]
    assert said == ["", ""]
    assert curve(folder) == curve(on_two["whole"][0])


def test_resume_on_more_ranks(
    alone: TrainConfig, on_two: dict[str, tuple[Path, list[str]]]
) -> None:
    folder, said = on_two["from_one"]
    assert said == ["", ""]
    assert_same_curve(curve(folder), curve(alone.out))


def test_resume_on_fewer_ranks(
    alone: TrainConfig, on_two: dict[str, tuple[Path, list[str]]], tmp_path: Path
) -> None:
    folder = only_checkpoint(on_two["whole"][0], 10, tmp_path / "run")
    outcome = run(replace(alone, out=folder), resume=True)
    assert (outcome.step, outcome.stopped) == (STEPS, False)
    assert_same_curve(curve(folder), curve(alone.out))


def test_resume_in_one_process_is_exact(alone: TrainConfig, tmp_path: Path) -> None:
    folder = only_checkpoint(alone.out, 10, tmp_path / "run")
    run(replace(alone, out=folder), resume=True)
    assert curve(folder) == curve(alone.out)
    assert [line["step"] for line in run_folder.read_log(folder) if line["kind"] == "config"] == [
        0,
        10,
    ]


def test_stop_request_leaves_a_checkpoint_to_go_on_from(alone: TrainConfig, tmp_path: Path) -> None:
    config = replace(alone, out=tmp_path / "run")
    asked, ask = os.pipe()

    class StopAfterSeven(StopRequest):
        @property
        def asked(self) -> bool:
            nonlocal ask
            if len(curve(config.out)) == 6 and ask:  # the log has six of the steps, seven are done
                os.close(ask)  # as a launcher does, or its death
                ask = 0
            return super().asked

    outcome = run(config, stop=StopAfterSeven(asked))
    os.close(asked)
    assert (outcome.step, outcome.stopped) == (7, True)
    assert outcome.checkpoint.name == "step_0000007"
    assert (config.out / CURVE).exists()
    run(config, resume=True)
    assert curve(config.out) == curve(alone.out)


# --- checkpoints


def test_only_the_newest_are_kept(alone: TrainConfig, tmp_path: Path) -> None:
    config = replace(alone, out=tmp_path / "run", steps=5, save_every=1, keep=2)
    outcome = run(config)
    folder = config.out / checkpoint.FOLDER
    assert sorted(p.name for p in folder.iterdir()) == ["step_0000004", "step_0000005"]
    assert outcome.checkpoint == folder / "step_0000005"
    assert checkpoint.newest(config.out).step == 5
    assert checkpoint.newest(outcome.checkpoint).step == 5


def test_a_crash_while_writing_leaves_the_checkpoint_before(
    alone: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(alone, out=tmp_path / "run", save_every=4)
    write = checked_files.write_synced

    def crash(path: Path, data: bytes) -> str:
        if "0000008" in path.parent.name and path.name == checked_files.META:
            raise KeyboardInterrupt
        return write(path, data)

    monkeypatch.setattr(saving, "write_synced", crash)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    folder = config.out / checkpoint.FOLDER
    assert len(list(folder.iterdir())) == 2  # what the crash left is there
    assert [p.name for p in checkpoint.usable(config.out)] == ["step_0000004"]
    monkeypatch.undo()
    run(config, resume=True)
    assert curve(config.out) == curve(alone.out)
    assert not list(folder.glob(".*"))


def test_checkpoint_of_another_model_names_the_fields_on_every_rank(
    on_two: dict[str, tuple[Path, list[str]]],
) -> None:
    folder, said = on_two["other_model"]
    path = folder / checkpoint.FOLDER / "step_0000010"
    assert (
        said
        == [
            f"{path} holds another model: num_layers is 2 there and 3 here; "
            "ffn_dim is 64 there and 32 here"
        ]
        * 2
    )


def test_checkpoint_of_other_data_is_refused(on_two: dict[str, tuple[Path, list[str]]]) -> None:
    _, said = on_two["other_data"]
    assert said[0] == said[1]
    assert "was trained on other data than" in said[0]
    assert __file__ in said[0]


def test_a_run_is_not_overwritten(on_two: dict[str, tuple[Path, list[str]]]) -> None:
    folder, said = on_two["again"]
    how = "go on with it by --resume, or choose another by --out"
    assert said == [f"{folder} is not an empty folder: {how}"] * 2


def test_nothing_to_resume(alone: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"there is no checkpoint in {tmp_path}"):
        run(replace(alone, out=tmp_path), resume=True)
    with pytest.raises(ValueError, match=r"has done 20 of 20 steps; raise --steps to continue"):
        run(alone, resume=True)
    with pytest.raises(ValueError, match=rf"no run with a checkpoint in {tmp_path}"):
        checkpoint.newest_run(tmp_path)


def test_newest_run(alone: TrainConfig, tmp_path: Path) -> None:
    for name in ("b", "a"):
        shutil.copytree(alone.out, tmp_path / name)
        for path in checkpoint.usable(tmp_path / name):
            path.touch()
    (tmp_path / "empty").mkdir()
    assert checkpoint.newest_run(tmp_path) == tmp_path / "a"


# --- disagreement between ranks


def disagree(rank: int, world_size: int, config: TrainConfig) -> list[str]:
    """Ranks differ in options, then in data."""
    mine = Path(config.data[0]).with_name(f"rank{rank}.txt")
    mine.write_text(f"text of rank {rank}" * 200)
    said = train_all(rank, world_size, [(replace(config, steps=5 + rank), False)])
    if rank == 1:
        data.ByteCorpus.load = classmethod(  # type: ignore[assignment,method-assign]
            lambda cls, paths, load=data.ByteCorpus.load, **_: load([mine])
        )
    return said + train_all(rank, world_size, [(config, False)])


def test_ranks_that_disagree_hear_it_on_every_rank(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for options, texts in run_ranks(disagree, 2, config):
        assert options == "ranks 0 and 1 have different options: steps is 5 and 6"
        assert "rank 1 reads other data than rank 0" in texts
    assert not config.out.exists()


# --- the options


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"seq_len": 0}, ValueError, "seq_len must be >= 1, got 0"),
        ({"steps": 1.5}, TypeError, "steps must be an int, got 1.5"),
        ({"batch_size": -1}, ValueError, "batch_size must be >= 1, got -1"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be >= 0, got -1"),
        ({"seed": "x"}, TypeError, "seed must be an int, got 'x'"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate must be > 0, got 0.0"),
        ({"learning_rate": math.nan}, ValueError, "learning_rate must be > 0, got nan"),
        ({"final_learning_rate": 2}, ValueError, "final_learning_rate .* <= 1, got 2"),
        ({"beta2": 1.0}, ValueError, "beta2 must be below 1, got 1.0"),
        ({"max_grad_norm": "x"}, TypeError, "max_grad_norm must be a number, got 'x'"),
        ({"keep": 0}, ValueError, "keep must be >= 1, got 0"),
        ({"sequence_ranks": 0}, ValueError, "sequence_ranks must be >= 1, got 0"),
        ({"layout": "striped"}, ValueError, "layout must be one of 'auto', 'contiguous', 'zigzag'"),
        ({"device": "tpu"}, ValueError, "device must be one of 'auto', 'cpu', 'cuda'"),
        ({"dtype": "int8"}, ValueError, "dtype must be one of .* got 'int8'"),
        ({"activation_checkpoint": "some"}, ValueError, "checkpoint must be one of .* got 'some'"),
        (
            {"activation_checkpoint_blocks": 2},
            ValueError,
            "needs checkpoint 'keep_attention'; got 2 with",
        ),
        ({"chunk_rows": 0}, ValueError, "chunk_rows must be >= 1, got 0"),
        ({"chunk_rows": 0.5}, TypeError, "chunk_rows must be an int, got 0.5"),
        ({"heldout_fraction": 0.0}, ValueError, "heldout_fraction must be > 0 and <= 0.5, got 0"),
        ({"heldout_fraction": 0.6}, ValueError, "heldout_fraction must be > 0 .*, got 0.6"),
    ],
)
def test_config_refuses(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        TrainConfig(**{"out": "run", **changes})


def test_config_survives_json() -> None:
    config = TrainConfig(out=Path("run"), data=("a", "b"), model=MODEL, sequence_ranks=2)
    assert TrainConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="unknown training options: colour"):
        TrainConfig.from_dict({**json.loads(config.to_json()), "colour": "red"})


def test_options_of_earlier_versions_are_read() -> None:
    config = TrainConfig(out=Path("run"), model=MODEL)
    values = json.loads(config.to_json())
    for name in (
        "activation_checkpoint",
        "activation_checkpoint_blocks",
        "chunk_rows",
        "heldout_fraction",
    ):
        del values[name]
    assert TrainConfig.from_dict(values) == config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_options_of_a_run(name: str) -> None:
    options = preset_options(name)
    config = make_run_config(Path("run"), {}, preset=name, resume=False, runs=Path("runs"))
    for option, value in options.items():
        assert getattr(config, option, getattr(config.model, option, None)) == value
    assert 0 < config.learning_rate_at(0) < config.learning_rate_at(config.warmup_steps)


def test_options_count_more_than_the_preset() -> None:
    def configured(preset: str | None, **options: Any) -> TrainConfig:
        return make_run_config(Path("run"), options, preset=preset, resume=False, runs=Path("runs"))

    assert configured(None) == configured("small") == TrainConfig(out=Path("run"))
    base = configured("longnet-base", steps=5, num_layers=2)
    assert (base.steps, base.model.num_layers, base.model.embed_dim) == (5, 2, 768)
    with pytest.raises(ValueError, match="preset must be one of 'small', 'longnet-base'; got 'x'"):
        configured("x")
    with pytest.raises(ValueError, match="resumed keeps its own options; got preset 'small'"):
        make_run_config(Path("run"), {}, preset="small", resume=True, runs=Path("runs"))


def test_options_reach_the_run_and_its_model() -> None:
    config = TrainConfig(out=Path("run")).with_options({"steps": 7, "num_layers": 3})
    assert (config.steps, config.model.num_layers) == (7, 3)
    with pytest.raises(TypeError, match="colour"):
        config.with_options({"colour": "red"})


def test_grid_of_ranks() -> None:
    config = TrainConfig(out=Path("run"), sequence_ranks=2, batch_size=3)
    assert config.group_size(6) == 2
    assert replace(config, sequence_ranks=None).group_size(6) == 6
    with pytest.raises(ValueError, match="must divide the number of ranks, 5; got 2"):
        config.group_size(5)
    with pytest.raises(ValueError, match=r"make 4 groups, .* got batch_size 3"):
        config.group_size(8)


def test_learning_rate_schedule() -> None:
    config = TrainConfig(
        out=Path("run"), learning_rate=1.0, warmup_steps=4, steps=104, final_learning_rate=0.2
    )
    rates = [config.learning_rate_at(step) for step in range(104)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[54] == pytest.approx(0.6)
    assert config.learning_rate_at(104) == pytest.approx(0.2)
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))


def test_bfloat16_trains(alone: TrainConfig, tmp_path: Path) -> None:
    config = replace(alone, out=tmp_path / "run", dtype="bfloat16", steps=3)
    run(config)
    # The schedule is shorter, so only the first step is the same.
    (_, _, loss), *_ = curve(config.out)
    assert loss == pytest.approx(curve(alone.out)[0][2], rel=0.02)
    assert loss != curve(alone.out)[0][2]


def test_diverging_run_says_so(alone: TrainConfig, tmp_path: Path) -> None:
    config = replace(alone, out=tmp_path / "run", learning_rate=1e38, weight_decay=1e4)
    with pytest.raises(TrainingError, match=r"the loss of step \d+ is (nan|inf); a lower learning"):
        run(config)


# --- the log


def test_log_drops_what_a_resumed_run_repeats(tmp_path: Path) -> None:
    with run_folder.RunLog(tmp_path, start=0) as first:
        for step in range(1, 6):
            first.write("step", step=step)
    with (tmp_path / run_folder.LOG).open("a") as file:
        file.write('{"kind": "step", "st')  # a crash
    with run_folder.RunLog(tmp_path, start=3) as second:
        second.write("step", step=4, again=True)
    assert [(line["step"], line.get("again")) for line in run_folder.read_log(tmp_path)] == [
        (1, None),
        (2, None),
        (3, None),
        (4, True),
    ]


def test_damaged_log_is_named(tmp_path: Path) -> None:
    (tmp_path / run_folder.LOG).write_text('{"kind": "step"}\nnonsense\n')
    with pytest.raises(ValueError, match=rf"{tmp_path / run_folder.LOG}, line 2 is not JSON"):
        run_folder.read_log(tmp_path)


# --- samples


def test_sampling(alone: TrainConfig) -> None:
    def sampled(**options: Any) -> bytes:
        return b"".join(sample_bytes(alone.out, b"line 12", count=12, **options))

    assert len(sampled()) == 12
    assert sampled(seed=1) == sampled(seed=1)
    assert sampled(temperature=5.0, seed=1) != sampled(temperature=5.0, seed=2)
    assert sampled(temperature=0) == sampled(top_k=1, temperature=3.0, seed=9)
    assert sampled(temperature=0) == sampled(top_p=1e-9, temperature=3.0, seed=9)
    step = alone.out / checkpoint.FOLDER / "step_0000020"
    assert b"".join(sample_bytes(step, b"line 12", count=12)) == sampled()
    long_prompt = b"x" * (2 * alone.seq_len)
    assert len(b"".join(sample_bytes(alone.out, long_prompt, count=3))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": b""}, "at least one byte"),
        ({"count": 0}, "count must be >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be finite and >= 0; got -1.0"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
        ({"top_k": 257}, "top_k must be at most 256; got 257"),
    ],
)
def test_sampling_refuses(alone: TrainConfig, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_bytes(alone.out, **{"prompt": b"x", **options})


def test_decoding_waits_for_whole_characters() -> None:
    assert list(decoded([bytes([byte]) for byte in "aé€".encode()])) == ["a", "é", "€"]
    assert list(decoded([b"a\xff", b"\xe2", b"\x82"])) == ["a\ufffd", "\ufffd"]


def test_initial_weights_come_from_the_seed_alone(alone: TrainConfig, tmp_path: Path) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    config = replace(alone, out=tmp_path / "run", steps=1)
    run(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert curve(config.out)[0] == curve(alone.out)[0]
    other = replace(alone, out=tmp_path / "other", steps=1, seed=1)
    run(other)
    assert curve(other.out)[0] != curve(alone.out)[0]
