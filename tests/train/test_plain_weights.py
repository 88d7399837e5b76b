"""Weights for other programs and back: rda export, plain weights, torch's own checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import runpy
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from support.launched import run_program
from test_train_checkpoint import DAMAGES, MODEL, make_config, sealed, state, tensors_of, write
from typer.testing import CliRunner

from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.cli import app
from ring_dilated_attention.nn import LongNet, LongNetConfig
from ring_dilated_attention.train import TrainConfig, export_newest, sample_bytes
from ring_dilated_attention.train import make_config as options_of
from ring_dilated_attention.train.checked_files import SUMS
from ring_dilated_attention.train.init_from import load_weights
from ring_dilated_attention.train.loop import run
from ring_dilated_attention.train.plain_weights import CONFIG, WEIGHTS, PlainWeights, weights_at
from ring_dilated_attention.train.ranks import joined

EXAMPLE = Path(__file__).parents[2] / "examples" / "checkpoints.py"
TINY = 1e-12  # learning rate of a step after which the weights are still those to begin with


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return make_config(tmp_path)


@pytest.fixture
def exported(config: TrainConfig) -> Path:
    write(config, 1)
    to = config.out.parent / "weights"
    export_newest(config.out, to)
    return to


def invoke(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    return done.exit_code, done.stdout, done.stderr


def sampled(path: Path) -> bytes:
    return b"".join(sample_bytes(path, b"line", count=20))


# --- rda export and back


def test_exported_weights_are_those_of_the_checkpoint(exported: Path, config: TrainConfig) -> None:
    model, _ = state(seed=0)
    tensors = load_file(exported / WEIGHTS)
    assert tensors.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(tensors[name], p) for name, p in model.named_parameters())
    LongNet(LongNetConfig(**json.loads((exported / CONFIG).read_text()))).load_state_dict(tensors)
    assert sampled(exported) == sampled(config.out)
    if shutil.which("sha256sum"):
        check = ["sha256sum", "--check", "--strict", "--quiet", SUMS]
        assert subprocess.run(check, cwd=exported, check=False).returncode == 0
    assert not [*exported.parent.glob(".partial_*")]


def test_rda_export_and_rda_sample(config: TrainConfig, tmp_path: Path) -> None:
    path = write(config, 1)
    code, out, err = invoke("export", config.out, "--to", tmp_path / "w")
    assert (code, err) == (0, "")
    assert out == f"wrote the weights of {path} to {tmp_path / 'w'}\n"
    code, out, err = invoke("sample", "--checkpoint", tmp_path / "w", "--prompt=x")
    assert code == 0, err
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for words, message in (
        (("export", config.out, "--to", tmp_path / "mine"), "mine is not an empty folder; choose"),
        (("export", config.out, "--to", tmp_path / "mine/notes.txt"), "is not an empty folder"),
        (("export", tmp_path / "w", "--to", tmp_path / "z"), "w holds plain weights already"),
        (("export", tmp_path / "mine", "--to", tmp_path / "z"), "there is no checkpoint in"),
        (("export", config.out), "export needs --to: folder to write to"),
        (("export", "--to", tmp_path / "z"), "export needs RUN: a run, whose newest"),
    ):
        code, out, err = invoke(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_line(
    config: TrainConfig, tmp_path: Path
) -> None:
    older, newer = write(config, 1), write(config, 2)
    (newer / "tensors_00000.safetensors").write_bytes(b"")
    code, out, err = invoke("export", config.out, "--to", tmp_path / "w")
    assert code == 0
    assert "step_0000002" in err
    assert "taking step_0000001" in err
    assert str(older) in out


# --- rda train --init-from


def begun(config: TrainConfig, path: Path, **options: Any) -> TrainConfig:
    """The options of `rda train --init-from path` with those of `config`'s text."""
    given = {
        **{"data": config.data, "seq_len": 32, "steps": 1, "eval_windows": 1, "device": "cpu"},
        **{"learning_rate": TINY, "warmup_steps": 0, "init_from": str(path), **options},
    }
    folder = config.out.parent / "begun"
    return options_of(folder, given, preset=None, resume=False, runs=folder)


