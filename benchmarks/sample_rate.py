"""Tokens per second of `rda sample`, without reading the checkpoint.

    python benchmarks/sample_rate.py runs/20261123-215712 --tokens 200 --repeats 5

To compare two versions, run it in turns with PYTHONPATH set to the `src` of each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from ring_dilated_attention.train import sample_bytes


def main() -> None:
    """Print the median, the lowest and the highest of several runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run of rda train")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rates = []
    for seed in range(options.repeats):
        stream = sample_bytes(options.run, b"def ", count=options.tokens, seed=seed)
        begun = time.perf_counter()
        found = sum(1 for _ in stream)
        rates.append(found / (time.perf_counter() - begun))
    print(f"{statistics.median(rates):.1f} tokens/s [{min(rates):.1f} .. {max(rates):.1f}]")


if __name__ == "__main__":
    main()
