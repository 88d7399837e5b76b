"""`rda bench`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..pattern import in_brief
from . import options
from .command import Example, command
from .common import RUNS, ListError, fail
from .option import Flag, Option, integer, list_of, number

BASELINES = (
    *("sdpa", "sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "sdpa:math"),
    *("torchscale", "torchscale:math", "torchscale:cpu_flash", "torchscale:flash"),
    *("torchscale:cudnn", "kernel", "kernel:cudnn", "kernel:flash", "kernel:efficient"),
    *("kernel:math", "flash4", "cp:allgather", "cp:alltoall", "ring-flash-attn:zigzag"),
    "ours:messages",
)


def _baseline(given: str, where: str) -> str:
    if given not in BASELINES:
        raise ListError(f"{where} has no {in_brief(given)}; allowed: {', '.join(BASELINES)}")
    return given


BASELINE = Option(
    name="baseline",
    panel=options.MEASURING,
    metavar="LIST",
    help="Baselines, measured in turns: sdpa (dense), torchscale (gathers), kernel (attention on "
    "contiguous segments), flash4 (dense); name:KERNEL forces a kernel (cudnn, flash, ...). On "
    "several ranks: cp:allgather, cp:alltoall (torch's context_parallel), ring-flash-attn:zigzag, "
    "ours:messages (rows travel by NCCL).",
    read=list_of(_baseline),
    default=(),
    shown="none",
    choices=BASELINES,
    is_list=True,
)
SCALING = options.choice(
    "scaling",
    ("strong", "weak"),
    panel=options.MEASURING,
    help="strong: --seq-len is that of the whole sequence; weak: of each rank's shard.",
    default="strong",
)
REPEATS = Option(
    name="repeats",
    panel=options.MEASURING,
    metavar="N",
    help="Samples of forward, and of forward+backward.",
    read=integer(1),
    default=20,
    toml=(int,),
)
SECONDS = Option(
    name="seconds",
    panel=options.MEASURING,
    metavar="SECONDS",
    help="Time for one contender's samples of a kind; at least 3 are taken.",
    read=number,
    default=10.0,
    shown="10",
    toml=(int, float),
)
SAMPLE_MS = Option(
    name="sample-ms",
    panel=options.MEASURING,
    metavar="MS",
    help="Target duration of one sample, of back-to-back calls.",
    read=number,
    shown="300 for several ranks on CUDA, otherwise one call",
    toml=(int, float),
)
CUDA_GRAPH = Flag(
    name="cuda-graph",
    panel=options.MEASURING,
    help="Time replays of CUDA graphs too, on one rank.",
)
ERRORS = Flag(
    name="errors",
    panel=options.MEASURING,
    help="Compare a small twin of each workload with float64.",
    default=True,
    has_no=True,
)


@command(
    Example(
        "On a CPU, against the dense kernel of torch and a gathering implementation",
        "rda bench --device cpu --seq-len 8K --baseline sdpa,torchscale",
    ),
    Example(
        "Two lengths and two head dimensions: four workloads",
        "rda bench --seq-len 64K,256K --head-dim 64,128 --causal",
    ),
    Example(
        "Strong scaling from 1 to 4 GPUs", "rda bench --device cuda --ranks 1,2,4 --seq-len 1M"
    ),
)
def bench(
    pattern: Annotated[Sequence[str] | None, options.PATTERN_NAME.several],
    segment_lengths: Annotated[Sequence[int | None] | None, options.SEGMENT_LENGTHS],
    dilation_rates: Annotated[Sequence[int] | None, options.DILATION_RATES],
    head_offsets: Annotated[str | None, options.HEAD_OFFSETS_],
    head_branches: Annotated[str | None, options.HEAD_BRANCHES_],
    zero_keys: Annotated[bool, options.ZERO_KEYS],
    causal: Annotated[bool, options.CAUSAL],
    seq_len: Annotated[Sequence[int], options.SEQ_LENGTH.several],
    num_heads: Annotated[Sequence[int] | None, options.NUM_HEADS.several],
    num_kv_heads: Annotated[Sequence[int] | None, options.NUM_KV_HEADS.several],
    head_dim: Annotated[Sequence[int] | None, options.HEAD_DIM.several],
    batch_size: Annotated[Sequence[int], options.BATCH_SIZE.several],
    dtype: Annotated[Sequence[str] | None, options.DTYPE.several],
    ranks: Annotated[Sequence[int], options.SEVERAL_RANKS],
    layout: Annotated[str, options.LAYOUT],
    exchange: Annotated[str, options.EXCHANGE],
    timeout: Annotated[float, options.TIMEOUT_],
    device: Annotated[str, options.DEVICE],
    backend: Annotated[Sequence[str], options.BACKEND.several],
    seed: Annotated[int, options.SEED],
    baseline: Annotated[Sequence[str], BASELINE],
    scaling: Annotated[str, SCALING],
    repeats: Annotated[int, REPEATS],
    seconds: Annotated[float, SECONDS],
    sample_ms: Annotated[float | None, SAMPLE_MS],
    cuda_graph: Annotated[bool, CUDA_GRAPH],
    errors: Annotated[bool, ERRORS],
    out: Annotated[Path | None, options.OUT],
    json: Annotated[Path | None, options.JSON],
) -> None:
    """Measure speed, memory and error, against baselines.

    --pattern, --backend, --ranks and the options of the panel Sizes take several values, separated
    by commas: every combination is measured. Under torchrun, leave out --ranks. Writes results.json
    (--json writes a copy elsewhere) and a plot. Exit code 1 if this library failed in a
    workload, computed none, or sent other bytes than its plan; 2 if every workload is refused.
    """
    from ..bench import run_command
    from ..checks import RankError
    from .json_output import json_output

    measuring = {
        "ranks": tuple(ranks),
        "scaling": scaling,
        "baselines": tuple(baseline),
        "layout": layout,
        "exchange": exchange,
        "device": device,
        "repeats": repeats,
        "seconds": seconds,
        "sample_ms": sample_ms,
        "cuda_graph": cuda_graph,
        "errors": errors,
        "timeout": timeout,
        "seed": seed,
    }
    workloads = {
        "patterns": pattern,
        "segment_lengths": segment_lengths,
        "dilation_rates": dilation_rates,
        "head_offsets": head_offsets,
        "head_branches": head_branches,
        "zero_keys": zero_keys,
        "seq_lens": seq_len,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dims": head_dim,
        "batch_sizes": batch_size,
        "dtypes": dtype,
        "causal": [causal],
        "backends": backend,
    }
    try:
        with json_output(json) as write:
            done = run_command(
                out,
                runs=RUNS,
                command=["rda", *sys.argv[1:]],
                measuring=measuring,
                workloads={name: x for name, x in workloads.items() if x is not None},
                write=write,
            )
    except RankError as error:
        fail(error, 1)
    if not done:
        raise typer.Exit(1)
