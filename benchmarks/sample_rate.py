"""Tokens per second of `rda sample`, without reading the checkpoint, beside another version.

    python benchmarks/sample_rate.py runs/20261123-215712
    python benchmarks/sample_rate.py runs/20261123-215712 --against ../old/src ../old/runs/20261126

Versions take turns, a process each, so that both meet the processor in the same state. The other
one needs `ring_dilated_attention.train.sample_bytes`, and a run that it has trained.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Print rates and their quotient: the median, the quartiles, the lowest and the highest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run of rda train")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--turns", type=int, default=31)
    parser.add_argument("--against", nargs=2, metavar=("SRC", "RUN"), help="another version")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turns < 2:
        parser.error(f"--turns must be at least 2; got {options.turns}")
    if options.answer:
        _answer(options.run, options.tokens)
        return
    sources = [(None, str(options.run))]
    if options.against:
        sources.append(tuple(options.against))
    processes = [_start(source, run, options.tokens) for source, run in sources]
    turns = [[_ask(each, turn) for each in processes] for turn in range(options.turns + 1)]
    for each in processes:
        each.communicate("")
    turns = turns[1:]  # the first one warms up
    for number, (source, _) in enumerate(sources):
        print(f"{source or 'this version'}: {_spread([turn[number] for turn in turns])} tokens/s")
    if options.against:
        print(f"times as many, turn by turn: {_spread([own / other for own, other in turns])}")


def _answer(run: Path, tokens: int) -> None:
    """A version's process: for each seed of a line, the rate on a line."""
    from ring_dilated_attention.train import sample_bytes

    for line in sys.stdin:
        stream = sample_bytes(run, b"def ", count=tokens, seed=int(line))
        begun = time.perf_counter()
        found = sum(1 for _ in stream)
        print(found / (time.perf_counter() - begun), flush=True)


def _start(source: str | None, run: str, tokens: int) -> subprocess.Popen[str]:
    environment = dict(os.environ)
    if source:
        environment["PYTHONPATH"] = str(Path(source).resolve())
    command = [sys.executable, __file__, run, "--answer", "--tokens", str(tokens)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def _ask(process: subprocess.Popen[str], seed: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{seed}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def _spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.4g} [{low:.4g} to {high:.4g}; {min(values):.4g} .. {max(values):.4g}]"


if __name__ == "__main__":
    main()
