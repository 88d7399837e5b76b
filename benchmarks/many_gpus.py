"""The tables of benchmarks/results/many_gpus.md, on the CUDA devices of one host.

    python benchmarks/many_gpus.py OUT --gpus 4

makes OUT/<table>/ with JSON and plots, and OUT/scaling.png, a plot of what is large enough to gain.
All tables are measured by the same processes, which start, compile and warm up once; each is
written as it grows. Wants flash-attn-4 (the extra fa4). What `rda bench` cannot measure is in
transports.py and billion_tokens.py.
"""

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch.distributed as dist
import typer

from ring_dilated_attention.bench import (
    OURS,
    Options,
    Workload,
    launch,
    measure_and_write,
    plot,
    show,
    sweep,
)
from ring_dilated_attention.pattern import check_choice
from ring_dilated_attention.terminal import make_console

PLOTTED = ("dense", "longnet", "crossing")
EARLIER_LENGTHS = [64, 512, 2048, 4096, 8192, 16_384, 32_768, 65_536, 262_144, 400_000]


class Table(NamedTuple):
    """Workloads, the numbers of GPUs that they are measured on, and how."""

    workloads: list[Workload]
    gpus: list[int]
    how: dict[str, Any]


def tables(gpus: int) -> dict[str, Table]:
    """All tables by name, in the order in which they are measured."""
    ends, all_sizes = sorted({1, gpus}), list(range(1, gpus + 1))
    wide = {"dtypes": ["bfloat16"], "head_dims": [128]}
    longnet = {"patterns": ["longnet"], "num_heads": [12], **wide}
    baselines = ("cp:allgather", "cp:alltoall", "ours:messages")
    return {
        "dense": Table(
            sweep("cuda", patterns=["dense"], num_heads=[16], causal=[True],
                  seq_lens=[65_536, 262_144], **wide),
            ends, {"baselines": baselines, "seconds": 2, "errors": False},
        ),
        "longnet": Table(sweep("cuda", seq_lens=[2**20], **longnet), all_sizes, {"seconds": 3}),
        "crossing": Table(
            sweep("cuda", segment_lengths=[2048, 16_384, 131_072, None],
                  dilation_rates=[1, 8, 64, 512], num_heads=[12], causal=[True, False],
                  seq_lens=[2**20], **wide),
            ends, {"seconds": 3},
        ),
        "earlier": Table(
            sweep("cuda", segment_lengths=[2048, 4096], dilation_rates=[1, 2], num_heads=[12],
                  head_dims=[64], dtypes=["bfloat16", "float32"], seq_lens=EARLIER_LENGTHS),
            all_sizes[:2],
            {"seconds": 1, "repeats": 9, "sample_ms": 50, "errors": False},  # the CPU decides
        ),
        "weak": Table(
            sweep("cuda", seq_lens=[262_144], **longnet), all_sizes,
            {"scaling": "weak", "seconds": 2, "errors": False},
        ),
    }  # fmt: skip


def measure(names: Sequence[str], gpus: int, seed: int, out: Path) -> None:
    """On every rank: measure tables, one after the other."""
    plotted = []
    for name in names:
        workloads, sizes, how = tables(gpus)[name]
        how = {"repeats": 5, **how}
        options = Options(device="cuda", ranks=tuple(sizes), seed=seed, **how)
        found = measure_and_write(workloads, options, out / name, sys.argv)
        if dist.get_rank() == 0:
            show(make_console(), *found)
            plotted += [x for x in found[0] if x.contender == OURS and name in PLOTTED]
    if plotted:
        plot(out, plotted)


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    gpus: Annotated[int, typer.Option(help="On how many.")] = 4,
    table: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
) -> None:
    """Measure the tables, or some of them."""
    known = list(tables(gpus))
    for name in table or ():
        check_choice("table", name, known)
    launch(
        measure, gpus, table or known, gpus, secrets.randbelow(10**9), out, device="cuda", out=out
    )


if __name__ == "__main__":
    typer.run(main)
