"""`rda bench`."""

import json

import pytest
from support.small_ceilings import measure_little
from typer.testing import CliRunner

from ring_dilated_attention.bench import contenders, report
from ring_dilated_attention.cli import app


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    measure_little(monkeypatch)


def rda_bench(*arguments):
    return CliRunner().invoke(app, ["bench", "--device=cpu", "--repeats=1", *arguments])


def test_a_sweep(tmp_path):
    done = rda_bench(
        "--pattern=longnet,dense,longvit",
        "--seq-len=33,50",
        "--num-heads=4",
        "--head-dim=8",
        "--causal",
        "--baseline=sdpa",
        f"--out={tmp_path / 'found'}",
    )
    assert done.exit_code == 0, done.output
    assert "longnet n=50 4 x 8 float32 causal" in done.output
    assert "sdpa (flash)" in done.output
    document = json.loads((tmp_path / "found" / report.JSON_NAME).read_text())
    results = document["results"]
    assert len(results) == 3 * 2 * 2
    assert len({str(result["workload"]) for result in results}) == 6
    assert all(result["errors"]["gradients"] < 1e-5 for result in results)
    assert (tmp_path / "found" / "tflops.png").stat().st_size > 0
    assert document["command"][0] == "rda"
    assert "seed" in document["environment"]


def test_head_offsets_and_zero_keys_of_named_patterns(tmp_path):
    done = rda_bench(
        "--seq-len=9", "--num-heads=2", "--head-dim=8", "--head-offsets=blocked", "--zero-keys",
        "--no-errors", f"--out={tmp_path}",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (result,) = json.loads((tmp_path / report.JSON_NAME).read_text())["results"]
    assert result["workload"]["name"] == "longnet"
    assert result["workload"]["pattern"]["head_offsets"] == "blocked"
    assert result["workload"]["pattern"]["zero_keys"] is True
    assert result["errors"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pattern=shortnet"], "--pattern must be one of 'longnet', 'gigapath'"),
        (["--segment-lengths=8"], "--segment-lengths and --dilation-rates go together"),
        (["--segment-lengths=8,x"], "--segment-lengths must be a whole number such as 8192, 256K"),
        (["--seq-len=0"], "--seq-len must be >= 1, got 0"),
        (["--dtype=int8"], "--dtype must be one of bf16, fp16"),
        (["--num-heads=4", "--num-kv-heads=3"], "multiple of num_kv_heads; got 4 and 3"),
        (["--baseline=xformers"], "--baseline has no 'xformers'; allowed: sdpa, sdpa:cudnn"),
        (["--device=tpu"], "--device must be one of 'auto', 'cpu', 'cuda'"),
        (["--seq-len=9", "--backend=cudnn"], "it runs on cuda, the inputs are on cpu"),
    ],
)
def test_bad_options_are_one_line(tmp_path, arguments, message):
    done = rda_bench(f"--out={tmp_path}", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_results_of_another_run_are_kept(tmp_path):
    """And a picture that would stand beside numbers that are not its own is refused, too."""
    for names in (("results.json",), ("scaling.png",), ("results.json", "tflops.png")):
        out = tmp_path / "".join(names)
        out.mkdir()
        for name in names:
            (out / name).write_text("found before")
        done = rda_bench("--seq-len=9", f"--out={out}")
        assert done.exit_code == 2
        assert f"results of another run ({', '.join(names)}): choose another folder" in done.stderr
        assert all((out / name).read_text() == "found before" for name in names)


def test_a_refused_workload_of_a_sweep_is_a_row(tmp_path):
    done = rda_bench("--seq-len=9", "--backend=eager,cudnn", "--no-errors", f"--out={tmp_path}")
    assert done.exit_code == 0, done.output
    assert "refused: backend='cudnn' cannot compute" in " ".join(done.output.split())
    eager, cudnn = json.loads((tmp_path / report.JSON_NAME).read_text())["results"]
    assert eager["status"] == "ok"
    assert cudnn["status"] == "refused"


def test_a_failure_is_exit_code_1(monkeypatch, tmp_path):
    def broken(*args, **kwargs):
        raise AssertionError("a bug")

    monkeypatch.setattr(contenders, "dilated_attention", broken)
    done = rda_bench("--seq-len=9", "--baseline=sdpa", f"--out={tmp_path}")
    assert done.exit_code == 1
    assert "failed: AssertionError: a bug" in done.output
