"""Programs of `benchmarks/` that run on a CPU, too: that they still do."""

from pathlib import Path

import pytest
from launched import run_program

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = {
    "first_calls": "--device cpu --calls 2 --warm 1 --packed 8192 --turns 1",
    "many_slides": "--device cpu --slides 2 --warm 1 --layers 1 --longest 90 --cases plain",
    "short_calls": "--device cpu --longest 40 --samples 1",
    "slide_encoder": "--tiles 90 --layers 1 --samples 1 --in-a-row 1 --cases plain",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_runs_on_a_cpu(name, tmp_path):
    out = tmp_path / "found.json"
    given = [*PROGRAMS[name].split(), "--out", str(out)]
    done = run_program(FOLDER / f"{name}.py", given, ranks=0)
    assert done.returncode == 0, done.stderr[-2000:]
    assert out.stat().st_size
