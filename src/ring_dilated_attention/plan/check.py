"""A proof, by enumeration, that a plan is right: for tests and small plans.

It expands every tile and message of every rank to positions and compares them with the definition
of the pattern, so its cost is the number of (branch, head, query, key) quadruples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from .attention import AttentionPlan, Step
from .rows import Message, Rows, Tile, TileGroup

TOLD_EVERY = 50_000
"""Quadruples between two reports of how far `check_plan` is: about a tenth of a second."""


class PlanError(AssertionError):
    """A plan that does not compute what its pattern means."""


class _Counted(Counter[tuple[int, int, int, int]]):
    """Quadruples that are counted, and how many in all: `told` hears of it now and then."""

    def __init__(self, told: Callable[[int], None] | None, done: int = 0) -> None:
        super().__init__()
        self.told, self.done = told, done

    def add(self, quadruples: Iterable[tuple[int, int, int, int]]) -> None:
        rest = iter(quadruples)
        while chunk := list(islice(rest, TOLD_EVERY)):
            self.update(chunk)
            self.done += len(chunk)
            if self.told is not None:
                self.told(self.done)


def check_plan(plan: AttentionPlan, *, told: Callable[[int], None] | None = None) -> None:
    """Prove over all ranks that `plan` is complete, consistent and minimal.

    - Each (branch, KV head, query, visible key) is computed exactly once, on the query's rank.
    - What a rank sends at a step is what its peer receives there, rows in the same slots.
    - A message holds each (row, head) that the receiver's queries need once and no other, so the
      bytes moved are the lower bound; a message of nothing is not sent.
    - Every key a tile reads is the computing rank's own, or in the message of the same step, whose
      rows the sender owns: so each remote gradient, sent back the same way, reaches its owner.
    - Tiles of a group share no query row of a head and no key row; where the plan says that its
      first group covers, that one has every row of every head as query and as key.
    - Each (branch, KV head, query) is given, by its rank, the zero keys of its cell.

    Args:
        plan: of all ranks.
        told: called now and then with how many of `proof_steps` are done; None: nobody is told.

    Raises:
        PlanError: the first violation found.
    """
    layout = plan.layout
    held = [
        [position for start, stop in ranges for position in range(start, stop)]
        for ranges in layout.ranges
    ]
    computed = _Counted(told)
    zeros: Counter[tuple[int, int, int]] = Counter()
    for rank in range(layout.world_size):
        rank_plan = plan.rank(rank)
        num_rows = len(held[rank]) * plan.num_kv_heads
        for number, group in enumerate(rank_plan.local_groups):
            rows = num_rows if rank_plan.covers and number == 0 else None
            _check_group(group, rows)
        for tile in rank_plan.local:
            computed.add(_quadruples(tile, held[rank], dict.fromkeys(tile.heads, held[rank])))
        zeros.update(_zero_keys(rank_plan.zero_keys, held[rank]))
        received = 0
        for step in rank_plan.steps():
            sender = (rank - step.step) % layout.world_size
            mirror = plan.rank(sender).step(step.step, step.piece)
            if step.receive != mirror.send:
                raise PlanError(
                    f"step {step.step}: rank {rank} receives {step.receive}, "
                    f"but rank {sender} sends {mirror.send}"
                )
            received += _check_step(plan, step, held, computed)
        if received != rank_plan.total_received_rows:
            raise PlanError(f"rank {rank}: {rank_plan.total_received_rows=}, expected {received}")
    expected = _Counted(told, computed.done)
    expected.add(_expected(plan))
    _compare(computed, expected)
    _compare_zero_keys(zeros, _expected_zero_keys(plan))


def check_replicated(plan: AttentionPlan, positions: range) -> None:
    """Prove over all ranks that `replicated_groups` of `positions` is complete and consistent.

    - Each (branch, KV head, query at `positions`, visible key) is computed exactly once, by the
      rank that holds the key.
    - Tiles of a group share no query row of a head and no key row, and are all causal or none.
    - Each (branch, KV head, query at `positions`) is given the zero keys of its cell.

    Raises:
        PlanError: the first violation found.
    """
    computed: Counter[tuple[int, int, int, int]] = Counter()
    for rank, ranges in enumerate(plan.layout.ranges):
        held = [position for start, stop in ranges for position in range(start, stop)]
        for group in plan.replicated_groups(positions, rank):
            _check_group(group, None)
            if len({tile.is_causal for tile in group.tiles}) > 1:
                raise PlanError(f"some tiles of a group are causal, some are not: {group.tiles}")
            for tile in group.tiles:
                keys = dict.fromkeys(tile.heads, held)
                computed.update(_quadruples(tile, list(positions), keys))
    _compare(computed, Counter(x for x in _expected(plan) if x[2] in positions))
    expected = {x: n for x, n in _expected_zero_keys(plan).items() if x[2] in positions}
    _compare_zero_keys(_zero_keys(plan.replicated_zero_keys(positions), positions), expected)


def _compare(
    computed: Counter[tuple[int, int, int, int]], expected: Counter[tuple[int, int, int, int]]
) -> None:
    if computed != expected:
        missing, extra = expected - computed, computed - expected
        raise PlanError(
            f"(branch, head, query, key): {missing.total()} missing {list(missing)[:3]}, "
            f"{extra.total()} too many {list(extra)[:3]}"
        )


def _zero_keys(
    groups: Iterable[TileGroup], positions: Sequence[int]
) -> Counter[tuple[int, int, int]]:
    """Zero keys that each (branch, KV head, query) is given."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for tile in (tile for group in groups for tile in group.tiles):
        for segment in range(tile.segments):
            rows = _expand(tile.queries, len(tile.heads), segment)
            for head, head_rows in zip(tile.heads, rows, strict=True):
                for row in head_rows:
                    counts[tile.branch, head, positions[row]] += tile.keys.length
    return counts