@pytest.mark.parametrize("kind", ["plain", "run", "checkpoint"])
def test_a_run_begins_with_weights(config: TrainConfig, exported: Path, kind: str) -> None:
    checkpoint = config.out / "checkpoints" / "step_0000001"
    path = {"plain": exported, "run": config.out, "checkpoint": checkpoint}[kind]
    longer = begun(config, path, segment_lengths=(16, None), dilation_rates=(1, 2))
    assert longer.model == replace(MODEL, segment_lengths=(16, None), dilation_rates=(1, 2))
    assert longer.init_from == str(exported if kind == "plain" else checkpoint)
    done = run(longer)
    trained = LongNet(longer.model)
    weights_at(done.checkpoint).load_weights(trained)
    for (name, got), want in zip(trained.named_parameters(), state(0)[0].parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=10 * TINY, msg=name)
    shutil.rmtree(exported)  # the run has its own copy
    resumed = options_of(longer.out, {"steps": 2}, preset=None, resume=True, runs=longer.out.parent)
    assert run(resumed, resume=True).step == 2


def test_init_from_takes_the_tokenizer_along(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    config = make_config(tmp_path)
    config = replace(
        config, train_tokenizer=260, steps=1, model=replace(config.model, vocab_size=260)
    )
    run(config)
    folder = tmp_path / "weights"
    export_newest(config.out, folder)
    assert sampled(folder) == sampled(config.out)
    new = begun(config, folder)
    assert new.tokenizer == str(folder / "tokenizer.json")
    assert new.model.vocab_size == 260
    run(new)
    with pytest.raises(ValueError, match="has another tokenizer than --tokenizer bytes"):
        begun(config, folder, tokenizer="bytes")
    with pytest.raises(ValueError, match=r"tokenizer of its own; got --train-tokenizer 300"):
        begun(config, folder, train_tokenizer=300)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json does not have the checksum"):
        sampled(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        sampled(folder)


def test_init_from_refuses_other_models_and_damaged_checkpoints(
    config: TrainConfig, exported: Path
) -> None:
    with pytest.raises(ValueError, match=r"another model: embed_dim is 8 there and 16 here; leave"):
        begun(config, exported, embed_dim=16)
    with pytest.raises(ValueError, match=r"num_kv_heads is 2 there and 1 here"):
        begun(config, exported, num_kv_heads=1)
    assert begun(config, exported, num_kv_heads=2).model.num_kv_heads == 2
    newer = write(config, 2)
    (newer / "tensors_00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"to begin with an older one, give it: .*step_0000001"):
        begun(config, config.out)
    with pytest.raises(ValueError, match="got --init-from: leave it or --resume out"):
        options_of(config.out, {"init_from": "x"}, preset=None, resume=True, runs=config.out.parent)


def load_on_ranks(rank: int, world_size: int, config: TrainConfig, folders: list[str]) -> str:
    with joined(config) as world:
        mine = replace(config, init_from=folders[rank])
        try:
            load_weights(mine, LongNet(config.model), world)
        except ValueError as error:
            return str(error)
    return "loaded"


def test_ranks_that_read_other_weights_are_named(config: TrainConfig, exported: Path) -> None:
    other = exported.parent / "other"
    shutil.copytree(exported, other)
    (other / SUMS).unlink()
    tensors = load_file(other / WEIGHTS)
    save_file({**tensors, "norm.bias": tensors["norm.bias"] + 1}, other / WEIGHTS)
    for text in run_ranks(load_on_ranks, 2, config, [str(exported), str(other)]):
        assert "rank 1 reads other weights than rank 0" in text
    (other / WEIGHTS).unlink()
    for text in run_ranks(load_on_ranks, 2, config, [str(exported), str(other)]):
        assert "model.safetensors is missing" in text


# --- what is refused


def without_sums(folder: Path) -> dict[str, torch.Tensor]:
    """A folder as another program has written it; its tensors."""
    (folder / SUMS).unlink()
    return load_file(folder / WEIGHTS)


def test_weights_of_another_program_need_no_checksums(exported: Path) -> None:
    before = sampled(exported)
    tensors = without_sums(exported)
    assert sampled(exported) == before
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, exported / WEIGHTS)
    model = LongNet(MODEL)
    PlainWeights.open(exported).load_weights(model)
    assert all(torch.equal(p, halves[name].float()) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, SUMS])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line_that_names_the_file(exported: Path, damage: Any, name: str) -> None:
    if name == SUMS and damage.__name__ == "missing":
        return  # weights of another program
    damage(exported / name)
    code, _, err = invoke("sample", "--checkpoint", exported, "--prompt=x")
    assert (code, err.count("\n")) == (2, 1)
    assert name in err


def test_every_flipped_bit_is_found(exported: Path) -> None:
    for file in sorted(exported.iterdir()):
        right = file.read_bytes()
        for offset in {0, len(right) // 2, len(right) - 1}:
            data = bytearray(right)
            data[offset] ^= 4
            file.write_bytes(data)
            with pytest.raises(ValueError, match=file.name):
                sampled(exported)
        file.write_bytes(right)
    assert sampled(exported)


def test_tensors_that_do_not_fit_are_refused(exported: Path) -> None:
    tensors = without_sums(exported)
    bias = tensors["norm.bias"]
    for changed, message in (
        ({"norm.bias": bias.double()}, "dtype of norm.bias must be one of float32, bfloat16"),
        ({"norm.bias": torch.zeros(9)}, r"norm.bias must have the shape \(8,\) of config.json"),
        ({"more": bias.clone()}, "tensor more is not one of this model"),
    ):
        save_file({**tensors, **changed}, exported / WEIGHTS)
        with pytest.raises(ValueError, match=message):
            sampled(exported)
    del tensors["norm.bias"]
    save_file(tensors, exported / WEIGHTS)
    with pytest.raises(ValueError, match=r"tensor norm.bias is missing"):
        sampled(exported)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama"}', "config.json is not that of a LongNet: .*model_type"),
        ("[]", "config.json is not that of a LongNet"),
        ("[" * 100_000, "config.json is not that of a LongNet"),
        ('{"num_layers": 999999999999}', "num_layers must be at most"),
    ],
)
def test_configs_of_other_models_are_refused(exported: Path, text: str, message: str) -> None:
    without_sums(exported)
    (exported / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=message):
        sampled(exported)


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["MALICE"],))


