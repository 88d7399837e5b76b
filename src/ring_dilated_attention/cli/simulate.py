"""`rda simulate`: every rank in one process, compared with one device that holds everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..named_patterns import given_pattern
from ..units import in_bytes, in_seconds
from . import common
from .common import Call, RunError, app, make_console, progress, show_table, write_json
from .plan import shown_ranks, work_in_words

if TYPE_CHECKING:
    from ..checks import Simulation

_HELD = 5
"""Tensors of query's size that are held at least: query and out of one device, query, out and dout
of the ranks; keys and values may be smaller."""


@app.command()
def simulate(
    pattern: common.PatternName = None,
    segment_lengths: common.SegmentLengths = None,
    dilation_rates: common.DilationRates = None,
    head_offsets: common.HeadOffsetsName = None,
    zero_keys: common.ZeroKeys = False,
    seq_len: common.SeqLen = 8192,
    ranks: common.Ranks = 4,
    layout: common.LayoutName = "auto",
    causal: common.Causal = False,
    documents: common.Documents = None,
    heads: common.Heads = None,
    kv_heads: common.KVHeads = None,
    exchange: common.ExchangeName = "auto",
    device: common.DeviceName = "auto",
    json: common.Json = None,
) -> None:
    """Run every rank on one device, one at a time, and compare with one rank that has everything.

    Exit code 1 if results differ, or memory or bytes are not those of the plan.

    rda simulate --pattern gigapath --seq-len 45681 --ranks 16
    """
    import torch

    from ..checks import Case
    from ..checks import simulate as run
    from ..limits import (
        MOST_SIMULATED_RANKS,
        check_memory,
        check_one_process,
        check_size,
        host_memory,
    )

    check_one_process("rda simulate")
    check_size("--ranks", ranks, MOST_SIMULATED_RANKS)
    on = common.resolve_device(device)
    call = Call(
        given_pattern(
            pattern,
            segment_lengths,
            dilation_rates,
            head_offsets=head_offsets,
            zero_keys=zero_keys,
        ),
        seq_len=seq_len,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        dtype="float32" if on == "cpu" else None,
        causal=causal,
        layout=layout,
        documents=documents,
    )
    dtype: torch.dtype = getattr(torch, call.dtype)
    size = call.seq_len * call.heads * call.head_dim * dtype.itemsize
    there = host_memory() if on == "cpu" else torch.cuda.get_device_properties(0).total_memory
    check_memory(_HELD * size, there, "simulating")
    case = Case(
        pattern=call.pattern,
        layout=call.layout,
        num_heads=call.heads,
        num_kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        is_causal=call.causal,
        documents=call.documents,
        dtype=dtype,
        exchange=exchange,
        device=on,
    )
    console = make_console(json)
    console.print(f"{call}, on {on}\n")
    with progress("simulate", 1) as told:
        found = run(case, told=lambda done, _: told(done))
    for words in (*_in_words(found), *work_in_words(call)):
        console.print(f"- {words}", style="bold")
    console.print()
    rows = _rows(found, shown_ranks(ranks))
    show_table(console, "What each rank did, forward and backward", list(rows[0]), rows[1:])
    write_json(json, {"ok": found.ok, "options": call.options, "device": on, **asdict(found)})
    if not found.ok:
        raise RunError("; ".join(found.problems[:3]))


def _in_words(found: Simulation) -> Sequence[str]:
    alone, slowest = sum(found.one_device), max(x.seconds for x in found.ranks)
    errors = ", ".join(f"{name} {error:.1e}" for name, error in found.errors.items())
    right = "results match one device; memory, bytes and messages match the plan"
    return [
        right if found.ok else f"WRONG: {len(found.problems)} differences",
        f"error relative to one device: {errors}",
        f"one device takes {in_seconds(alone)}, the slowest rank {in_seconds(slowest)} "
        f"({alone / slowest:.1f} times as fast, transfers not counted)",
    ]


def _rows(found: Simulation, shown: Sequence[int]) -> list[list[Any]]:
    """The headings, a row for each rank that is shown, and one with the largest of all ranks."""
    columns: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "positions": (lambda x: x.positions, int),
        "of mean": (lambda x: x.of_mean, "{:.2f}".format),
        "peers": (lambda x: len(x.forward.counted.peers), int),
        "received": (lambda x: x.forward.counted.received, in_bytes),
        "sent back": (lambda x: x.backward.counted.sent if x.backward else 0, in_bytes),
        "memory": (lambda x: x.held_memory.total, in_bytes),
        "time": (lambda x: x.seconds, in_seconds),
    }
    rows = [
        [str(rank), *(text(get(found.ranks[rank])) for get, text in columns.values())]
        for rank in shown
    ]
    most = [text(max(map(get, found.ranks))) for get, text in columns.values()]
    return [["rank", *columns], *rows, ["largest", *most]]
