"""Programs of `benchmarks/` that run on a CPU, too: that they still do."""

import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from support.launched import run_program

FOLDER = Path(__file__).parents[2] / "benchmarks"
CASES = "GigaPath 2,001;LongNet 4,096 causal;LongNet 4,096, 3 heads a KV head"
PROGRAMS = {
    # options; ranks, 0: a process that no launcher has started
    "calls": (f"--longest 40 --samples 3 --cases '{CASES}'", [0]),
    "decode": ("--device cpu --small --repeats 1", [0]),
    "hilbert": ("--tiles 2000", [0]),
    "llama_step": ("--device cpu --small --samples 3 --in-a-row 1 --eager --seq-len 100", [2]),
    "transformers_generate": ("--device cpu --small --prompt 50 --new-tokens 2", [0]),
}
RUNS = [(name, ranks) for name, (_, counts) in PROGRAMS.items() for ranks in counts]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), RUNS)
def test_benchmarks_run_on_a_cpu(name, ranks, tmp_path):
    if name in ("llama_step", "transformers_generate"):
        pytest.importorskip("transformers")
    out = tmp_path / "found.json"
    words = [*shlex.split(PROGRAMS[name][0]), "--out", str(out)]
    done = run_program(FOLDER / f"{name}.py", words, ranks)
    if "pack_vnni2 is only supported when" in done.stderr:
        pytest.skip("torch's own bfloat16 kernel fails with this ATEN_CPU_CAPABILITY")
    assert done.returncode == 0, done.stderr[-2000:]
    written = out if out.exists() else out.with_suffix(".md")  # of hilbert.py
    assert written.stat().st_size
    if written == out:
        assert json.loads(out.read_text())


@pytest.mark.slow
def test_eight_gpus_measures_all_that_compute_a_row_and_compares_them(tmp_path):
    out, rows = tmp_path / "found.json", "dense,documents,crossing,window,tokens"
    words = ["--small", "--seconds", "0.1", "--rows", rows, "--out", str(out)]
    done = run_program(FOLDER / "eight_gpus.py", words, 2)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())["found"]["rows"]
    assert list(found) == rows.split(",")
    own = {"one GPU", "ring", "gather", "heads:2"}
    assert own | {"auto: heads:2", "Ulysses"} == found["dense"].keys() == found["window"].keys()
    assert found["documents"].keys() - own == {"auto: gather", "Ulysses"}
    assert found["tokens"].keys() == {"auto: gather"}
    for entry in (entry for row in found.values() for entry in row.values()):
        assert max(entry["errors"], default=0) < 1e-5
        assert [len(entry[key]) for key in ("ms", "tflops", "sent_mb", "peak_gib")] == [2] * 4
    assert all(entry["errors"] for entry in found["tokens"].values())
    assert done.stdout.count("one GPU") == 4


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")
def test_quality_trains_tests_and_writes_its_page(tmp_path):
    pytest.importorskip("matplotlib")
    runs = "longnet_32k_detached,window_and_dense", "slide_closed"
    for arms in runs:
        words = ["--small", "--out", str(tmp_path), "--arms", arms, "--seeds", "0"]
        done = run_program(FOLDER / "quality.py", words, 0)
        assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "window_and_dense-0.json").read_text())["found"]
    assert [len(found["bits"][each]) for each in ("2048", "8192", "32768")] == [1, 3, 5]
    page = (tmp_path / "quality.md").read_text()
    assert all(f"| {arm} |" in page for arm in ",".join(runs).split(","))
    (first, *_) = json.loads((tmp_path / "quality.json").read_text())
    assert first["found"]["accuracy" if first["found"]["arm"] == "slide_closed" else "bits"]
    assert all((tmp_path / f"quality_{x}.png").stat().st_size for x in ("flops", "position"))


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "quality", raising=False)
    return importlib.import_module("quality")


def test_quality_splits_packages_without_duplicates(quality, tmp_path):
    names = [f"package{i}" for i in range(40)]
    held = {name for name in names if quality.is_held_out(f"{tmp_path.name}/{name}", 2)}
    assert 0 < len(held) < len(names)
    for i, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_bytes(bytes([i]) * 33)
        (tmp_path / name / "b.py").write_bytes(bytes([100]) * 33)  # in all of them
    text = quality.read([tmp_path], 32, 32 * 1000, 32 * 1000)
    train, test = (set(x.unique().tolist()) for x in (text.train, text.test))
    assert {f"{tmp_path.name}/{x}" for x in held} == set(text.about["held_out"])
    assert test - {100} == {i for i, name in enumerate(names) if name in held}
    assert not train & test
    assert sum((x == 100).sum().item() for x in (text.train, text.test)) <= 33


def test_quality_counts_bits_by_position(quality):
    nats = torch.tensor([[1.0, 2.0, 3.0, 5.0], [3.0, 2.0, 3.0, 7.0]]) * torch.tensor(2.0).log()
    assert quality.buckets(nats, [0, 1, 3, 4, 9]) == pytest.approx([2.0, 2.5, 6.0])


def test_quality_judges_claims_by_the_whole_interval(quality):
    def verdict(differences, bound, **options):
        claim = quality.Claim("", "bits", "a", "b", bound, **options)
        bits: dict[str, dict[int, object]] = {arm: {} for arm in "ab"}
        for seed, difference in enumerate(differences):
            bits["a"][seed] = {"bits": {"32768": [1.0 + seed + difference] * 5}}
            bits["b"][seed] = {"bits": {"32768": [1.0 + seed] * 5}}
        return quality.verdict(claim, bits)

    shown, found = verdict([0.01, 0.02, 0.03], 0.05)  # 0.02 and 4.303 * 0.01 / sqrt(3)
    assert (shown, found) == ("+0.0200 ± 0.0248 (3 seeds)", "holds")
    assert verdict([0.01, 0.02, 0.03], 0.04)[1] == "undecided"
    assert verdict([0.01, 0.02, 0.03], -0.01)[1] == "fails"
    assert verdict([0.01], 0.05)[1] == "not measured"
    assert verdict([0.01, 0.02, 0.03], 0.025, half_width=True)[1] == "holds"
    assert verdict([0.01, 0.02, 0.03], 0.024, half_width=True)[1] == "fails"
