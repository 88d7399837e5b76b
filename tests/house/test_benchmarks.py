"""Programs of `benchmarks/` that run on a CPU, too: that they still do."""

import json
import shlex
from pathlib import Path

import pytest
from support.launched import run_program

FOLDER = Path(__file__).parents[2] / "benchmarks"
CASES = "GigaPath 2,001;LongNet 4,096 causal;LongNet 4,096, 3 heads a KV head"
PROGRAMS = {
    # options; ranks, 0: a process that no launcher has started
    "billion_tokens": ("--log2-length 12 --repeats 3 --backward", [0, 2]),
    "calls": (f"--longest 40 --samples 3 --first 1 --cases '{CASES}'", [0, 2]),
    "decode": ("--device cpu --small --repeats 1", [0]),
    "documents": ("--length 500 --heads 2 --head-dim 8 --count 20 --turns 3", [0]),
    "hilbert": ("--tiles 2000", [0]),
    "llama_step": ("--device cpu --small --samples 3 --in-a-row 1 --eager --seq-len 100", [2]),
    "slide_encoder": ("--tiles 90 --layers 1 --samples 3 --in-a-row 1 --cases plain", [2]),
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
