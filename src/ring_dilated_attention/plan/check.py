"""A proof, by enumeration, that a plan is right: for tests and small plans.

It expands every tile and message of every rank to positions and compares them with the definition
of the pattern, so its cost is the number of (branch, head, query, key) quadruples.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product

from .attention import AttentionPlan, RankPlan, Step
from .program import Action, Program, lower
from .rows import Message, Rows, Tile, TileGroup


class PlanError(AssertionError):
    """A plan that does not compute what its pattern means."""


def check_plan(plan: AttentionPlan) -> None:
    """Prove over all ranks that `plan` is complete, consistent and minimal, as ring and as gather.

    - Each (branch, KV head, query, visible key) is computed exactly once, on the query's rank.
    - Messages between two ranks are the same for both, in the same order, and no rank waits for one
      that waits for it: the programs of all ranks are run to their ends.
    - A message holds each (row, head) that the receiver's queries need once and no other, so the
      bytes moved are the lower bound; a message of nothing is not sent.
    - Every key a tile reads is the computing rank's own, or in the message that it has received
      last, whose rows the sender owns: so each remote gradient, sent back the same way, reaches its
      owner, who adds it.
    - Tiles of a group share no query row of a head and no key row; where the plan says that its
      first group covers, that one has every row of every head as query and as key.
    - Each (branch, KV head, query) is given, by its rank, the zero keys of its cell.

    Raises:
        PlanError: the first violation found.
    """
    ranks = list(map(plan.rank, range(plan.layout.world_size)))
    held = [list(chain(*(range(*each) for each in x))) for x in plan.layout.ranges]
    expected = Counter(_expected(plan))
    known: dict[tuple[RankPlan, ...], Counter[tuple[int, int, int, int]]] = {}
    for gathers, backward in product((True, False), repeat=2):
        computed: Counter[tuple[int, int, int, int]] = Counter()
        programs = [lower(rank, gathers=gathers, backward=backward) for rank in ranks]
        for rank, program in zip(ranks, programs, strict=True):
            rounds = rank.rounds(gathers=gathers)
            _check_program(program, rounds, backward)
            if rounds not in known:
                known[rounds] = _computed(rounds, held)
            computed += known[rounds]
        _compare(computed, expected)
        _run_together(programs)
    zeros: Counter[tuple[int, int, int]] = Counter()
    for rank in ranks:
        zeros.update(_zero_keys(rank.zero_keys, held[rank.index]))
    _compare_zero_keys(zeros, _expected_zero_keys(plan))


def _computed(
    rounds: Sequence[RankPlan], held: list[list[int]]
) -> Counter[tuple[int, int, int, int]]:
    """The quadruples that a rank computes in its rounds, whose tiles and messages are checked."""
    computed: Counter[tuple[int, int, int, int]] = Counter()
    for one in rounds:
        own = held[one.index]
        for number, group in enumerate(one.local_groups):
            _check_group(group, one.held_rows if one.covers and number == 0 else None)
        for tile in one.local:
            computed.update(_quadruples(tile, own, dict.fromkeys(tile.heads, own)))
        received = sum(_check_step(step, held, computed) for step in one.steps())
        if received != one.total_received_rows:
            raise PlanError(f"rank {one.index}: {one.total_received_rows=}, expected {received}")
    return computed


def _check_program(program: Program, rounds: Sequence[RankPlan], backward: bool) -> None:
    """That a program does all that the plan of its rank says, each thing once, and in order."""
    to_compute = Counter(id(x) for one in rounds for x in one.local_groups)
    to_compute.update(id(x) for one in rounds for step in one.steps() for x in step.groups)
    to_compute.subtract(id(group) for action in program for group in action.groups)
    if any(to_compute.values()):
        raise PlanError(f"a group is not computed once:\n{program}")
    done: dict[str, list[Step | None]] = {}
    for action in program:
        done.setdefault(action.kind, []).append(action.step)
        if action.kind == "tiles" and action.step is not None:
            if done.get("wait", [None])[-1] is not action.step:
                raise PlanError(f"{action} computes what has not arrived last:\n{program}")
        elif action.kind == "return" and action.step is not done.get("wait", [None])[-1]:
            raise PlanError(f"{action} returns what has not arrived last:\n{program}")
    moved = [step for one in rounds for step in one.steps() if step.moves]
    kinds = ("fetch", "wait", "return", "add") if backward else ("fetch", "wait")
    if any(list(map(id, done.get(kind, []))) != list(map(id, moved)) for kind in kinds):
        raise PlanError(f"not every message is started and waited for, in order:\n{program}")


def _run_together(programs: Sequence[Program]) -> None:
    """Run the programs of all ranks: each waits until what it waits for has been sent to it."""
    sent: dict[tuple[int, int], list[tuple[str, int, object]]] = {}
    received: Counter[tuple[int, int]] = Counter()
    awaited: list[dict[str, deque[Callable[[], bool]]]] = [
        {"wait": deque(), "add": deque()} for _ in programs
    ]

    def start(rank: int, action: Action) -> None:
        """Send what it sends, and note when what it receives will be there."""
        step, is_fetch = action.step, action.kind == "fetch"
        assert step is not None
        # Of rows that travel both ends know the runs.
        outward, inward = (step.send, step.receive) if is_fetch else (step.receive, step.send)
        if action.sends is not None and outward is not None:
            given = action.kind, action.sends[1], outward
            sent.setdefault((rank, action.sends[0]), []).append(given)
        key, expected = None, None
        if action.receives is not None and inward is not None:
            key, expected = (action.receives[0], rank), (action.kind, action.receives[1], inward)
            received[key] += 1
        place = received[key] - 1 if key is not None else 0

        def is_there() -> bool:
            if key is None:
                return True
            there = sent.get(key, [])
            if place < len(there) and there[place] != expected:
                raise PlanError(f"rank {rank} receives {expected}, but {there[place]} is sent")
            return place < len(there)

        awaited[rank]["wait" if is_fetch else "add"].append(is_there)

    at, before = [0] * len(programs), None
    while at != before:
        before = list(at)
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                action = program[at[rank]]
                if action.kind in ("fetch", "return"):
                    start(rank, action)
                elif action.kind in ("wait", "add"):
                    if not awaited[rank][action.kind]:
                        raise PlanError(f"rank {rank} waits for a message before it is started")
                    if not awaited[rank][action.kind][0]():
                        break
                    awaited[rank][action.kind].popleft()
                at[rank] += 1
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            raise PlanError(f"rank {rank} waits for ever at {program[at[rank]]}")
    for (rank, other), messages in sent.items():
        if len(messages) != received[rank, other]:
            raise PlanError(f"rank {other} does not receive all that rank {rank} sends it")


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
    step: Step, held: list[list[int]], computed: Counter[tuple[int, int, int, int]]
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
        computed.update(quadruples)
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
