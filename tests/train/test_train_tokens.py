"""Runs on subword tokens: what is learned from, what is shown, what is kept, what is refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ring_dilated_attention.checks import run_ranks
from ring_dilated_attention.nn import LongNet, LongNetConfig
from ring_dilated_attention.train import (
    TrainConfig,
    checkpoint,
    decoded,
    memory,
    run_folder,
    sample_bytes,
    tokens,
)
from ring_dilated_attention.train import make_config as make_run_config
from ring_dilated_attention.train.checked_files import SUMS, TOKENIZER
from ring_dilated_attention.train.data import ByteCorpus
from ring_dilated_attention.train.loop import run
from ring_dilated_attention.train.prepare import with_vocabulary
from ring_dilated_attention.train.tokenizer import SubwordTokenizer
from ring_dilated_attention.train.tokens import TokenCorpus

pytestmark = pytest.mark.xdist_group("train_tokens")  # its fixtures are made once

SIZE, LENGTH, STEPS = 300, 37, 12
MODEL = LongNetConfig(
    vocab_size=SIZE,
    num_layers=1,
    embed_dim=16,
    num_heads=2,
    ffn_dim=16,
    segment_lengths=(8, None),
    dilation_rates=(1, 2),
)
ASCII = "".join(f"line {i} of a text, {i * i % 97}\n" for i in range(700))
HELDOUT_ONLY = "zqzq"  # again and again in held-out text, nowhere else


def make_config(folder: Path, text: str = ASCII, **changes: Any) -> TrainConfig:
    """A run of a second on a text of its own, in `folder`/run."""
    data = folder / "text.txt"
    if not data.exists():
        data.write_text(text)
    values: dict[str, Any] = {
        **{"out": folder / "run", "data": (str(data),), "model": MODEL, "train_tokenizer": SIZE},
        **{"seq_len": LENGTH, "batch_size": 2, "steps": STEPS, "warmup_steps": 3},
        **{"eval_every": 5, "eval_windows": 3, "save_every": 6, "device": "cpu"},
    }
    return TrainConfig(**{**values, **changes})


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in run_folder.read_log(folder) if line["kind"] == kind]


def curve(folder: Path) -> list[tuple[int, float, float]]:
    kinds = ("step", "eval")
    lines = [line for line in run_folder.read_log(folder) if line["kind"] in kinds]
    return [(line["step"], line["loss"], line["bits_per_byte"]) for line in lines]


def close(actual: list[tuple[int, float, float]], wanted: list[tuple[int, float, float]]) -> bool:
    flat = [[number for point in points for number in point] for points in (actual, wanted)]
    return flat[0] == pytest.approx(flat[1], rel=1e-4)


def cut_back(config: TrainConfig, copy: Path, step: int = 6) -> TrainConfig:
    """A copy of a run without the checkpoints after `step`, to be resumed."""
    shutil.copytree(config.out, copy)
    for path in checkpoint.usable(copy):
        if path.name != f"step_{step:07d}":
            shutil.rmtree(path)
    return replace(config, out=copy)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = make_config(tmp_path_factory.mktemp("alone"))
    run(config)
    return config


def said(rank: int, world_size: int, runs: list[tuple[TrainConfig, bool]]) -> list[str]:
    """Run each; what a `ValueError` says where one is raised, else an empty text."""
    messages = []
    for config, resume in runs:
        try:
            run(config, resume=resume)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


# --- loss and bits per byte, by brute force


def nats_and_bytes(
    model: LongNet, windows: list[Tensor], tokenizer: Tokenizer
) -> tuple[float, int, int]:
    """Summed cross-entropy of the labels, their number, and the bytes of their text."""
    nats, count, spelled = 0.0, 0, 0
    for window in windows:
        ids = window.long()
        losses = -model(ids[None, :-1])[0].double().log_softmax(-1)
        for row, label in enumerate(ids[1:].tolist()):
            nats += losses[row, label].item()
            count += 1
            spelled += len(tokenizer.decode([label]))  # the text is ASCII
    return nats, count, spelled


def test_losses_are_those_of_a_brute_force(alone: TrainConfig) -> None:
    tokenizer = Tokenizer.from_file(str(alone.out / TOKENIZER))
    text = ByteCorpus.load(alone.data, heldout_fraction=alone.heldout_fraction)
    corpus = TokenCorpus.open(alone.out, text)
    for split, encoded in ((text.train, corpus.train), (text.heldout, corpus.heldout)):
        assert len(split) < tokens.PIECE_BYTES  # one piece, so that the whole is encoded as one
        assert tokenizer.encode(bytes(split.tolist()).decode()).ids == encoded.tolist()
        assert int(corpus.lengths[encoded].sum()) == len(split)
    torch.manual_seed(alone.seed)
    model = LongNet(MODEL)
    windows = corpus.train_windows(LENGTH, seed=0, step=0, rows=range(2))
    nats, count, spelled = nats_and_bytes(model, windows, tokenizer)
    assert count == 2 * LENGTH < spelled
    first = lines_of(alone.out, "step")[0]
    assert first["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert first["bits_per_byte"] == pytest.approx(nats / math.log(2) / spelled, rel=1e-5)
    # Held out, of the trained model.
    checkpoint.newest(alone.out).load(model)
    starts = [i * ((len(corpus.heldout) - 1) // LENGTH) // 3 * LENGTH for i in range(3)]
    windows = [corpus.heldout[start : start + LENGTH + 1] for start in starts]
    nats, count, spelled = nats_and_bytes(model, windows, tokenizer)
    last = lines_of(alone.out, "eval")[-1]
    assert last["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert last["bits_per_byte"] == pytest.approx(nats / math.log(2) / spelled, rel=1e-5)


def test_of_bytes_a_token_is_a_byte(tmp_path: Path) -> None:
    config = make_config(tmp_path, train_tokenizer=None, model=replace(MODEL, vocab_size=256))
    run(config)
    assert all(bits == pytest.approx(loss / math.log(2)) for _, loss, bits in curve(config.out))
    assert not (config.out / TOKENIZER).exists()
    assert not (config.out / tokens.FOLDER).exists()


def test_ranks_share_tokens_and_curves(alone: TrainConfig, tmp_path: Path) -> None:
    together = replace(alone, out=tmp_path / "together")
    apart = replace(alone, out=tmp_path / "apart", sequence_ranks=1)
    resumed = cut_back(alone, tmp_path / "resumed")
    runs = [(together, False), (apart, False), (resumed, True)]
    assert run_ranks(said, 2, runs) == [[""] * 3] * 2
    for config, _ in runs:
        assert close(curve(config.out), curve(alone.out))
        assert (config.out / TOKENIZER).read_bytes() == (alone.out / TOKENIZER).read_bytes()


# --- the tokenizer of a run


def test_held_out_text_is_not_trained_on(tmp_path: Path) -> None:
    # Of a single file the last twentieth is held out.
    config = make_config(tmp_path, ASCII + f"{HELDOUT_ONLY} " * (len(ASCII) // 120), steps=1)
    run(config)
    text = ByteCorpus.load(config.data)
    train, heldout = (bytes(split.tolist()) for split in (text.train, text.heldout))
    assert HELDOUT_ONLY.encode() not in train
    assert heldout.count(HELDOUT_ONLY.encode()) > 100
    kept = SubwordTokenizer.read(config.out / TOKENIZER)
    assert kept.json == SubwordTokenizer.train([train], SIZE).json
    assert not any(b"zq" in (spelled or b"") for spelled in kept.spelled)
    with_heldout = SubwordTokenizer.train([train + heldout], SIZE)
    assert any(b"zq" in (spelled or b"") for spelled in with_heldout.spelled)


def test_a_run_goes_on_exactly_with_its_own_tokenizer(alone: TrainConfig, tmp_path: Path) -> None:
    given = replace(alone, out=tmp_path / "given", train_tokenizer=None)
    mine = Path(shutil.copy(alone.out / TOKENIZER, tmp_path / "mine.json"))
    given = replace(given, tokenizer=str(mine))
    run(given)
    assert curve(given.out) == curve(alone.out)  # trained or given, it is the same tokenizer
    mine.unlink()  # the checkpoint has it
    for config in (alone, given):
        resumed = cut_back(config, tmp_path / f"{config.out.name}_resumed")
        (resumed.out / TOKENIZER).unlink()
        shutil.rmtree(resumed.out / tokens.FOLDER)
        run(resumed, resume=True)
        assert curve(resumed.out) == curve(alone.out)
        assert (resumed.out / TOKENIZER).read_bytes() == (alone.out / TOKENIZER).read_bytes()


def test_tokens_are_encoded_once_and_again_if_damaged(
    alone: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    encode = SubwordTokenizer.encode

    def counted(self: SubwordTokenizer, pieces: list[bytes]) -> list[list[int]]:
        calls.append(len(pieces))
        return encode(self, pieces)

    monkeypatch.setattr(SubwordTokenizer, "encode", counted)
    config = cut_back(alone, tmp_path / "once")
    run(config, resume=True)
    assert (calls, curve(config.out)) == ([], curve(alone.out))
    for damage in ("train.bin", "lengths.bin", "index.json"):
        config = cut_back(alone, tmp_path / damage)
        file = config.out / tokens.FOLDER / damage
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        run(config, resume=True)
        assert (calls, curve(config.out)) == ([1, 1], curve(alone.out)), damage
        calls.clear()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "bytes"}, "another tokenizer, one of 300 tokens that was trained for it"),
        ({"tokenizer": "other.json"}, "keeps; got --tokenizer other.json: leave it out"),
        ({"train_tokenizer": 299}, "keeps; got --train-tokenizer 299: leave it out"),
        ({"tokenizer": "nowhere.json"}, "cannot read the tokenizer nowhere.json: No such file"),
    ],
)
def test_resuming_with_another_tokenizer_is_refused(
    alone: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    text = bytes(ByteCorpus.load(alone.data).train.tolist())
    Path("other.json").write_bytes(
        SubwordTokenizer.train([text.replace(b"line", b"row")], SIZE).json
    )
    with pytest.raises(ValueError, match=message):
        make_run_config(
            alone.out, {"steps": 20, **options}, preset=None, resume=True, runs=Path("runs")
        )
    # And where a program calls `run` itself.
    config = replace(alone, steps=20, train_tokenizer=None)
    with pytest.raises(ValueError, match=message):
        run(replace(config, **options), resume=True)


def test_the_same_tokenizer_may_be_given_again(alone: TrainConfig, tmp_path: Path) -> None:
    same = tmp_path / "same.json"
    same.write_text(json.dumps(json.loads((alone.out / TOKENIZER).read_bytes()), indent=3))
    for options in ({"tokenizer": str(same)}, {"train_tokenizer": SIZE}):
        config = make_run_config(
            alone.out, {"steps": 20, **options}, preset=None, resume=True, runs=Path("runs")
        )
        assert config == replace(alone, steps=20)


def test_a_run_of_bytes_stays_one(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, train_tokenizer=None, model=replace(MODEL, vocab_size=256), steps=1
    )
    run(config)
    with pytest.raises(
        ValueError, match=r"another tokenizer, bytes, which .* --train-tokenizer 300"
    ):
        make_run_config(
            config.out, {"train_tokenizer": 300}, preset=None, resume=True, runs=Path("runs")
        )
    assert make_run_config(
        config.out, {"tokenizer": "bytes"}, preset=None, resume=True, runs=Path("runs")
    ) == replace(config)


def test_the_vocabulary_is_that_of_the_tokenizer(alone: TrainConfig) -> None:
    options: list[tuple[dict[str, Any], int]] = [
        ({}, 256),
        ({"tokenizer": "bytes"}, 256),
        ({"train_tokenizer": 4096}, 4096),
        ({"tokenizer": str(alone.out / TOKENIZER)}, SIZE),
    ]
    for given, size in options:
        config = make_run_config(Path("x"), given, preset=None, resume=False, runs=Path("runs"))
        assert config.model.vocab_size == size
    with pytest.raises(ValueError, match="vocab_size must be 300, the number of tokens"):
        run(replace(alone, out=alone.out.with_name("x"), model=replace(MODEL, vocab_size=299)))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"train_tokenizer": 256}, ValueError, "train_tokenizer must be above 256, the number of"),
        ({"train_tokenizer": 0}, ValueError, "train_tokenizer must be >= 1, got 0"),
        ({"train_tokenizer": "x"}, TypeError, "train_tokenizer must be an int, got 'x'"),
        ({"tokenizer": 3}, TypeError, "tokenizer must be a text or None, got 3"),
        ({"tokenizer": "bytes", "train_tokenizer": 300}, ValueError, "exclude each other; got 'b"),
        ({"tensorboard": 1}, TypeError, "tensorboard must be a bool, got 1"),
    ],
)
def test_config_refuses(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        TrainConfig(**{"out": "run", **changes})


def test_a_size_that_no_machine_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="train_tokenizer must be at most 16777216, got 16777217"):
        TrainConfig(out=Path("run")).with_options({"train_tokenizer": (1 << 24) + 1})


def test_what_does_not_fit_the_text_leaves_nothing_on_any_rank(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    lower = json.loads(SubwordTokenizer.train([ASCII.encode()], SIZE).json)
    (tmp_path / "lower.json").write_text(
        json.dumps(
            {
                **lower,
                "normalizer": {"type": "Replace", "pattern": {"String": "line"}, "content": "row"},
            }
        )
    )
    changing = replace(config, train_tokenizer=None, tokenizer=str(tmp_path / "lower.json"))
    runs = [
        (changing, False),
        (with_vocabulary(replace(config, train_tokenizer=5000)), False),
        (replace(config, seq_len=600), False),  # held-out bytes are 794
    ]
    for messages in run_ranks(said, 2, runs):
        assert "the tokenizer changes the text: its tokens spell 'row" in messages[0]
        assert "got --train-tokenizer 5000: ask for at most" in messages[1]
        assert "need 601 tokens of held-out text" in messages[2]
    assert not config.out.exists()


def test_memory_counts_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_memory", lambda: 10 * 10**9)
    config = TrainConfig(out=Path("run"), seq_len=65536, device="cpu")
    memory.check_memory(config, 1, 1)
    large = with_vocabulary(replace(config, train_tokenizer=50_000))
    with pytest.raises(ValueError, match=r"26\.2 GB for logits, .* or give --chunk-rows") as error:
        memory.check_memory(large, 1, 1)
    assert len(str(error.value)) < 290
    memory.check_memory(replace(large, chunk_rows=4096), 1, 1)
    with pytest.raises(ValueError, match="lower --chunk-rows"):
        memory.check_memory(replace(large, chunk_rows=40_000), 1, 1)
    huge = with_vocabulary(replace(config, chunk_rows=1, train_tokenizer=8_000_000))
    with pytest.raises(ValueError, match=r"16\.4 GB for parameters and AdamW"):
        memory.check_memory(huge, 1, 1)


# --- checkpoints and samples


def test_a_checkpoint_holds_the_tokenizer_under_its_checksum(
    alone: TrainConfig, tmp_path: Path
) -> None:
    copy = tmp_path / "step_0000012"
    shutil.copytree(checkpoint.newest(alone.out).path, copy)
    kept = checkpoint.newest(copy).tokenizer()
    assert kept is not None
    assert kept.json == (alone.out / TOKENIZER).read_bytes()
    assert f"{kept.digest}  {TOKENIZER}\n" in (copy / SUMS).read_text()
    (copy / TOKENIZER).write_bytes(kept.json.replace(b"ByteLevel", b"bytelevel"))
    with pytest.raises(
        ValueError, match=r"tokenizer.json does not have the checksum in SHA256SUMS"
    ):
        checkpoint.newest(copy)
    (copy / TOKENIZER).unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json is missing"):
        checkpoint.newest(copy)
    # One that is left out of the description too.
    lines = [line for line in (copy / SUMS).read_text().splitlines() if TOKENIZER not in line]
    (copy / SUMS).write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="files must be those of SHA256SUMS"):
        checkpoint.newest(copy)


def test_samples_are_tokens_that_stream_as_text(alone: TrainConfig) -> None:
    spelled = SubwordTokenizer.read(alone.out / TOKENIZER).spelled

    def sampled(prompt: bytes = b"line 12", count: int = 40, **options: Any) -> list[bytes]:
        return list(sample_bytes(alone.out, prompt, count=count, **options))

    drawn = sampled()
    assert len(drawn) == 40
    assert set(drawn) <= set(spelled)
    assert max(map(len, drawn)) > 1
    assert drawn == sampled()
    assert sampled(temperature=0) == sampled(top_k=1, seed=5)
    likely = Tokenizer.from_file(str(alone.out / TOKENIZER)).encode("line 12").ids
    model = LongNet(MODEL)
    checkpoint.newest(alone.out).load(model)
    for text in sampled(temperature=0, count=5):
        likely.append(int(model(torch.tensor([likely]))[0, -1].argmax()))
        assert text == spelled[likely[-1]]
    for shown in (decoded(drawn), decoded([b"a\xc3", b"\xa9\xff", b"\xe2"])):
        "".join(shown).encode()  # whole characters, or U+FFFD for what is none
    assert "".join(decoded([b"a\xc3", b"\xa9\xff", b"\xe2"])) == "aé\ufffd\ufffd"
    assert len(sampled("\xff é".encode("latin-1"), count=2)) == 2  # a prompt that is not UTF-8
    assert len(sampled(b"line " * 100, count=2)) == 2  # longer than a sequence
    with pytest.raises(ValueError, match="top_k must be at most 300; got 301"):
        sampled(top_k=301)
