"""The tables of `rda bench`, with figures of every size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.bench import Options, Result, Workload, bench, report
from ring_dilated_attention.bench.result import FAILED, OUT_OF_MEMORY, Communication
from ring_dilated_attention.terminal import Table


def bench_tables() -> list[Table]:
    """Of several ranks, and of one alone."""
    several = results()
    return [*report.tables(several), *report.memory_tables(several), *report.tables(several[:2])]


def results() -> list[Result]:
    """On one rank as measured; on 2 and 4096 as if, with figures of every size."""
    workload = Workload(
        pattern=DilatedPattern([8, None], [1, 3]),
        seq_len=37,
        num_heads=4,
        head_dim=8,
        dtype="float32",
    )
    options = Options(device="cpu", repeats=1, baselines=("sdpa",))
    ours, sdpa = bench([workload], options)
    found = [ours, replace(sdpa, status=OUT_OF_MEMORY, reason="no room", forward_backward=None)]
    for ranks in (2, 4096):
        communication = Communication(
            exposed_ms=(123_456.789,) * ranks,
            shares=(0.123,) * ranks,
            agreement_ms=0.1,
            sent_bytes=(3**33,) * ranks,
            planned_bytes=(3**33,) * ranks,
            bytes_match=True,
        )
        timings: dict[str, Any] = {}
        for name in ("forward", "forward_backward"):
            timing = getattr(ours, name)
            memory = replace(timing.memory, rank=ranks - 1, peak=3**34, outbox=2**29, value=3**36)
            timings[name] = replace(
                timing,
                flops_by_rank=(10**17,) * ranks,
                times_ms=(0.0123, 98_765.4321, 1.5),
                communication=communication,
                memory=memory,
                wall_ms=(),
            )
        found.append(replace(ours, ranks=ranks, **timings))
    return [*found, replace(sdpa, ranks=2, status=FAILED, forward=None, forward_backward=None)]
