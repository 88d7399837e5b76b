"""The columns of a benchmark's tables, and what they mean."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..terminal import (
    BYTES,
    FLOP_PER_S,
    SECONDS,
    Column,
    amounts,
    counts,
    numbers,
    texts,
)
from .result import REFUSED, Communication, Comparison, Result, Timing, compare

PASSES = ("forward", "fwd + bwd")


class Row(NamedTuple):
    """A row of a table: a result, and its timing without or with backward."""

    result: Result
    backward: bool
    timing: Timing | None
    beside: Comparison | None

    def of_timing(self, figure: Callable[[Timing], float | None]) -> float | None:
        """A figure of the timing, where there is one."""
        return None if self.timing is None else figure(self.timing)

    def of_others(self, figure: Callable[[Comparison], float | None]) -> float | None:
        """A figure of the comparison with others, where there is one."""
        return None if self.beside is None else figure(self.beside)

    def of_communication(self, figure: Callable[[Communication], float]) -> float | None:
        """A figure of what was sent and waited for, where it was measured."""
        found = self.timing.communication if self.timing is not None else None
        return None if found is None else figure(found)

    @property
    def error(self) -> float | None:
        """Of out, or with backward the largest of a gradient."""
        errors = self.result.errors
        return None if errors is None else errors.gradients if self.backward else errors.out


def rows_of(results: Sequence[Result], every: Sequence[Result]) -> list[Row]:
    """Two rows, forward and forward + backward, for each result that was not refused.

    A result that ran out of memory, or failed, has rows that say so.

    Args:
        results: those that get rows.
        every: all results of the run, with which each is compared.
    """
    rows = []
    for result in results:
        if result.status == REFUSED:
            continue
        for backward in (False, True):
            timing = result.timing(backward)
            beside = None if timing is None else compare(result, every, backward)
            rows.append(Row(result, backward, timing, beside))
    return rows


class Group(NamedTuple):
    """Columns of a table, and what they mean."""

    columns: list[Column]
    meaning: str


def groups_of(rows: Sequence[Row], several: bool) -> list[Group]:
    """The columns that have a number in at least one row."""
    groups = [_status(rows), *_speed(rows, several)]
    if several:
        groups += _scaling(rows)
    groups += _beside(rows, several)
    found = []
    for group in groups:
        columns = [column for column in group.columns if any(column.cells)]
        if columns:
            found.append(Group(columns, group.meaning))
    return found


def _status(rows: Sequence[Row]) -> Group:
    statuses = ["" if row.timing is not None else row.result.status for row in rows]
    return Group([texts("status", statuses)], "status: why there is no timing; reasons below")


def _speed(rows: Sequence[Row], several: bool) -> list[Group]:
    def seconds(figure: Callable[[Sequence[float]], float], wall: bool) -> list[float | None]:
        def of(timing: Timing) -> float | None:
            times = timing.wall_ms if wall else timing.times_ms
            return figure(times) / 1e3 if times else None

        return [row.of_timing(of) for row in rows]

    times = [
        ("median", seconds(statistics.median, False)),
        ("min", seconds(min, False)),
        ("max", seconds(max, False)),
    ]
    rates = [("", [row.of_timing(lambda timing: timing.tflops * 1e12) for row in rows])]
    slowest, of_all = "", ""
    if several:
        slowest, of_all = ", on the slowest rank", " of all ranks together, and per rank"
        per_rank = [row.of_timing(lambda timing: timing.tflops_per_rank * 1e12) for row in rows]
        rates.append(("per rank", per_rank))
    else:
        times.append(("wall", seconds(statistics.median, True)))
    ended = "" if several else "; wall: from before the call until the device is idle"
    return [
        Group(amounts(times, SECONDS), f"median, min, max: time per call{slowest}{ended}"),
        Group(
            amounts(rates, FLOP_PER_S),
            f"FLOP/s: useful operations{of_all}; backward counts 2.5 times forward",
        ),
        Group(
            [
                numbers(
                    "% of matmul",
                    [row.of_timing(lambda t: 100 * t.fraction) for row in rows],
                    ".1f",
                )
            ],
            "% of matmul: fraction of matmul peak, of a large matrix product in the same turns",
        ),
    ]


def _scaling(rows: Sequence[Row]) -> list[Group]:
    speed_up = [row.of_others(lambda x: x.speed_up) for row in rows]
    rate = [row.of_others(lambda x: x.rate_to_one) for row in rows]
    exposed = [row.of_communication(lambda x: max(x.exposed_ms) / 1e3) for row in rows]
    most = [row.of_communication(lambda x: 100 * max(x.shares)) for row in rows]
    least = [row.of_communication(lambda x: 100 * min(x.shares)) for row in rows]
    sent = [row.of_communication(lambda x: max(x.sent_bytes)) for row in rows]
    match = [row.of_communication(lambda x: x.bytes_match) for row in rows]
    marks = ["" if right is None else "ok" if right else "WRONG" for right in match]
    return [
        Group(
            [numbers("speed-up", speed_up, ".3f")],
            "speed-up: time on 1 rank over this time (weak scaling: the efficiency; 1 is ideal "
            "where work is linear)",
        ),
        Group(
            [numbers("rate / 1 rank", rate, ".3f")],
            "rate / 1 rank: FLOP/s per rank over that of 1 rank",
        ),
        Group(
            [
                *amounts([("exposed", exposed)], SECONDS),
                numbers("exposed %", most, ".1f"),
                numbers("least exposed %", least, ".1f"),
            ],
            "exposed: time that compute waits for rows of other ranks, on the rank that waits "
            "longest, and its fraction of the call; least: on the rank that waits least. Both are "
            "of samples of their own, in which waits are timed, not of those of the median",
        ),
        Group(
            [*amounts([("sent", sent)], BYTES), texts("plan", marks)],
            "sent: bytes per rank, the most of any rank; plan: whether every rank sent the bytes "
            "of its plan",
        ),
    ]


def _beside(rows: Sequence[Row], several: bool) -> list[Group]:
    ours = [row.of_others(lambda x: x.ours_to_this) for row in rows]
    peak = [row.of_timing(lambda timing: timing.memory.peak_in_queries) for row in rows]
    memory = [row.of_others(lambda x: x.memory_to_one) for row in rows] if several else []
    return [
        Group(
            [numbers("ours / baseline", ours, ".3f")],
            "ours / baseline: our FLOP/s over those of the baseline",
        ),
        Group(
            [numbers("peak / query", peak, ".2f")],
            "peak / query: peak memory without inputs, in multiples of the bytes of query",
        ),
        Group(
            [numbers("memory / 1 rank", memory, ".3f")],
            "memory / 1 rank: inputs and peak over those of 1 rank",
        ),
        Group(
            [numbers("error", [row.error for row in rows], ".1e")],
            "error: relative to float64, of out, and the largest of the gradients",
        ),
    ]


def keys_of(rows: Sequence[Row], several: bool) -> list[Column]:
    """What a row is about; the number of ranks where several were measured."""
    ranks = [counts("ranks", [row.result.ranks for row in rows])] if several else []
    names = [_name(row.result) for row in rows]
    return [*ranks, texts("system", names), texts("pass", [PASSES[row.backward] for row in rows])]


def _name(result: Result) -> str:
    """The contender, and the kernel inside where its name does not say."""
    name = result.contender
    return name if result.kernel in ("", "auto", *name.split(":")) else f"{name} ({result.kernel})"
