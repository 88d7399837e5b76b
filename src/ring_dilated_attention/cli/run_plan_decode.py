"""What `rda plan --decode` prints: what a KV cache keeps, its bytes, and what a step reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from ..decode import SHARD_BYTES
from ..pattern import Branch
from ..plan import CachePlan, costs, plan_cache
from ..terminal import (
    BYTES,
    Table,
    amounts,
    count_of,
    counts,
    in_bytes,
    make_console,
    numbers,
    show_table,
    show_text,
    texts,
)
from .sharded import Sharded


@dataclass(frozen=True, kw_only=True)
class CacheFigures:
    """What is printed of the KV cache of one layer.

    Attributes:
        sharded: the workload, and on how many ranks.
        length: positions so far: of the sequence, or of its last document.
        whole: a cache for texts of up to `length` positions, of a rank that keeps all of it.
        shared: the same cache of a rank that shares it with all others.
        branches: what each branch of the pattern keeps after `length` positions.
    """

    sharded: Sharded
    length: int
    whole: CachePlan
    shared: CachePlan
    branches: list[costs.BranchUse]

    @classmethod
    def of(cls, sharded: Sharded) -> CacheFigures:
        """Count."""
        first, stop = sharded.plan.documents[-2:]
        about = sharded.workload.pattern, sharded.workload.kv_heads, stop - first
        return cls(
            sharded=sharded,
            length=stop - first,
            whole=plan_cache(*about),
            shared=plan_cache(*about, 0, sharded.ranks),
            branches=costs.cache_use(*about),
        )

    @property
    def slots(self) -> list[int]:
        """Slots per head of each branch; 0 where no head sees anything."""
        found = {branch.index: branch.slots for branch in self.whole.branches}
        return [found.get(use.index, 0) for use in self.branches]

    @property
    def growing(self) -> list[Branch]:
        """The branches that keep more rows the longer the text is."""
        return [x for x in self.sharded.workload.pattern.branches if x.segment_length is None]

    def a_head(self, rows: float) -> float:
        """Rows per KV head on average, given the rows of all of them."""
        return rows / self.sharded.workload.kv_heads

    def per_head(self, rows: float) -> str:
        """`a_head` as text."""
        return _in_words(self.a_head(rows))

    @property
    def kept(self) -> int:
        """Rows that a later position can still be shown, of all heads."""
        return sum(use.kept for use in self.branches)

    @property
    def shown(self) -> float:
        """Rows that a query of a head is shown, on average over heads and positions."""
        return self.a_head(sum(use.mean_shown * use.heads for use in self.branches))

    @property
    def read_bytes(self) -> int:
        """Bytes of these rows of all heads: what a step reads on average."""
        rows = self.shown * self.sharded.workload.kv_heads
        return round(rows * self.sharded.workload.size.key_value_bytes(1))

    def nbytes(self, plan: CachePlan) -> int:
        """Bytes of a cache on each rank."""
        size = self.sharded.workload.size
        return plan.nbytes(size.batch, size.head_dim, size.element_size)

    def dense_bytes(self, shards: int) -> int:
        """Bytes of a cache of every row on each of some ranks that share it."""
        rows = -(-self.length // shards) * self.sharded.workload.kv_heads
        return self.sharded.workload.size.key_value_bytes(rows)


def show_cache(sharded: Sharded, *, console: Console | None = None) -> dict[str, Any]:
    """Print what the KV cache of one layer keeps after the sequence, or its last document.

    Args:
        sharded: what is computed, and how many ranks may share the cache.
        console: where to print; None: standard output.

    Returns:
        The same numbers, for JSON.

    Raises:
        TypeError, ValueError: an option is not allowed.
    """
    console = console or make_console()
    figures = CacheFigures.of(sharded)
    console.print(_title(figures))
    for text in conclusions(figures):
        show_text(console, text)
    console.print()
    for table in cache_tables(figures):
        show_table(console, table)
    return cache_document(figures)


def _title(figures: CacheFigures) -> str:
    w = figures.sharded.workload
    packed = " of the last document" if len(figures.sharded.plan.documents) > 2 else ""
    return (
        f"[bold]{w.pattern}[/bold]: KV cache of one layer after "
        f"{count_of(figures.length, 'position')}{packed}, {count_of(w.kv_heads, 'KV head')} of "
        f"{w.head_dim}, batch {w.batch_size}, {w.dtype}"
    )


def conclusions(figures: CacheFigures) -> list[str]:
    """Whether the cache grows, what it keeps now, and what a step reads, in sentences."""
    return [
        f"growth: {_growth(figures)}",
        f"kept: {_kept(figures)}",
        f"read: {_in_words(figures.shown)} rows a head on average in a step of generation, "
        f"{in_bytes(figures.read_bytes)} of all heads",
    ]


def _growth(figures: CacheFigures) -> str:
    pattern = figures.sharded.workload.pattern
    if not figures.growing:
        longest = max(length for length in pattern.segment_lengths if length is not None)
        most = plan_cache(pattern, figures.sharded.workload.kv_heads, None).rows
        return (
            f"none beyond the longest segment, {longest:,} positions: {figures.per_head(most)} "
            "rows a head are enough for a text of any length"
        )
    branches = ", ".join(map(str, dict.fromkeys(figures.growing)))
    rows = " + ".join("n" if rate == 1 else f"n / {rate:,}" for _, rate in figures.growing)
    return f"with the text: {rows} rows a head for n positions, of {branches}"


def _kept(figures: CacheFigures) -> str:
    if not figures.kept:
        return "nothing just now: the next row of each head begins a new segment in every branch"
    return (
        f"{figures.per_head(figures.kept)} rows a head on average that a later position can still "
        f"be shown; a cache of all rows has {figures.length:,}"
    )


def cache_tables(figures: CacheFigures) -> list[Table]:
    """Tables of rows by branches, and of bytes."""
    return [_rows_table(figures), _bytes_table(figures)]


def _rows_table(figures: CacheFigures) -> Table:
    w, branches = figures.sharded.workload, figures.branches
    slots = [*figures.slots, figures.a_head(figures.whole.rows)]
    kept = [*(use.mean_kept for use in branches), figures.a_head(figures.kept)]
    shown = [*(use.mean_shown for use in branches), figures.shown]
    return Table(
        title="Rows of a head",
        keys=[
            texts("segment length", [*map(_segment, w.pattern.branches), "all branches"]),
            texts("dilation rate", [*(f"{x.dilation_rate:,}" for x in w.pattern.branches), ""]),
        ],
        columns=[
            counts("KV heads", [*(use.heads for use in branches), w.kv_heads]),
            numbers("slots", slots, _form(slots)),
            numbers("kept now", kept, _form(kept)),
            numbers("shown to a query", shown, _form(shown)),
        ],
        totals=1,
        note="Averages over KV heads, whose offsets differ; a row that several branches show is "
        "kept for each. Shown to a query: averaged over the newest w positions of a branch (w, r), "
        "or over r where its first segment has not ended.",
    )


def _bytes_table(figures: CacheFigures) -> Table:
    ranks = figures.sharded.ranks
    kinds = [("whole on each rank", figures.whole, 1)]
    if ranks > 1:
        kinds.append((f"shared by {ranks:,} ranks", figures.shared, ranks))
    sizes = [figures.nbytes(plan) for _, plan, _ in kinds]
    dense = [figures.dense_bytes(shards) for _, _, shards in kinds]
    by_default = f"DilatedKVCache is shared from {in_bytes(SHARD_BYTES)} on by default."
    return Table(
        title="Keys and values in the memory of each rank, per layer, for texts of up to "
        f"{count_of(figures.length, 'position')}",
        keys=[texts("cache", [name for name, _, _ in kinds])],
        columns=[
            *amounts([("this cache", sizes), ("cache of all rows", dense)], BYTES),
            numbers("ratio", [a / b for a, b in zip(sizes, dense, strict=True)], ",.4f"),
        ],
        note=by_default if ranks > 1 else "",
    )


def _form(values: Sequence[float]) -> str:
    """Whole numbers, or those with one decimal."""
    return ",.0f" if all(float(value).is_integer() for value in values) else ",.1f"


def _in_words(value: float) -> str:
    return format(value, _form([value]))


def _segment(branch: Branch) -> str:
    return "document" if branch.segment_length is None else f"{branch.segment_length:,}"


def cache_document(figures: CacheFigures) -> dict[str, Any]:
    """What is printed, for JSON: rows of all KV heads, and bytes."""
    w, ranks = figures.sharded.workload, figures.sharded.ranks
    return {
        "options": figures.sharded.options,
        "length": figures.length,
        "branches": [
            {
                "segment_length": branch.segment_length,
                "dilation_rate": branch.dilation_rate,
                "kv_heads": use.heads,
                "grows": branch.segment_length is None,
                "slots_per_head": slots,
                "kept_rows": use.kept,
                "mean_rows_shown": use.mean_shown,
            }
            for branch, use, slots in zip(
                w.pattern.branches, figures.branches, figures.slots, strict=True
            )
        ],
        "grows": bool(figures.growing),
        "slots": figures.whole.rows,
        "kept_rows": figures.kept,
        "mean_rows_shown": figures.shown,
        "mean_read_bytes": figures.read_bytes,
        "rank_bytes": {
            "whole": figures.nbytes(figures.whole),
            "shared": figures.nbytes(figures.shared),
            "all_rows_whole": figures.dense_bytes(1),
            "all_rows_shared": figures.dense_bytes(ranks),
        },
    }
