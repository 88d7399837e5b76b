"""Kill examples/train_longnet.py at random moments; compare with a run that was not killed.

    python benchmarks/killed_runs.py

A run on two ranks is not interrupted. Another one gets SIGKILL ten times, all its ranks at once, at
random moments, and goes on each time on another number of ranks, 1, 2 or 3. It saves after each
step, so that many moments are in the middle of a checkpoint. The losses of all steps must be those
of the first run within 1e-5 (relative, float32). Exits with code 1 if one is not. Takes minutes.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "examples" / "train_longnet.py"
OPTIONS = (
    *("--data", str(PROGRAM), "--num-layers=2", "--embed-dim=32", "--num-heads=2"),
    *("--segment-lengths=64,all", "--dilation-rates=1,4", "--seq-len=256", "--eval-every=50"),
    *("--learning-rate=2e-3", "--save-every=1", "--keep=2"),
)
TOLERANCE = 1e-5
SECONDS = 600


def start(out, ranks, steps):
    """The program on so many ranks, in the background."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words = [*(launcher if ranks > 1 else []), str(PROGRAM), "--out", str(out), "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words, *OPTIONS, f"--steps={steps}"],
        env=environment,
        stdout=subprocess.DEVNULL,
    )


def kill(process):
    """End a process and those that it has started, at once."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (*map(int, children), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()


def log_of(out):
    """Bits per byte by step."""
    path = out / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["step"]: entry["training"] for entry in map(json.loads, lines)}


def main():
    """Run, kill, go on, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        if start(whole, 2, args.steps).wait(SECONDS):
            sys.exit("the run that is not killed has failed")
        expected, worst = log_of(whole), 0.0
        for number in range(args.kills + 1):
            ranks, before = number % 3 + 1, max(log_of(killed), default=0)
            process = start(killed, ranks, args.steps)
            if number < args.kills:
                while max(log_of(killed), default=0) < before + 2 and process.poll() is None:
                    time.sleep(0.05)
                time.sleep(draw.uniform(0, 3))
                kill(process)
            elif process.wait(SECONDS):
                sys.exit("the run that was killed does not end")
            found = log_of(killed)
            errors = [abs(found[step] / expected[step] - 1) for step in found]
            worst = max(worst, *errors)
            left = sorted(path.name for path in killed.glob(".partial"))
            print(f"{ranks} ranks, from step {before} to {max(found)}: {max(errors):.1e} {left}")
        complete = sorted(found) == list(range(1, args.steps + 1))
    print(f"{args.kills} kills; largest relative difference of a step's loss: {worst:.1e}")
    if not (complete and worst <= TOLERANCE):
        sys.exit("a run that was killed differs from one that was not")


if __name__ == "__main__":
    main()
