"""examples/train_longnet.py: learns, resumes on other ranks, survives damage and signals."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launched import EXAMPLES, example, run_program

PROGRAM = EXAMPLES / "train_longnet.py"
SMALL = {
    "--num-layers": 2,
    "--embed-dim": 32,
    "--num-heads": 2,
    "--segment-lengths": "32,all",
    "--dilation-rates": "1,4",
    "--seq-len": 101,
    "--batch-size": 2,
    "--steps": 8,
    "--warmup-steps": 2,
    "--save-every": 2,
    "--keep": 4,
    "--eval-every": 4,
    "--eval-windows": 4,
}


def train(ranks, out, *arguments, **options):
    """Run the program; ranks 0: as one process without a launcher."""
    given = {**SMALL, "--out": out, "--data": PROGRAM}
    given |= {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    words = [str(word) for pair in given.items() for word in pair]
    return run_program(PROGRAM, [*words, *arguments], ranks)


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out, key="training"):
    return {entry["step"]: entry[key] for entry in log_of(out) if key in entry}


def names(out):
    return sorted(path.name for path in out.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two ranks that was not interrupted, with checkpoints of 2, 4, 6 and 8."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    example("train_longnet")  # ranks are forked from a process that imports what this one has
    done = train(2, out)
    assert done.returncode == 0, done.stderr
    return out


def interrupted(run, out, step):
    """A copy of a run as it was after a step; its log is that of a run killed later."""
    shutil.copytree(run, out)
    for path in out.glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return out


def test_train_longnet_learns_and_leaves_its_files(run):
    found = losses(run)
    assert list(found) == list(range(1, 9))
    assert found[8] < 0.9 * found[1]
    assert list(losses(run, "heldout")) == [4, 8]
    assert names(run) == ["log.jsonl", "loss.png", *(f"step_000000{step}" for step in (2, 4, 6, 8))]


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (0, []),
        (1, ["--fsdp"]),
        (2, ["--sequence-ranks", "1"]),
        (3, []),
        pytest.param(3, ["--fsdp"], marks=pytest.mark.slow),
    ],
)
def test_train_longnet_resumes_on_other_ranks_with_the_same_losses(run, tmp_path, ranks, options):
    out = interrupted(run, tmp_path / "run", 4)
    done = run_program(PROGRAM, ["--resume", "--out", out, *options, "--keep", "2"], ranks)
    assert done.returncode == 0, done.stderr
    assert "going on from step 4" in done.stdout
    for key in ("training", "heldout"):
        assert losses(out, key) == pytest.approx(losses(run, key), rel=1e-5)
    assert names(out) == ["log.jsonl", "loss.png", "step_0000006", "step_0000008"]


class Harmful:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


SHARD, RUN = "shard-00002-model-00001-of-00001.safetensors", "run.json"
DAMAGES = {
    "truncated": lambda path, mark: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": lambda path, mark: path.unlink(),
    "pickled": lambda path, mark: path.write_bytes(pickle.dumps(Harmful(mark))),
    "other JSON": lambda path, mark: path.write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [SHARD, RUN])
def test_train_longnet_passes_over_a_damaged_checkpoint(run, tmp_path, capsys, damage, name):
    out, mark = interrupted(run, tmp_path / "run", 4), tmp_path / "mark"
    newest_checkpoint = example("train_longnet").newest_checkpoint
    DAMAGES[damage](out / "step_0000004" / name, mark)
    path, found = newest_checkpoint(out)
    assert (path.name, found["step"]) == ("step_0000002", 2)
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"{out / 'step_0000004'} is damaged and passed over: ")
    DAMAGES[damage](out / "step_0000002" / name, mark)
    with pytest.raises(ValueError, match="there is no whole checkpoint in "):
        newest_checkpoint(out)
    assert not mark.exists()


def test_train_longnet_follows_no_link_out_of_its_folder_and_waits_for_no_pipe(tmp_path):
    """A run that somebody else has packed is resumed: nothing outside of its folder changes."""
    module, outside, out = example("train_longnet"), tmp_path / "outside", tmp_path / "run"
    out.mkdir()
    outside.write_text(text := '{"step": 1, "training": 8.0}\n')
    for name in ("log.jsonl", ".log.jsonl", "loss.png"):
        (out / name).symlink_to(outside)
    with module.open_log(out, 2) as log:
        log.write(text)
    module.plot(out, 2)
    assert outside.read_text() == text
    assert (out / "log.jsonl").read_text() == 2 * text
    assert not any(path.is_symlink() for path in out.iterdir())
    (out / "log.jsonl").unlink()
    os.mkfifo(out / "log.jsonl")
    assert module.read_log(out, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "launcher"),
    [
        (signal.SIGTERM, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
        (signal.SIGINT, []),
    ],
)
def test_train_longnet_saves_when_it_is_told_to_end(tmp_path, number, launcher):
    out = tmp_path / "run"
    rare = dict.fromkeys(("--steps", "--save-every", "--eval-every"), 10_000)
    options = [str(word) for pair in (SMALL | rare).items() for word in pair]
    command = [
        *(sys.executable, *launcher, str(PROGRAM)),
        *(*options, "--out", str(out), "--data", str(PROGRAM)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + 200
        while not (out / "log.jsonl").exists() or len(log_of(out)) < 3:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(number)
        said = process.communicate(timeout=100)[0].decode()
    assert launcher or process.returncode == 0
    assert f"the same command with --resume --out {out} goes on" in said
    assert (out / "loss.png").exists()
    (path,) = out.glob("step_*")
    assert int(path.name.removeprefix("step_")) == len(log_of(out))
    if launcher:
        done = train(0, out, "--resume", steps=len(log_of(out)) + 1, save_every=10_000)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "holds a run: add --resume, or choose another --out"),
        (["--resume", "--embed-dim", "64"], "is of another model: leave out the model's options"),
        (["--resume", "--data", __file__], "was trained on other text"),
        (["--resume"], "has done 8 steps: raise --steps to go on"),
        (["--resume", "--sequence-ranks", "2"], "1 ranks must be a multiple of --sequence-ranks"),
        (["--resume", "--seq-len", "1M"], "--seq-len 1,048,576 is too long for"),
        (["--resume", "--dilation-rates", "1,all"], "a dilation rate must be an int"),
        (["--resume", "--data", "nowhere"], "nowhere"),
    ],
)
def test_train_longnet_refuses_what_cannot_be_in_one_line(run, monkeypatch, words, message):
    module = example("train_longnet")
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 1)
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        module.read_options(["--out", str(run), *map(str, words)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_train_longnet_tells_once_what_is_wrong(run):
    for words, code in (([], 1), (["--steps", "none"], 2)):
        done = run_program(PROGRAM, ["--out", run, *words], 2)
        assert done.returncode == code
        assert done.stderr.count("train_longnet.py: ") == 1
        assert "Traceback" not in done.stderr


def test_generation_continues_a_prompt_with_a_checkpoint(run, tmp_path):
    out = interrupted(run, tmp_path / "run", 6)
    DAMAGES["truncated"](out / "step_0000006" / SHARD, None)
    words = ["--checkpoint", out, "--prompt", "Zürich", "--new-tokens", "20"]
    said = {run_program(EXAMPLES / "generation.py", words, ranks).stdout for ranks in (0, 2)}
    (text,) = said
    assert text.startswith("Zürich")
    assert len(text) > len("Zürich\n")
    done = run_program(EXAMPLES / "generation.py", ["--checkpoint", tmp_path], 0)
    assert (done.returncode, done.stderr) == (1, f"there is no whole checkpoint in {tmp_path}\n")
