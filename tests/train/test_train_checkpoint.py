"""Checkpoints that are damaged, malicious, half-written or too large for the disk; the lock."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import pickle
import random
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ring_dilated_attention.checks import forked_context, run_ranks
from ring_dilated_attention.cli import app
from ring_dilated_attention.nn import LongNet, LongNetConfig
from ring_dilated_attention.train import TrainConfig, TrainingError, checkpoint, run_folder
from ring_dilated_attention.train.checked_files import META, SUMS
from ring_dilated_attention.train.checkpoint import Checkpoint
from ring_dilated_attention.train.loop import run
from ring_dilated_attention.train.ranks import joined
from ring_dilated_attention.train.saving import Trained, save

MODEL = LongNetConfig(
    num_layers=1,
    embed_dim=8,
    num_heads=2,
    ffn_dim=8,
    segment_lengths=(8,),
    dilation_rates=(1,),
)
FILE_BYTES = 9000  # of a test's checkpoint: several files, the embedding's larger than that


def make_config(folder: Path) -> TrainConfig:
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text\n" for i in range(200)))
    return TrainConfig(
        out=folder / "run",
        data=(str(text),),
        model=MODEL,
        seq_len=32,
        steps=3,
        save_every=1,
        eval_windows=1,
        device="cpu",
    )


def state(seed: int) -> tuple[LongNet, torch.optim.AdamW]:
    """A model after a step, so that its optimizer has moments: the same in every process."""
    torch.manual_seed(seed)
    model = LongNet(MODEL)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():  # a backward would differ with the number of threads
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def tensors_of(model: LongNet, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in checkpoint.tensors_of(model, optimizer).items()}


def write(config: TrainConfig, step: int, seed: int = 0) -> Path:
    with joined(config) as world:
        model, optimizer = state(seed)
        trained = Trained(step=step, model=model, optimizer=optimizer, fingerprint="fingerprint")
        return save(config, trained, world, file_bytes=FILE_BYTES)


def sealed(path: Path) -> None:
    """Make the checksums of a checkpoint right again, as who means harm would."""
    lines = []
    for file in sorted(path.iterdir()):
        if file.name != SUMS:
            lines.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
    (path / SUMS).write_text("".join(lines))


def with_meta(path: Path, **changes: Any) -> None:
    meta = json.loads((path / META).read_text())
    (path / META).write_text(json.dumps({**meta, **changes}))
    sealed(path)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return make_config(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of three steps with a checkpoint of each."""
    config = make_config(tmp_path_factory.mktemp("trained"))
    run(config)
    return config


@pytest.fixture
def copied(trained: TrainConfig, tmp_path: Path) -> TrainConfig:
    """A copy of that run, to go on with."""
    shutil.copytree(trained.out, tmp_path / "run")
    return replace(trained, out=tmp_path / "run", steps=4)


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert len(text) <= 300
    return text


# --- what is written and read


def test_a_checkpoint_is_read_as_it_was_written(config: TrainConfig) -> None:
    path = write(config, 7)
    files = sorted(p.name for p in path.iterdir())
    assert len(files) > 4
    assert set(files) - {META, SUMS} == {
        f"tensors_{index:05d}.safetensors" for index in range(len(files) - 2)
    }
    found = checkpoint.newest(config.out)
    assert (found.path, found.step, found.config, found.damaged) == (path, 7, config, ())
    model, optimizer = state(seed=1)
    found.load(model, optimizer)
    expected = tensors_of(*state(seed=0))
    actual = tensors_of(model, optimizer)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    alone = LongNet(MODEL)
    found.load(alone)
    assert all(torch.equal(p, expected[f"model.{n}"]) for n, p in alone.named_parameters())


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
def test_sha256sum_checks_a_checkpoint(config: TrainConfig) -> None:
    path = write(config, 1)
    command = ["sha256sum", "--check", "--strict", "--quiet", SUMS]
    assert subprocess.run(command, cwd=path, check=False).returncode == 0


def write_on_ranks(rank: int, world_size: int, config: TrainConfig) -> tuple[Path, str]:
    """Write a checkpoint, then another one while rank 1 has no room."""
    path = write(config, 1)
    if rank == 1:

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        os.fsync = full  # type: ignore[assignment]  # in this process alone
    with pytest.raises(TrainingError) as error:
        write(config, 2)
    return path, one_line(error)


