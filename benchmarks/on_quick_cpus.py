"""Run a benchmark on CPUs that are quick, each rank of a host on some of its own.

    python benchmarks/on_quick_cpus.py benchmarks/slide_encoder.py --tiles 100000
    torchrun --nproc-per-node 2 benchmarks/on_quick_cpus.py benchmarks/llama_step.py --in-a-row 5

Where others use a host, too, the same loop of Python takes one CPU twice as long as another, and
what waits for the slower rank's CPU says little of the program. First of all each CPU that this
process may use is timed, in 0.03 s; the environment's `CPUS_PER_RANK` (6) says how many of the
quickest a rank gets, if there are as many. Linux only.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path

LOOP = 60_000  # additions: about 4 ms
TRIES = 3
WAIT_S = 60.0  # for the first rank of a host


def loop_ms(cpu: int) -> float:
    """Milliseconds of a loop on a CPU, the shortest of a few tries."""
    os.sched_setaffinity(0, {cpu})
    times = []
    for _ in range(TRIES):
        begun, total = time.perf_counter(), 0
        for number in range(LOOP):
            total += number
        times.append(1e3 * (time.perf_counter() - begun))
    return min(times)


def quickest(count: int) -> tuple[list[int], list[float]]:
    """So many of the CPUs that this process may use, and what the loop took on each of all."""
    allowed = os.sched_getaffinity(0)
    times = {cpu: loop_ms(cpu) for cpu in sorted(allowed)}
    os.sched_setaffinity(0, allowed)
    ordered = sorted(times, key=times.__getitem__)
    return ordered[: max(count, 1)], sorted(times.values())


def cpus_of(rank: int, ranks: int, each: int) -> list[int]:
    """Those of a rank of this host: its first rank times them, and tells the others in a file."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get("MASTER_PORT", "")
    told = Path(tempfile.gettempdir()) / f"quick-cpus-{os.getppid()}-{run}.json"
    if rank == 0:
        chosen, times = quickest(each * ranks)
        print(
            f"CPUs {chosen} of {len(times)}: a loop takes {times[0]:.2f} ms on the quickest, "
            f"{times[len(chosen) - 1]:.2f} on the slowest of them, {times[-1]:.2f} on the slowest",
            file=sys.stderr,
        )
        if ranks > 1:
            with tempfile.NamedTemporaryFile("w", delete=False) as whole:
                json.dump(chosen, whole)
            Path(whole.name).replace(told)
    else:
        until = time.monotonic() + WAIT_S
        while not told.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"the first rank of this host has not written {told}")
            time.sleep(0.01)
        chosen = json.loads(told.read_text())
    return chosen[rank::ranks] or chosen


def main() -> None:
    """Choose CPUs, then be the program that is named."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: on_quick_cpus.py PROGRAM [ARGUMENTS...]")
    rank, ranks = (
        int(os.environ.get(f"LOCAL_{x}", y)) for x, y in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    os.sched_setaffinity(0, cpus_of(rank, ranks, int(os.environ.get("CPUS_PER_RANK", "6"))))
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
