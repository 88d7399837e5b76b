"""The tutorials' programs: right on one process and on two ranks, and they exit with 1 if not.

Ranks are started as torchrun starts them, which takes a third of its time; test_train_longnet.py
runs torchrun itself.
"""

import re
import runpy
import sys
from importlib.util import find_spec

import pytest
from support.launched import EXAMPLES, run_program

SMALL = {
    "slides": ["--tiles", "300", "--slides", "2", "--epochs", "2"],
    "long_text": ["--seq-len", "1001", "--steps", "3", "--embed-dim", "64"],
    "transformers_llama": ["--seq-len", "301"],
}
GENERATION = ["--seq-len", "301", "--new-tokens", "20"]
SEVERAL_RANKS = {
    **SMALL,
    "generation": GENERATION,
    "meshes": ["--seq-len", "301"],
    "data_parallel": ["--wrap", "fsdp"],
    "transformers_adapters": ["--seq-len", "301"],
    "transformers_trainer": [],
    "accelerate_loop": [],
    "lightning_module": [],
    "several_gpus": ["--seq-len", "1501", "--head-dim", "16"],
    "tensor_parallel": ["--seq-len", "301"],
}
FOUR_RANKS = {"tensor_parallel"}


NEEDS = {
    "transformers_llama": ["transformers"],
    "transformers_adapters": ["transformers", "peft"],
    "transformers_trainer": ["transformers", "accelerate"],
    "accelerate_loop": ["transformers", "accelerate"],
    "lightning_module": ["lightning"],
}


def skip_without_packages(name):
    for package in NEEDS.get(name, ()):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


@pytest.mark.parametrize("name", SMALL)
def test_on_one_process(name, monkeypatch, capsys):
    skip_without_packages(name)
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name]])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    losses = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert losses[-1] < losses[0]
    assert capsys.readouterr().out


def test_generation_on_one_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["generation", *GENERATION])
    monkeypatch.delenv("RANK", raising=False)
    assert runpy.run_path(str(EXAMPLES / "generation.py"))["main"]() < 1e-4
    assert "then 20 tokens" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL_RANKS)
def test_on_two_ranks(name):
    skip_without_packages(name)
    for ranks in (2, *[4] * (name in FOUR_RANKS)):
        done = run_program(EXAMPLES / f"{name}.py", SEVERAL_RANKS[name], ranks)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("ranks", [1, 3])
def test_ring_in_one_page_equals_dilated_attention(ranks):
    done = run_program(EXAMPLES / "ring_in_one_page.py", [], ranks=ranks)
    assert done.returncode == 0, done.stderr[-2000:]
    gaps = re.findall(r"largest difference from the library (\S+)", done.stdout)
    assert len(gaps) == ranks
    assert all(float(gap) < 1e-13 for gap in gaps)


HAS_ITS_OWN_TEST = {
    "bring_your_own_model",
    "finetune_llama",
    "gigapath_finetune",
    "ring_in_one_page",
    "synthetic_tissue",
    "torchtitan_llama",
    "train_longnet",
}


def test_every_example_is_run():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names - HAS_ITS_OWN_TEST == set(SEVERAL_RANKS)


OWN_MODEL = EXAMPLES / "bring_your_own_model.py"
OWN_MODEL_SMALL = ("--seq-len=203", "--steps=2")  # a prime, so that shards are uneven


@pytest.mark.parametrize("ranks", [0, 2])
def test_bring_your_own_model_agrees_with_one_process(ranks, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("any text at all, é\n" * 30)
    done = run_program(OWN_MODEL, [f"--text={text}", *OWN_MODEL_SMALL], ranks)
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
    code = OWN_MODEL.read_text()
    assert code.count(right) == 1
    script = tmp_path / "mistaken.py"
    script.write_text(code.replace(right, wrong))
    done = run_program(script, [f"--text={OWN_MODEL}", *OWN_MODEL_SMALL], 2)
    assert "relative difference from 1 process" in done.stdout, done.stderr
    assert done.returncode == 1
