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
from typing import NamedTuple

import torch

from ..plan import OwnRange, PackedTiles, Tile
from .launch import KernelLaunch, moved_together, spread

CELL_FIELDS = ("batch", "kv_head", "q_row", "q_stride", "q_len", "k_row", "k_stride", "k_len")


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The cells of some tiles, and the programs that compute them, longest first.

    Attributes:
        table: int64 (cells, 8): `CELL_FIELDS`.
        query_programs: int32 (programs, 3): cell, member, block of queries. For forward and dq.
        key_programs: int32 (programs, 2): cell, block of keys. For dk and dv.
        block_m: queries per block.
        block_n: keys per block, in `key_programs`.
        heads_per_kv: query heads per KV head.
        is_causal: whether row i sees keys 0 to i only.
        max_queries: most queries in a cell.
        max_keys: most keys in a cell.
        max_stride: largest step from row to row.
        launches: how kernels are launched on them, for each of the last few layouts.
    """

    table: torch.Tensor
    query_programs: torch.Tensor
    key_programs: torch.Tensor
    block_m: int
    block_n: int
    heads_per_kv: int
    is_causal: bool
    max_queries: int
    max_keys: int
    max_stride: int
    launches: dict[Hashable, KernelLaunch] = field(default_factory=dict, repr=False, compare=False)


def build_cells(
    tiles: Sequence[Tile],
    packed: Sequence[PackedTiles] = (),
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
    kinds = {tile.is_causal for tile in tiles} | {many.is_causal for many in packed}
    if len(kinds) > 1:
        raise ValueError("the tiles of a launch must be all causal or none")
    is_causal = kinds == {True}
    parts = [_table(tiles, batch), *(_packed_table(many, batch) for many in packed)]
    table = torch.cat(parts)
    q_len, k_len = table[:, 4], table[:, 7]
    assert not len(table) or table[:, [4, 7]].min() > 0

    cell, block = _blocks(q_len, block_m)
    # Rows of work: a causal block of queries sees no key behind it.
    work = k_len[cell]
    if is_causal:
        work = torch.minimum((block + 1) * block_m, q_len[cell])
    cell, block = _longest_first(work, cell, block)
    query_programs = torch.empty(len(cell), heads_per_kv, 3, dtype=torch.int32)
    query_programs[..., 0] = cell[:, None]
    query_programs[..., 1] = torch.arange(heads_per_kv)
    query_programs[..., 2] = block[:, None]

    cell, block = _blocks(k_len, block_n)
    work = q_len[cell] - block * block_n if is_causal else q_len[cell]
    key_programs = torch.stack(_longest_first(work, cell, block), 1).int()

    on_device = moved_together(device, table, query_programs.reshape(-1, 3), key_programs)
    largest = table.amax(0).tolist() if len(table) else [0] * len(CELL_FIELDS)
    return Cells(
        table=on_device[0],
        query_programs=on_device[1],
        key_programs=on_device[2],
        block_m=block_m,
        block_n=block_n,
        heads_per_kv=heads_per_kv,
        is_causal=is_causal,
        max_queries=largest[4],
        max_keys=largest[7],
        max_stride=max(largest[3], largest[6]),
    )


def _table(tiles: Sequence[Tile], batch: int) -> torch.Tensor:
    """int64 (cells, 8): per tile the batch entries, of each the segments, of each the heads."""
    values = (
        (heads.start, heads.step, len(heads), segments, *queries, *keys)
        for _, heads, segments, _, queries, keys in tiles
    )
    fields = _integers(chain.from_iterable(values), 14)
    tile, number = spread(batch * fields[:, 2] * fields[:, 3])
    # Columns, each with one value per cell.
    head, head_step, heads, segments, *rows = fields[tile].unbind(1)
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


def _packed_table(many: PackedTiles, batch: int) -> torch.Tensor:
    """int64 (cells, 8): per batch entry the tiles, of each the heads."""
    heads = len(many.heads)
    table = torch.empty(batch, len(many.starts), heads, len(CELL_FIELDS), dtype=torch.int64)
    starts, lengths = (_integers(x, 1) for x in (many.starts, many.lengths))
    number = torch.arange(heads)
    table[..., 0] = torch.arange(batch)[:, None, None]
    table[..., 1] = many.heads.start + number * many.heads.step
    for rows in (table[..., 2:5], table[..., 5:]):
        rows[..., 0] = starts + number * many.head_stride
        rows[..., 1] = many.stride
        rows[..., 2] = lengths
    return table.reshape(-1, len(CELL_FIELDS))


def _blocks(lengths: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut rows into blocks: the cell of each, and its number within the cell."""
    return spread((lengths + block - 1) // block)


def _longest_first(work: torch.Tensor, *columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if len(work) < 2 or work.min() == work.max():
        return columns
    order = (-work).argsort(stable=True)
    return tuple(column[order] for column in columns)


RANGE_FIELDS = ("start", "stop", "shift", "document", "branches", "step", "order", "stores")
"""Of a range: the fields of `plan.OwnRange` but for its rows; how far rows of a program are apart;
where in `Programs.order` the residues begin; whether results are written over what is there."""
BRANCH_FIELDS = ("segment_length", "rate")  # and the offset of each KV head, -1 where it has none
PROGRAM_FIELDS = ("range", "low", "high", "rank", "block")
"""Positions ``range(low, high)`` of a range that lie in one of its shortest segments; of them those
of the residue that comes `rank`-th for a head; of these the rows of a block."""
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
class Programs:
    """What one launch computes.

    Attributes:
        ranges: int32 (ranges, 8): `RANGE_FIELDS`.
        branches: int32 (branches, 2 + KV heads): `BRANCH_FIELDS`.
        order: int32: residues modulo a range's step, by KV head, those that see most first.
        rows: int32 (programs, 5): `PROGRAM_FIELDS`.
        block: rows of a program at most.
        reach: positions from the first to the last row or key of a block, at most.
        launches: how kernels are launched on them, for each of the last few layouts.
    """

    ranges: torch.Tensor
    branches: torch.Tensor
    order: torch.Tensor
    rows: torch.Tensor
    block: int
    reach: int
    launches: dict[Hashable, KernelLaunch] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tables on the device."""
        return self.ranges, self.branches, self.order, self.rows

    @cached_property
    def count(self) -> int:
        """How many programs there are."""
        return len(self.rows)

    @cached_property
    def num_branches(self) -> int:
        """How many branches there are, run or not."""
        return len(self.branches)

    def sizes(self, heads: int, kv_heads: int) -> tuple[int, int, int, int]:
        """Query heads of a KV head, KV heads, branches, programs."""
        return heads // kv_heads, kv_heads, self.num_branches, self.count


def launches_of(
    ranges: Sequence[OwnRange], branches: Sequence[tuple[int, int]], block: int
) -> list[tuple[OwnRange, ...]]:
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
    if len(chosen) == 1:
        return [tuple(ranges)]
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
    ranges: Sequence[OwnRange],
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
    own = _integers(chain.from_iterable(ranges), len(OwnRange._fields))
    longest = int(own[:, 3].max())
    assert longest <= MOST_POSITIONS
    spec = torch.tensor(
        [
            # Of a branch that no range has, nothing but the length is looked at.
            [min(length, longest), min(rate, MOST_POSITIONS), *each]
            for (length, rate), each in zip(branches, offsets, strict=True)
        ]
    )
    kinds, kind = own[:, 6].unique(return_inverse=True)
    layout = _layout(kinds, spec, block)
    steps = layout.steps[kind]
    made = _programs(own, kind.argsort(stable=True), layout.shortest[kind], steps, block)
    # What there is to do of each residue, and of which a program is.
    most, place = layout.most, layout.starts[kind][made[:, 0]] + made[:, 3]
    if is_causal:
        work = most[place] * (made[:, 2].double() / own[made[:, 0], 1])
        first = (-work).argsort(stable=True)
    else:
        first = (-most)[place].argsort(stable=True)
    table = torch.empty(len(own), len(RANGE_FIELDS), dtype=torch.int64)
    table[:, :4], table[:, 4], table[:, 5] = own[:, :4], own[:, 6], steps
    table[:, 6], table[:, 7] = layout.starts[kind] * len(offsets[0]), (own[:, 6] & stores) > 0
    tables = table, spec, layout.order, made[first]
    on_device = moved_together(device, *(x.int() for x in tables))
    return Programs(
        ranges=on_device[0],
        branches=on_device[1],
        order=on_device[2],
        rows=on_device[3],
        block=block,
        reach=layout.reach,
    )


class _Layout(NamedTuple):
    """How rows are divided among programs, for each kind of the branches that are computed there.

    Attributes:
        shortest: segment length of the branches of a kind.
        steps: of a kind.
        starts: how many residues the kinds before have.
        order: of each kind, KV head by KV head: residues modulo the step, those that see most keys
            first.
        most: of each kind: about how many keys the rows of these see, of any head.
        reach: positions that a block spans at most. Rows are a step apart, and keys a rate, which
            may be more.
    """

    shortest: torch.Tensor
    steps: torch.Tensor
    starts: torch.Tensor
    order: torch.Tensor
    most: torch.Tensor
    reach: int


def _layout(kinds: torch.Tensor, spec: torch.Tensor, block: int) -> _Layout:
    """The layout of all kinds: branches are bits of them, and rows of `spec`."""
    run = (kinds[:, None] >> torch.arange(len(spec)) & 1).bool()
    lengths, rates, offsets = spec[:, 0], spec[:, 1], spec[:, 2:]
    longest = int(lengths.max())
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
        shown = (residues % common == offset % common) & (offset >= 0)
        work += (run[:, branch, None, None] & shown).double() * (length / rate)
    is_one = residues < steps[:, None]
    negative, order = torch.where(is_one[:, None], -work, 1).sort(dim=2, stable=True)
    order = order[is_one[:, None].expand_as(order)]
    most = -negative.amin(1)[is_one]
    shortest = torch.where(run, lengths, longest).amin(1)
    of_keys = torch.minimum(BLOCK_ROWS * rates, lengths)[are_run]
    reach = max(BLOCK_ROWS * max(steps_of_kinds), int(of_keys.max()))
    return _Layout(shortest, steps, steps.cumsum(0) - steps, order, most, reach)


def _programs(
    own: torch.Tensor, order: torch.Tensor, shortest: torch.Tensor, steps: torch.Tensor, block: int
) -> torch.Tensor:
    """The programs of ranges in some order, (programs, 5): cut where the shortest segments are."""
    start, stop = own[:, 4], own[:, 5]
    length = torch.minimum(own[:, 3], shortest)
    first = start // length
    which, segment = spread(((stop + length - 1) // length - first)[order])
    which = order[which]
    length, step = length[which], steps[which]
    begin = (segment + first[which]) * length
    low = torch.maximum(begin, start[which])
    high = torch.minimum(begin + length, stop[which])
    # The most rows of a residue.
    whose, index = spread(((high - low + step - 1) // step + block - 1) // block * step)
    found = torch.stack([which, low, high, step, step], 1)[whose]
    step = found[:, 3].clone()
    found[:, 3], found[:, 4] = index % step, index // step
    return found