@pytest.mark.parametrize("right_sums", [False, True])
def test_a_pickle_in_any_file_is_never_executed(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right_sums: bool
) -> None:
    done = tmp_path / "done"
    monkeypatch.setenv("MALICE", str(done))
    payload = pickle.dumps(Malice())
    pickle.loads(payload)
    done.rmdir()  # that is what it would make
    for name in (*(p.name for p in exported.iterdir()), ".metadata", "pytorch_model.bin"):
        before = {p: p.read_bytes() for p in exported.iterdir()}
        (exported / name).write_bytes(payload)
        if right_sums and name in (CONFIG, WEIGHTS):
            (exported / SUMS).unlink()
            sealed(exported)
        code, _, err = invoke("sample", "--checkpoint", exported, "--prompt=x")
        assert code == (0 if name == "pytorch_model.bin" else 2), (name, err)
        assert not done.exists(), name
        shutil.rmtree(exported)
        exported.mkdir()
        for path, data in before.items():
            path.write_bytes(data)


# --- torch.distributed.checkpoint

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable")


@ALONE
def test_keys_are_those_of_torchs_checkpoints(config: TrainConfig) -> None:
    """Optimizer state of rda train by get_state_dict: the audit's row on checkpoints."""
    path = write(config, 1)
    model, optimizer = state(seed=1)
    runpy.run_path(str(EXAMPLE))["load_rda_checkpoint"](model, optimizer, path)
    expected = tensors_of(*state(seed=0))
    actual = tensors_of(model, optimizer)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@ALONE
def test_a_checkpoint_of_torch_is_refused_with_the_way(tmp_path: Path) -> None:
    model, _ = state(seed=0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for words in (
        ("sample", "--checkpoint", tmp_path / "dcp", "--prompt=x"),
        ("train", "--init-from", tmp_path / "dcp", "--out", tmp_path / "run"),
        ("export", tmp_path / "dcp", "--to", tmp_path / "weights"),
    ):
        code, _, err = invoke(*words)
        assert (code, err.count("\n")) == (2, 1)
        assert "torch.distributed.checkpoint, whose index is a pickle" in err


@pytest.mark.slow
def test_the_example_of_checkpoints_on_two_ranks(tmp_path: Path) -> None:
    done = run_program(EXAMPLE, ["--out", str(tmp_path)], ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sampled(tmp_path / "weights")
