"""Programs of `benchmarks/` that run on a CPU, too: that they still do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.launched import run_program

FOLDER = Path(__file__).parents[2] / "benchmarks"
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


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_get_quick_cpus_of_their_own(ranks, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, beside; print(sorted(os.sched_getaffinity(0)), sys.argv[1:], __name__)"
    )
    (tmp_path / "beside.py").write_text("")
    line = [sys.executable, str(FOLDER / "on_quick_cpus.py"), str(program), "--tiles", "9"]
    of_rank = {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": tmp_path.name, "CPUS_PER_RANK": "1"}
    processes = [
        subprocess.Popen(
            line, env={**os.environ, **of_rank, "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=60)[0].decode() for process in processes]
    cpus = [json.loads(each[: each.index("]") + 1]) for each in printed]
    assert all(each.endswith("] ['--tiles', '9'] __main__\n") for each in printed)
    assert [len(each) for each in cpus] == [1] * ranks
    if len(os.sched_getaffinity(0)) > 1:
        assert len({cpu for each in cpus for cpu in each}) == ranks