def test_ranks_write_together_and_a_full_disk_on_one_is_one_line_on_all(
    config: TrainConfig, tmp_path: Path
) -> None:
    path = write(replace(config, out=tmp_path / "one"), 1)
    for together, text in run_ranks(write_on_ranks, 3, config):
        for file in path.glob("*.safetensors"):
            assert (together / file.name).read_bytes() == file.read_bytes()
        assert re.fullmatch(
            r"cannot save step_0000002 \([\d.]+ MB\): rank 1: No space left on device "
            r"\([\d.,]+ MB free\): tensors_00001.safetensors; still in .*/run/checkpoints: "
            r"step_0000001",
            text,
        )
    checkpoint.newest(config.out).load(*state(seed=1))
    assert [p.name for p in (config.out / checkpoint.FOLDER).iterdir()] == ["step_0000001"]


def test_a_full_disk_is_one_line_and_leaves_what_was_there(config: TrainConfig) -> None:
    write(config, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))  # bytes of a file
    try:
        with pytest.raises(TrainingError, match=r"File too large \([\d,.]+ MB free\)") as error:
            write(config, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert one_line(error).endswith(f"still in {config.out / checkpoint.FOLDER}: step_0000001")
    assert checkpoint.newest(config.out).step == 1
    assert write(config, 2).is_dir()


def test_a_log_that_cannot_be_written_is_one_line(
    copied: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder.RunLog, "write", full)
    with pytest.raises(TrainingError, match=r"cannot write to .*: No space left on") as error:
        run(copied, resume=True)
    assert "step_0000001, step_0000002, step_0000003" in one_line(error)


# --- damage


def flips(path: Path, count: int) -> Iterator[tuple[Path, int, int]]:
    """Bits of a checkpoint: the first and last byte of every file, and others drawn at random."""
    draw = random.Random(0)
    files = sorted(path.iterdir())
    for index in range(count):
        file = files[index % len(files)]
        size = file.stat().st_size
        turn = index // len(files)
        offset = (0, size - 1)[turn] if turn < 2 else draw.randrange(size)
        yield file, offset, draw.randrange(8)


def test_200_flipped_bits_are_found(config: TrainConfig) -> None:
    path = write(config, 1)
    assert len(list(path.iterdir())) > 4
    model, optimizer = state(seed=1)
    found = set()
    for file, offset, bit in flips(path, 200):
        data = bytearray(file.read_bytes())
        data[offset] ^= 1 << bit
        right = file.read_bytes()
        file.write_bytes(data)
        # As a run and `rda sample` look for a checkpoint, and as loading reads it.
        with pytest.raises(ValueError, match=r"damaged|not a whole checkpoint") as error:
            checkpoint.newest(config.out)
        text = one_line(error)
        assert str(path) in text
        assert file.name in text
        with pytest.raises(ValueError, match=r"damaged|not a whole checkpoint"):
            Checkpoint.open(path).load(model, optimizer)
        file.write_bytes(right)
        found.add((file.name, offset, bit))
    assert len(found) > 190
    assert {name for name, *_ in found} == {p.name for p in path.iterdir()}
    checkpoint.newest(config.out).load(model, optimizer)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def missing(file: Path) -> None:
    file.unlink()


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def linked(file: Path) -> None:
    other = file.parent.parent / "elsewhere"
    file.rename(other)
    file.symlink_to(other)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def sparse(file: Path) -> None:
    os.truncate(file, 1 << 40)


DAMAGES = (truncated, emptied, missing, longer, linked, piped, a_folder, sparse)


@pytest.mark.parametrize("name", [META, SUMS, "tensors_00000.safetensors", "last"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line_that_names_the_file(
    config: TrainConfig, damage: Callable[[Path], None], name: str
) -> None:
    older, path = write(config, 1), write(config, 2)
    file = sorted(path.glob("*.safetensors"))[-1] if name == "last" else path / name
    damage(file)
    with pytest.raises(ValueError, match=r"damaged|not a whole checkpoint") as error:
        checkpoint.newest(path)
    assert file.name in one_line(error)
    found = checkpoint.newest(config.out)
    assert found.path == older
    (line,) = found.damaged
    assert line == str(error.value)


class Malice:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (os.environ["MALICE"],))


@pytest.mark.parametrize("right_sums", [False, True])
def test_a_pickle_in_any_file_is_never_executed(
    trained: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right_sums: bool
) -> None:
    done = tmp_path / "done"
    monkeypatch.setenv("MALICE", str(done))
    torch.save(Malice(), tmp_path / "zipped")
    payloads = [pickle.dumps(Malice()), (tmp_path / "zipped").read_bytes()]
    pickle.loads(payloads[0])
    done.rmdir()  # that is what they would make
    path = checkpoint.usable(trained.out)[-1]
    unlisted = (".metadata", "__0_0.distcp")  # names of 0.1.0
    for name in (*(p.name for p in path.iterdir()), *unlisted):
        for payload in payloads:
            out = tmp_path / "run"
            shutil.copytree(trained.out, out)
            for victim in checkpoint.usable(out):  # so that there is nothing else to take
                (victim / name).write_bytes(payload)
                if right_sums and name != SUMS:
                    files = {p.name: p.stat().st_size for p in victim.glob("*.safetensors")}
                    if name == META:
                        sealed(victim)
                    else:
                        if name in unlisted:
                            files[name] = len(payload)
                        with_meta(victim, files=files)
            config = replace(trained, out=out, steps=4)
            if name in unlisted and not right_sums:  # then it is not opened
                run(config, resume=True)
            else:
                with pytest.raises(ValueError, match=r"whole|damaged"):
                    run(config, resume=True)
            result = CliRunner().invoke(
                app, ["sample", f"--checkpoint={out}", "--prompt=x", "--max-new-tokens=1"]
            )
            assert result.exit_code in (0, 2), result.output
            assert not done.exists(), name
            shutil.rmtree(out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -5}, "step must be an int >= 1, got -5"),
        ({"step": True}, "step must be an int >= 1, got True"),
        ({"step": "1"}, "step must be an int >= 1, got '1'"),
        ({"step": 9}, "step must be that of the folder's name, got 9"),
        ({"format": 2}, "format must be 3, got 2: another version"),
        ({"fingerprint": None}, "fingerprint must be a text"),
        ({"files": {}}, "files must be those of SHA256SUMS"),
        ({"files": []}, "files must be those of SHA256SUMS"),
        ({"files": None}, "TypeError"),
        ({"config": None}, "TypeError"),
        ({"config": {}}, "KeyError: 'model'"),
        ({"config": []}, "Error"),
        ({"config": {"out": "x", "model": {}, "colour": 1}}, "unknown training options: colour"),
    ],
)
def test_a_description_is_checked(
    config: TrainConfig, changes: dict[str, Any], message: str
) -> None:
    path = write(config, 1)
    with_meta(path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        checkpoint.newest(config.out)
    assert f"{META}: " in one_line(error)


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe\x00", b"[" * 100_000, b"{", b"", b"null", b"[]", b'"text"', b"1" * 5000],
    ids=["no_utf8", "deep", "cut", "empty", "null", "list", "text", "number"],
)
def test_a_description_that_is_no_json_object(config: TrainConfig, text: bytes) -> None:
    path = write(config, 1)
    (path / META).write_bytes(text)
    sealed(path)
    with pytest.raises(ValueError, match=f"not a whole checkpoint of rda train: {META}: ") as error:
        checkpoint.newest(config.out)
    one_line(error)


def test_tensors_of_another_shape_are_refused(config: TrainConfig) -> None:
    path = write(config, 1)
    other = replace(config, model=replace(MODEL, ffn_dim=16))
    meta = json.loads((path / META).read_text())
    with_meta(path, config={**meta["config"], "model": vars(other.model)})
    found = checkpoint.newest(config.out)
    assert found.model == other.model
    with pytest.raises(ValueError, match=r"tensors_\d+.safetensors: tensor .* is not one of this"):
        found.load(LongNet(other.model))


def test_files_that_are_not_listed_are_left_alone(config: TrainConfig) -> None:
    path = write(config, 1)
    (path / ".DS_Store").write_bytes(b"anything")
    os.mkfifo(path / "tensors_00099.safetensors")
    checkpoint.newest(config.out).load(*state(seed=1))


# --- resuming past damage


def damaged_tensors(path: Path) -> None:
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def without_meta(path: Path) -> None:
    (path / META).unlink()


def empty_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize("damage", [damaged_tensors, without_meta, empty_folder])
def test_a_run_goes_on_from_the_newest_whole_checkpoint(
    copied: TrainConfig,
    trained: TrainConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # of pytest-xdist
    last = checkpoint.usable(copied.out)[-1]
    damage(last)
    # All steps are those of an undisturbed run, the damaged step's checkpoint is written anew.
    outcome = run(replace(copied, steps=3), resume=True)
    assert outcome.step == 3
    said = [line for line in capsys.readouterr().out.splitlines() if str(last) in line]
    assert len(said) == 1
    assert said[0].endswith("; going on from step_0000002")
    assert checkpoint.newest(copied.out).path == last
    expected = {p.name: p.read_bytes() for p in checkpoint.usable(trained.out)[-1].iterdir()}
    actual = {p.name: p.read_bytes() for p in last.iterdir()}
    for name in expected:
        if name.endswith(".safetensors"):
            assert actual[name] == expected[name]
    values = [(line["kind"], line.get("step"), line.get("bits_per_byte")) for line in
              run_folder.read_log(trained.out)][1:]  # fmt: skip
    again = [(line["kind"], line.get("step"), line.get("bits_per_byte")) for line in
             run_folder.read_log(copied.out) if line["kind"] != "config"]  # fmt: skip
    assert again == values


def test_sampling_takes_the_newest_whole_checkpoint_and_says_so(copied: TrainConfig) -> None:
    last = checkpoint.usable(copied.out)[-1]
    damaged_tensors(last)
    arguments = ["sample", "--prompt=line", "--max-new-tokens=2", "--checkpoint"]
    result = CliRunner().invoke(app, [*arguments, str(copied.out)])
    assert result.exit_code == 0, result.output
    assert "; taking step_0000002\n2 tokens, " in result.stderr
    assert result.stderr.startswith(f"{last} is damaged: tensors_00000.safetensors does not have")
    assert result.stderr.count("\n") == 2  # and the speed
    result = CliRunner().invoke(app, [*arguments, str(last)])
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {last} is damaged: tensors_00000.safetensors")
    assert result.output.count("\n") == 1
    for path in checkpoint.usable(copied.out)[:-1]:
        damaged_tensors(path)
    result = CliRunner().invoke(app, [*arguments, str(copied.out)])
    assert result.exit_code == 2
    assert result.output.startswith("error: none of 3 checkpoints is whole; the newest: ")


def test_incomplete_checkpoints_do_not_count_as_kept(config: TrainConfig) -> None:
    config = replace(config, keep=2)
    for step in (1, 2, 3):
        write(config, step)
    without_meta(checkpoint.usable(config.out)[-1])
    write(config, 4)
    later = write(config, 9)
    write(config, 5)
    names = [path.name for path in checkpoint.usable(config.out)]
    assert names == [f"step_000000{step}" for step in (3, 4, 5, 9)]
    assert checkpoint.newest(config.out).path == later


def test_a_link_in_place_of_a_checkpoint_goes_without_what_it_links(
    config: TrainConfig, tmp_path: Path
) -> None:
    config = replace(config, keep=1)
    first = write(config, 1)
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    write(config, 2)
    assert [path.name for path in checkpoint.usable(config.out)] == ["step_0000002"]
    assert (tmp_path / "elsewhere" / META).exists()


# --- the lock


def hold(folder: Path, held: Any) -> None:
    """Train there, as far as others can see."""
    with run_folder.RunLock(folder, resume=False):
        held.set()
        Event().wait()  # until it is killed


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_training_is_told_by_whom(copied: TrainConfig, resume: bool, ranks: int) -> None:
    options = ["train", f"--out={copied.out}", f"--ranks={ranks}", "--steps=9"]
    options += ["--resume"] if resume else [f"--data={copied.data[0]}"]
    context = forked_context()
    held = context.Event()
    holder = context.Process(target=hold, args=(copied.out, held))
    holder.start()
    try:
        assert held.wait(100)
        result = CliRunner().invoke(app, options)
        assert result.exit_code == 2, result.output
        assert re.fullmatch(
            rf"error: {copied.out} is in use by a training, process {holder.pid} on \S+ since "
            r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d; wait for it, or choose another folder\n",
            result.output,
        )
        # The lock goes with its process, whatever ends that.
        holder.kill()
        holder.join()
        assert (copied.out / run_folder.LOCK).exists()
        with run_folder.RunLock(copied.out, resume=True):
            pass
        assert not (copied.out / run_folder.LOCK).exists()
    finally:
        holder.kill()


def test_a_run_holds_its_folder_while_it_runs(copied: TrainConfig) -> None:
    held = []

    class Look:
        def ask(self) -> None: ...

        @property
        def asked(self) -> bool:
            with pytest.raises(ValueError, match=f"in use by a training, process {os.getpid()} on"):
                run(copied, resume=True)
            held.append(time.monotonic())
            return False

    run(copied, resume=True, stop=Look())  # type: ignore[arg-type]
    assert len(held) == 1
    assert not (copied.out / run_folder.LOCK).exists()


def test_a_folder_that_nothing_comes_of_is_not_left(tmp_path: Path) -> None:
    with run_folder.RunLock(tmp_path / "run", resume=False):
        assert (tmp_path / "run" / run_folder.LOCK).exists()
    assert not (tmp_path / "run").exists()


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ValueError, match="cannot be locked against a second training: No locks"):
        run_folder.RunLock(tmp_path, resume=False)