def _expected_zero_keys(plan: AttentionPlan) -> dict[tuple[int, int, int], int]:
    expected = {}
    if plan.is_causal or not plan.pattern.zero_keys:
        return {}
    for branch, (length, rate) in enumerate(plan.pattern.branches):
        for start, stop in zip(plan.documents, plan.documents[1:], strict=False):
            w = min(stop - start if length is None else length, stop - start)
            for segment in range(start, stop, w):
                for head, offset in plan.pattern.heads(branch, plan.num_kv_heads):
                    padded = range(segment + offset, segment + -(-w // rate) * rate, rate)
                    real = [place for place in padded if place < min(segment + w, stop)]
                    for place in real:
                        expected[branch, head, place] = len(padded) - len(real)
    return {x: count for x, count in expected.items() if count}


def _compare_zero_keys(
    given: Mapping[tuple[int, int, int], int], expected: Mapping[tuple[int, int, int], int]
) -> None:
    if given != expected:
        wrong = [x for x in {**given, **expected} if given.get(x) != expected.get(x)]
        raise PlanError(
            f"zero keys of (branch, head, query): {len(wrong)} wrong, such as {wrong[0]}: "
            f"{given.get(wrong[0], 0)}, expected {expected.get(wrong[0], 0)}"
        )


def _check_step(
    plan: AttentionPlan,
    step: Step,
    held: list[list[int]],
    computed: _Counted,
) -> int:
    message = step.receive
    if message is None:
        if step.tiles:
            raise PlanError(f"step {step.step} computes tiles but receives nothing: {step.tiles}")
        return 0
    for group in step.groups:
        _check_group(group, None)
    slots = _slot_positions(message, held[message.sender])
    needed: set[tuple[int, int]] = set()
    for tile in step.tiles:
        if tile.is_causal:
            raise PlanError(f"a tile with remote keys is diagonal: {tile}")
        positions = {head: [p for _, p in slots] for head in tile.heads}
        quadruples = list(_quadruples(tile, held[message.receiver], positions))
        computed.add(quadruples)
        needed.update((head, key) for _, head, _, key in quadruples)
        for head, row in zip(tile.heads, _expand(tile.keys, len(tile.heads)), strict=True):
            if any(slots[slot][0] != head for slot in row):
                raise PlanError(f"head {head} reads another head's slots: {tile}")
    if needed != set(slots) or len(needed) != message.rows or message.rows == 0:
        raise PlanError(f"{message} carries {len(set(slots))} rows, {len(needed)} are needed")
    return message.rows


def _check_group(group: TileGroup, num_rows: int | None) -> None:
    for name in ("queries", "keys"):
        rows = Counter(
            (head, row)
            for tile in group.tiles
            for segment in range(tile.segments)
            for head, rows in zip(
                tile.heads, _expand(getattr(tile, name), len(tile.heads), segment), strict=True
            )
            for row in rows
        )
        if max(rows.values()) > 1:
            raise PlanError(f"tiles of a group share {name}: {group.tiles}")
        if num_rows is not None and len(rows) != num_rows:
            raise PlanError(f"the first group has {len(rows)} {name}, not all {num_rows}")


def _slot_positions(message: Message, sender_positions: list[int]) -> list[tuple[int, int]]:
    slots: list[tuple[int, int]] = []
    for run in message.runs:
        if run.slot != len(slots):
            raise PlanError(f"run {run} does not start at slot {len(slots)}")
        for head, rows in zip(run.heads, _expand(run.rows, len(run.heads)), strict=True):
            slots.extend((head, sender_positions[row]) for row in rows)
    if len(slots) != message.slots:
        raise PlanError(f"{message} fills {len(slots)} slots")
    return slots


def _expand(rows: Rows, heads: int, segment: int = 0) -> list[range]:
    start = rows.start + segment * rows.segment_stride
    return (
        [
            range(first, first + rows.length * rows.stride, rows.stride)
            for first in range(start, start + heads * rows.head_stride, rows.head_stride)
        ]
        if rows.head_stride
        else [range(start, start + rows.length * rows.stride, rows.stride)] * heads
    )


def _quadruples(
    tile: Tile, queries: list[int], keys: dict[int, list[int]]
) -> Iterator[tuple[int, int, int, int]]:
    for segment in range(tile.segments):
        query_rows = _expand(tile.queries, len(tile.heads), segment)
        key_rows = _expand(tile.keys, len(tile.heads), segment)
        for head, q_rows, k_rows in zip(tile.heads, query_rows, key_rows, strict=True):
            for i, q in enumerate(q_rows):
                for k in k_rows[: i + 1] if tile.is_causal else k_rows:
                    yield tile.branch, head, queries[q], keys[head][k]


def _expected(plan: AttentionPlan) -> Iterator[tuple[int, int, int, int]]:
    for branch, (length, rate) in enumerate(plan.pattern.branches):
        for start, stop in zip(plan.documents, plan.documents[1:], strict=False):
            w = stop - start if length is None else length
            for segment in range(start, stop, w):
                for head, offset in plan.pattern.heads(branch, plan.num_kv_heads):
                    cell = range(segment + offset, min(segment + w, stop), rate)
                    for q in cell:
                        for k in cell:
                            if k <= q or not plan.is_causal:
                                yield branch, head, q, k
