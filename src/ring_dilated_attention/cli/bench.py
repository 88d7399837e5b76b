"""`rda bench`: speed and memory of the call, beside baselines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from ..named_patterns import DEFAULT_NAME, given_pattern
from . import common
from .common import RunError, app, make_console, show_table, write_json

_SeqLens = Annotated[
    Sequence[int],
    common.option(
        "--seq-len",
        "Positions of the whole sequence, one length after the other, as in 16K,64K.",
        common.list_of(common.integer(1, common.MOST_POSITIONS)),
    ),
]
_Baselines = Annotated[
    Sequence[str],
    common.option(
        "--baseline",
        "Measured in turns with this library: kernel (alone, as many FLOPs), "
        "torchscale (gathers), sdpa (dense); on several GPUs context_parallel (dense).",
        common.list_of(str),
    ),
]


@app.command()
def bench(
    pattern: common.PatternName = None,
    segment_lengths: common.SegmentLengths = None,
    dilation_rates: common.DilationRates = None,
    seq_len: _SeqLens = (8192,),
    heads: common.Heads = None,
    kv_heads: common.KVHeads = None,
    head_dim: common.HeadDim = None,
    dtype: common.Dtype = None,
    causal: common.Causal = False,
    ranks: common.RankCounts = (1,),
    baseline: _Baselines = (),
    device: common.DeviceName = "auto",
    repeats: Annotated[int, typer.Option(help="Samples of each call.", min=1)] = 20,
    json: common.Json = None,
    out: common.Out = None,
) -> None:
    """Measure time and memory of forward and forward+backward, beside baselines.

    Starts the ranks on this host, or runs on those of torchrun. --out is a picture (PNG).

    rda bench --device cpu --seq-len 4K --heads 4 --baseline kernel,torchscale --repeats 3

    rda bench --ranks 1,4 --pattern dense --causal --seq-len 256K --baseline context_parallel
    """
    import torch

    from ..bench import Settings, Workload, document, environment, plot, report
    from ..bench import bench as measure
    from ..checks import RankError
    from ..limits import launched

    found = given_pattern(pattern, segment_lengths, dilation_rates)
    on = common.resolve_device(device)
    workloads = [
        Workload(
            pattern=found.pattern,
            seq_len=length,
            num_heads=heads or found.num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim or found.head_dim,
            dtype=dtype or ("float32" if on == "cpu" else found.dtype),
            is_causal=causal,
            name=(pattern or DEFAULT_NAME) if segment_lengths is None else "",
        )
        for length in seq_len
    ]
    settings = Settings(ranks=tuple(ranks), baselines=tuple(baseline), device=on, repeats=repeats)
    console = make_console(json)
    try:
        with console.status("bench") as status:
            results = measure(workloads, settings, progress=status.update)
    except RankError as error:
        raise RunError(str(error)) from None
    place = launched()
    if place is not None and place.rank > 0:
        return
    about = environment(torch.device(on))
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    for part in report(results):
        if isinstance(part, str):
            console.print(part)
        else:
            console.print()
            show_table(console, *part)
    write_json(json, document(results, about, sys.argv[1:]))
    if out is not None:
        plot(results, out)
    if all(result.reason for result in results):
        raise RunError("nothing was measured: the reasons are above")
