"""Tables that tell one kernel launch where its rows are: of many tiles, or of several branches.

Of many tiles (`build_cells`): a cell is (tile, segment, KV head, batch entry), rows that attend to
each other and to nothing else. Query row i of the m-th of the `heads_per_kv` query heads that share
a KV head is row ``q_row + i * q_stride`` of head ``kv_head * heads_per_kv + m``; key row i is row
``k_row + i * k_stride`` of head `kv_head`. Rows count in the sequence dimension, so that a table
fits tensors of any strides.

Of several branches, row by row of the result (`build_programs`): positions of a part that are
congruent modulo the rates of all branches, and lie in one segment of each, see the same keys. So a
program takes such a block of rows, goes through the keys of one branch after the other, and writes
its rows once: nothing is merged or added up in memory. Where such rows are few, rows are congruent
modulo less: of branches of larger rates some rows of a program are members, and a mask hides the
keys from the others. Ranges of rows come from the plan (`plan.OwnRange`). Positions count from the
start of the document, as segments do. Heads and batch entries are axes of the grid: no table grows
with them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch.nn.functional import pad

from .launch import KernelLaunch

TileInts: TypeAlias = tuple[
    int, range, int, bool, tuple[int, ...], tuple[int, ...], tuple[int, int] | None
]
"""A `plan.Tile`. This room takes the plan's integers, and does not import it."""
PackedInts: TypeAlias = tuple[int, range, bool, int, int, tuple[int, ...], tuple[int, ...]]
"""A `plan.PackedTiles`."""
Range = TypeVar("Range", bound=Any)
"""A `plan.OwnRange`."""

_TABLE_WORDS = 4
"""Each table begins at a multiple of 16 bytes: Triton compiles a kernel again for others."""


def taken(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """``values[indices]``, which wakes all threads from 3,000 elements on: up to 10 ms."""
    return values.index_select(0, indices)


def spread(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index i repeated ``counts[i]`` times, for all i; and 0, 1, ... within each index."""
    # Not by repeat_interleave, which wakes all threads however few the counts are.
    ends, total = counts.cumsum(0), int(counts.sum())
    begins = counts.new_zeros(total + 1).index_add_(0, ends[:-1], torch.ones_like(ends[:-1]))
    indices = begins[:total].cumsum(0)
    return indices, torch.arange(total) - taken(ends - counts, indices)


def moved_together(device: torch.device | str, *tables: torch.Tensor) -> list[torch.Tensor]:
    """Tables on a device: in one allocation, because they are usually small."""
    words = (x.flatten().view(torch.int32) for x in tables)
    padded = [pad(x, (0, -len(x) % _TABLE_WORDS)) for x in words]
    parts = torch.cat(padded).to(device).split([len(x) for x in padded])
    placed = zip(parts, tables, strict=True)
    return [part.view(x.dtype)[: x.numel()].view(x.shape) for part, x in placed]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What a launch computes, as tables on the device.

    Attributes:
        reach: rows of the tensors from the first to the last row of a block, at most.
        launches: how kernels are launched on them, for each of the last few layouts.
    """

    reach: int
    launches: dict[Hashable, KernelLaunch] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Cells(Tables):
    """The cells of some tiles, and the programs that compute them, longest first.

    Attributes:
        table: int64 (cells, 8): batch entry, KV head; first row, stride and length of its queries;
            the same of its keys.
        query_programs: int32 (programs, 3): cell, member, block of queries. For forward and dq.
        key_programs: int32 (programs, 2): cell, block of keys. For dk and dv.
        block_m: queries per block.
        block_n: keys per block, in `key_programs`.
        heads_per_kv: query heads per KV head.
        is_causal: whether row i sees keys 0 to i only.
    """

    table: torch.Tensor
    query_programs: torch.Tensor
    key_programs: torch.Tensor
    block_m: int
    block_n: int
    heads_per_kv: int
    is_causal: bool


def build_cells(
    tiles: Sequence[TileInts],
    packed: Sequence[PackedInts] = (),
    *,
    batch: int,
    heads_per_kv: int,
    block_m: int,
    block_n: int,
    device: torch.device | str,
) -> Cells:
    """Lay out tiles for one launch.

    Args:
        tiles: all causal or none; no two share a (query row, head) or a (key row, head).
        packed: further such tiles.
        batch: batch entries.
        heads_per_kv: query heads per KV head.
        block_m: queries per block.
        block_n: keys per block of the dk, dv kernel.
        device: where the kernels run.
    """
    kinds = {tile[3] for tile in tiles} | {many[2] for many in packed}
    if len(kinds) > 1:
        raise ValueError("the tiles of a launch must be all causal or none")
    is_causal = kinds == {True}
    table = _table(torch.cat([_of_tiles(tiles), *map(_of_packed, packed)]), batch)
    q_len, k_len = table[:, 4], table[:, 7]
    assert not len(table) or table[:, 4::3].min() > 0

    cell, block = spread((q_len + block_m - 1) // block_m)
    # Rows of work: a causal block of queries sees no key behind it.
    work = taken(k_len, cell)
    if is_causal:
        work = torch.minimum((block + 1) * block_m, taken(q_len, cell))
    cell, block = taken(torch.stack([cell, block], 1), (-work).argsort(stable=True)).T[..., None]
    members = torch.broadcast_tensors(cell, torch.arange(heads_per_kv), block)
    query_programs = torch.stack(members, -1).int()

    cell, block = spread((k_len + block_n - 1) // block_n)
    work = taken(q_len, cell) - block * block_n if is_causal else taken(q_len, cell)
    key_programs = taken(torch.stack([cell, block], 1), (-work).argsort(stable=True)).int()

    on_device = moved_together(device, table, query_programs.reshape(-1, 3), key_programs)
    return Cells(
        table=on_device[0],
        query_programs=on_device[1],
        key_programs=on_device[2],
        block_m=block_m,
        block_n=block_n,
        heads_per_kv=heads_per_kv,
        is_causal=is_causal,
        reach=BLOCK_ROWS * int(table[:, 3::3].max()) if len(table) else 0,
    )


def _of_tiles(tiles: Sequence[TileInts]) -> torch.Tensor:
    """int64 (tiles, 14): first, step and number of heads; segments; rows of queries and of keys."""
    values = (
        (heads.start, heads.step, len(heads), segments, *queries, *keys)
        for _, heads, segments, _, queries, keys, *_ in tiles
    )
    return _integers(chain.from_iterable(values), 14)


def _of_packed(many: PackedInts) -> torch.Tensor:
    """As `_of_tiles`, of thousands of documents, without a Python object for each of them."""
    _, heads, _, stride, head_stride, *columns = many
    starts, lengths = (_integers(x, 1)[:, 0] for x in columns)
    fields = torch.zeros(len(starts), 14, dtype=torch.int64)
    fields[:, :4] = torch.tensor([heads.start, heads.step, len(heads), 1])
    for rows in (fields[:, 4:9], fields[:, 9:]):
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = starts, lengths, stride, head_stride
    return fields


def _table(fields: torch.Tensor, batch: int) -> torch.Tensor:
    """int64 (cells, 8): per tile the batch entries, of each the segments, of each the heads."""
    tile, number = spread(batch * fields[:, 2] * fields[:, 3])
    # Columns, each with one value per cell.
    head, head_step, heads, segments, *rows = taken(fields, tile).unbind(1)
    segment, j = number // heads, number % heads
    entry, segment = segment // segments, segment % segments
    columns = [entry, head + j * head_step]
    for start, length, stride, head_stride, segment_stride in (rows[:5], rows[5:]):
        columns += [start + segment * segment_stride + j * head_stride, stride, length]
    return torch.stack(columns, 1)


def _integers(numbers: Iterable[int], columns: int) -> torch.Tensor:
    """int64 (rows, columns), in a third of the time that `torch.tensor` takes."""
    kept = array("q", numbers)
    if not kept:
        return torch.empty(0, columns, dtype=torch.int64)
    return torch.frombuffer(kept, dtype=torch.int64).view(-1, columns)


MOST_POSITIONS = 1 << 30
"""Of a document: twice as many are counted in 32 bits."""
MOST_BRANCHES = 31
"""Of a pattern: which of them a range has is bits of an int32."""
MOST_STEP = 1024
"""Between rows of a program: there is a program for each residue, whether or not rows have it."""
BLOCK_ROWS = 256
"""Rows or keys of a block, at most."""
LOADED_ROWS = 32
"""Rows of a program whose products with a key cost as much as loading it: estimated."""
MASKED_COST = 2.0
"""Cost of a block of keys that a mask hides from some rows, relative to one that all rows see:
estimated, not measured."""


@dataclass(frozen=True, kw_only=True)
class Programs(Tables):
    """Ranges of rows, and the programs that compute them over all their branches.

    Attributes:
        ranges: int32 (ranges, 8): start, stop, shift, document and branches of a `plan.OwnRange`;
            the step between rows of a program; where in `order` the residues begin; whether results
            are written over what is there.
        branches: int32 (branches, 2 + KV heads): segment length, rate, and the offset of each KV
            head, -1 where it does not run the branch.
        order: int32: residues modulo a range's step, by KV head, those that see most first.
        rows: int32 (programs, 5): a range; low and high, between which positions lie in one of its
            shortest segments; of them those of the residue that comes so many-th for a head; of
            these a block.
        block: rows of a program at most.
    """

    ranges: torch.Tensor
    branches: torch.Tensor
    order: torch.Tensor
    rows: torch.Tensor
    block: int

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tables on the device."""
        return self.ranges, self.branches, self.order, self.rows

    def sizes(self, q: torch.Tensor, k: torch.Tensor) -> tuple[int, tuple[int, int, int, int]]:
        """Programs of a head, and numbers of a kernel, for q (B, n, H, D) and k (B, n, K, D).

        The numbers: query heads of a KV head, KV heads, branches, programs of a batch entry.
        """
        (batch, _, heads, _), kv_heads, count = q.shape, k.shape[2], len(self.rows)
        return batch * count, (heads // kv_heads, kv_heads, len(self.branches), count)


def launches_of(
    ranges: Sequence[Range], branches: Sequence[tuple[int, int]], block: int
) -> list[tuple[Range, ...]]:
    """Cut the branches of ranges into launches whose blocks of rows are at least half full.

    Rows that see the same keys are the fewer, the less rates have in common.

    Args:
        ranges: of all parts.
        branches: (segment length, rate) of every branch.
        block: rows of a program at most.
    """
    longest = max([each.document for each in ranges])
    kinds = {each.branches for each in ranges}
    chosen: list[list[int]] = []
    for number in sorted(range(len(branches)), key=lambda x: branches[x][1]):
        if not any(kind >> number & 1 for kind in kinds):
            continue
        if chosen and _fills([branches[x] for x in (*chosen[-1], number)], longest, block):
            chosen[-1].append(number)
        else:
            chosen.append([number])
    launches = []
    for numbers in chosen:
        mask = sum(1 << number for number in numbers)
        own = (each._replace(branches=each.branches & mask) for each in ranges)
        launches.append(tuple(each for each in own if each.branches))
    return launches


def _fills(branches: Sequence[tuple[int, int]], longest: int, block: int) -> bool:
    """Whether blocks of common rows are at least half as full as those of each branch alone."""
    step = math.lcm(*(rate for _, rate in branches))
    shortest = min(longest, *(length for length, _ in branches))
    fullest = max(min(length, longest) / rate for length, rate in branches)
    return step <= MOST_STEP and shortest / step >= min(fullest, block) / 2


def step_of(branches: Sequence[tuple[int, int]], longest: int, block: int) -> int:
    """How far rows of a program are apart: each rate divides it, or is a multiple of it.

    Args:
        branches: (segment length, rate) of those that are run.
        longest: positions of a document, at most.
        block: rows of a program at most.
    """
    rates = sorted({rate for _, rate in branches})
    steps = {math.lcm(*rates[: number + 1]) for number in range(len(rates))}
    shortest = min(longest, *(length for length, _ in branches))

    def cost(step: int) -> float:
        """Of a row: of the blocks of keys that its program goes through."""
        rows = max(1.0, shortest / step)
        rows /= math.ceil(rows / block)
        work = sum(
            min(length, longest) / rate / min(rate, step) * (MASKED_COST if rate > step else 1)
            for length, rate in branches
        )
        return work * (1 + LOADED_ROWS / rows)

    fitting = [s for s in steps if all(s % rate == 0 or rate % s == 0 for rate in rates)]
    return min(sorted(fitting, reverse=True), key=cost)


def build_programs(
    ranges: Sequence[tuple[int, ...]],
    branches: Sequence[tuple[int, int]],
    offsets: Sequence[Sequence[int]],
    *,
    block: int,
    is_causal: bool,
    stores: int,
    device: torch.device | str,
) -> Programs:
    """Lay out a launch. Programs with much to do come first: those started last end together.

    Args:
        ranges: at least one; what a launch computes.
        branches: (segment length, rate) of every branch.
        offsets: of every branch, the offset of each KV head; -1: it does not run the branch.
        block: rows of a program at most, a power of two.
        is_causal: whether queries see no later keys.
        stores: bits of branches: where a range has one of them, results are written over what is
            there; else they are merged or added.
        device: where the kernels run.
    """
    own = _integers(chain.from_iterable(ranges), 7)
    longest = int(own[:, 3].max())
    assert longest <= MOST_POSITIONS
    spec = torch.tensor(
        [
            # Of a branch that no range has, nothing but the length is looked at.
            [min(length, longest), min(rate, MOST_POSITIONS), *each]
            for (length, rate), each in zip(branches, offsets, strict=True)
        ]
    )
    # Ranges of the same branches are of one kind.
    kinds, kind = own[:, 6].unique(return_inverse=True)
    shortest, of_kinds, order, most, reach = _layout(kinds, spec, longest, block)
    steps, starts = taken(of_kinds, kind), taken(of_kinds.cumsum(0) - of_kinds, kind)
    made = _programs(own, kind.argsort(stable=True), taken(shortest, kind), steps, block)
    work = taken(most, taken(starts, made[:, 0]) + made[:, 3])
    # Of a large rate nearly all residues have no head.
    some = work.nonzero()[:, 0]
    made, work = taken(made, some), taken(work, some)
    if is_causal:  # later rows see more
        work = work * (made[:, 2].double() / taken(own[:, 1], made[:, 0]))
    made = taken(made, (-work).argsort(stable=True))
    table = torch.empty(len(own), 8, dtype=torch.int64)
    table[:, :4], table[:, 4], table[:, 5] = own[:, :4], own[:, 6], steps
    table[:, 6], table[:, 7] = starts * len(offsets[0]), (own[:, 6] & stores) > 0
    tables = (x.int() for x in (table, spec, order, made))
    table, spec, order, made = moved_together(device, *tables)
    return Programs(ranges=table, branches=spec, order=order, rows=made, block=block, reach=reach)


def _layout(
    kinds: torch.Tensor, spec: torch.Tensor, longest: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """How rows are divided among programs: `kinds` are bits of branches, which are rows of `spec`.

    Returns:
        Of each kind the shortest segment length, and the step between rows of a program. Of each
        kind, KV head by KV head: residues modulo the step, those that see most keys first. Of each
        kind: about how many keys the rows of these see, of any head. Positions that a block spans
        at most: rows are a step apart, and keys a rate, which may be more.
    """
    run = (kinds[:, None] >> torch.arange(len(spec)) & 1).bool()
    lengths, rates, offsets = spec[:, 0], spec[:, 1], spec[:, 2:]
    branches = spec[:, :2].tolist()
    pairs = [[branches[b] for b, runs in enumerate(each) if runs] for each in run.tolist()]
    steps_of_kinds = [step_of(each, longest, block) for each in pairs]
    steps, residues = torch.tensor(steps_of_kinds), torch.arange(math.lcm(*steps_of_kinds))
    work = torch.zeros(len(kinds), offsets.shape[1], len(residues), dtype=torch.float64)
    are_run = run.any(0)
    for branch in are_run.nonzero()[:, 0].tolist():
        length, rate = branches[branch]
        common = steps.clamp(max=rate)[:, None, None]
        offset = offsets[branch][:, None]
        # Where segments begin at different residues, a head may have rows of any.
        any_residue = (length % common != 0) & (length < longest)
        shown = (any_residue | (residues % common == offset % common)) & (offset >= 0)
        work += (run[:, branch, None, None] & shown).double() * (length / rate)
    is_one = residues < steps[:, None]
    negative, order = torch.where(is_one[:, None], -work, 1).sort(dim=2, stable=True)
    order = order.masked_select(is_one[:, None])
    most = -negative.amin(1).masked_select(is_one)
    shortest = torch.where(run, lengths, longest).amin(1)
    of_keys = torch.minimum(BLOCK_ROWS * rates, lengths)[are_run]
    reach = max(BLOCK_ROWS * max(steps_of_kinds), int(of_keys.max()))
    return shortest, steps, order, most, reach


def _programs(
    own: torch.Tensor, order: torch.Tensor, shortest: torch.Tensor, steps: torch.Tensor, block: int
) -> torch.Tensor:
    """The programs of ranges in some order, (programs, 5): cut where the shortest segments are."""
    start, stop = own[:, 4], own[:, 5]
    length = torch.minimum(own[:, 3], shortest)
    first = start // length
    which, segment = spread(taken((stop + length - 1) // length - first, order))
    which = taken(order, which)
    of_ranges = torch.stack([start, stop, length, first, steps], 1)
    start, stop, length, first, step = taken(of_ranges, which).unbind(1)
    begin = (segment + first) * length
    low, high = torch.maximum(begin, start), torch.minimum(begin + length, stop)
    # The most rows of a residue.
    whose, index = spread(((high - low + step - 1) // step + block - 1) // block * step)
    found = taken(torch.stack([which, low, high, step, step], 1), whose)
    step = found[:, 3].clone()
    found[:, 3], found[:, 4] = index % step, index // step
    return found
