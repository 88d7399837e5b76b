"""`rda plan`: what each rank would compute, hold and receive; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from ..layout import SequenceLayout, resolve_layout
from ..named_patterns import given_pattern, named
from ..units import count_of, in_bytes, in_flop, in_seconds
from . import common
from .common import app, integer, make_console, option, show_table, working, workload_of, write_json

if TYPE_CHECKING:
    from ..plan import AttentionPlan, RankPlan, costs

SHOWN_ALL, SHOWN_FEW = 16, 4
"""Of at most SHOWN_ALL ranks all are shown, of more SHOWN_FEW."""
MOST_COUNTED = 256
"""With at most this many ranks, each is checked for received KV rows."""
CHECKED_PAIRS = 2_000_000
"""Most (query, key) pairs that --check enumerates: about 1 GB and 4 seconds."""
PROVEN = (
    "proven: every (branch, head, query, visible key) is computed once; sends match receives; "
    "each message has the fewest rows; every gradient is returned to its owner"
)
SPANNING = "; --pattern geometric continues LongNet's series until a segment spans the sequence"

# fmt: off
Hosts = Annotated[int | None, option(
    "--hosts", "Predict times, with --ranks on that many hosts of H200 GPUs.", integer(1, 1 << 14))]
Tables = Annotated[bool, option("--tables", "Print tables of exchange and memory too.", kind="")]
Check = Annotated[bool, option(
    "--check", "Prove the plan of a short sequence by enumerating all pairs.", kind="")]
# fmt: on


@app.command()
def plan(
    pattern: common.PatternName = None,
    segment_lengths: common.SegmentLengths = None,
    dilation_rates: common.DilationRates = None,
    seq_len: common.SeqLen = 8192,
    ranks: common.Ranks = 4,
    hosts: Hosts = None,
    layout: common.LayoutName = "auto",
    causal: common.Causal = False,
    documents: common.Documents = None,
    heads: common.Heads = None,
    kv_heads: common.KVHeads = None,
    head_dim: common.HeadDim = None,
    tables: Tables = False,
    check: Check = False,
    json: common.Json = None,
) -> None:
    """Say what travels between ranks and who computes how much; nothing is run.

    rda plan --seq-len 1M --ranks 8 --causal

    rda plan --pattern dense --seq-len 1G --ranks 4096 --hosts 512
    """
    work = workload_of(
        given_pattern(pattern, segment_lengths, dilation_rates, seq_len=seq_len),
        seq_len=seq_len,
        heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        is_causal=causal,
        layout_name=resolve_layout(layout, ranks, is_causal=causal),
        documents=documents,
    )
    planned, size = work.plan(ranks), work.size
    if hosts and ranks % hosts:
        raise ValueError(f"--ranks must be a multiple of --hosts; got {ranks} and {hosts}")
    if check:
        _prove(planned)
    shown = [_figures(planned, planned.rank(x), size) for x in shown_ranks(ranks)]
    verdict = [
        *_traffic_in_words(planned, shown),
        *work_in_words(planned, size),
        *_pattern_in_words(planned, size),
    ]
    if 1 < ranks <= MOST_COUNTED:
        verdict.append(_choice_in_words(planned, size, hosts or 1))
    if hosts:
        verdict.append(_predict(planned, size, hosts, shown))
    console = make_console(json)
    console.print(f"{work}, on {count_of(ranks, 'rank')} ({work.layout_name})\n")
    for words in verdict:
        console.print(f"- {words}", style="bold")
    console.print()
    for table in _tables(shown, more=tables):
        show_table(console, *table)
    if check:
        console.print(PROVEN)
    asked = {**asdict(work), "ranks": ranks, "hosts": hosts}
    write_json(json, {"options": asked, "verdict": verdict, "proven": check, "ranks": shown})


def _prove(plan: AttentionPlan) -> None:
    from ..plan import check_plan, costs

    pairs = costs.enumerated(plan)
    if pairs > CHECKED_PAIRS:
        raise ValueError(
            f"--check would enumerate {pairs:,} pairs of positions, more than {CHECKED_PAIRS:,}: "
            "take a shorter --seq-len or fewer --heads"
        )
    check_plan(plan)


def shown_ranks(ranks: int) -> Sequence[int]:
    """The ranks that have a row in tables: a few where there are many."""
    if ranks <= SHOWN_ALL:
        return range(ranks)
    return [(ranks - 1) * i // (SHOWN_FEW - 1) for i in range(SHOWN_FEW)]


def _figures(plan: AttentionPlan, rank: RankPlan, size: costs.TensorSize) -> dict[str, Any]:
    """The figures of a rank in tables and JSON: bytes, operations and positions."""
    from ..plan import costs, lower

    held = costs.memory(rank, size)
    program = lower(rank, gathers=plan.gathers, backward=False)
    return {
        "rank": rank.index,
        "positions": plan.layout.local_length(rank.index),
        "flops": costs.flops_by_rank(plan, size)[rank.index],
        "senders": len({action.receives[0] for action in program if action.receives is not None}),
        "messages": sum(action.sends is not None for action in program),
        "traffic_bytes": asdict(costs.traffic(rank, size)),
        "memory_bytes": {**asdict(held), "total": held.total},
    }


def _traffic_in_words(plan: AttentionPlan, shown: Sequence[dict[str, Any]]) -> Iterator[str]:
    received = sorted(x["traffic_bytes"]["forward_received"] for x in shown)
    count = plan.layout.world_size
    if count == 1:
        return
    if any(received):
        who = "each rank" if len(shown) == count else f"each of {len(shown)} ranks shown"
        senders = sorted(x["senders"] for x in shown)
        ranks = "rank" if senders[-1] == 1 else "ranks"
        way = "all at once" if plan.gathers else "step by step around a ring"
        yield (
            f"{who} receives {_from_to(received, in_bytes)} of keys and values from "
            f"{_from_to(senders, '{:,}'.format)} other {ranks} in forward, {way}"
        )
    elif count > MOST_COUNTED or any(plan.rank(rank).total_received_rows for rank in range(count)):
        yield f"nothing travels to ranks {', '.join(str(x['rank']) for x in shown)}"
    else:
        yield "nothing travels: every segment lies on one rank"


def _from_to(values: Sequence[int], in_words: Callable[[int], str]) -> str:
    first, last = in_words(values[0]), in_words(values[-1])
    return first if first == last else f"{first} to {last}"


def work_in_words(plan: AttentionPlan, size: costs.TensorSize) -> Iterator[str]:
    """Which of several ranks is the busiest."""
    from ..plan import costs

    found, ranks = costs.balance(costs.flops_by_rank(plan, size)), plan.layout.world_size
    if ranks == 1:
        return
    if found.imbalance < 1.005:
        yield "the work is even"
        return
    text = (
        f"rank {found.largest_rank} is the busiest: {found.imbalance:.2f} times the mean, so that "
        f"{ranks:,} ranks are at most {ranks / found.imbalance:,.1f} times as fast as one"
    )
    zigzag = SequenceLayout.zigzag(plan.layout.length, ranks)
    if plan.is_causal and plan.layout != zigzag:
        even = costs.balance(costs.flops_by_rank(replace(plan, layout=zigzag), size)).imbalance
        text += f" (--layout zigzag: {even:.2f} times the mean)"
    yield text


def closed_block(plan: AttentionPlan) -> int | None:
    """The length of the blocks that a pattern never leaves; None: there are no such blocks.

    Where a multiple of all segment lengths ends, so does a segment of every branch, and nothing
    passes that position in any number of layers.
    """
    lengths = [x for x in plan.pattern.segment_lengths if isinstance(x, int)]
    longest = max(stop - start for start, stop in pairwise(plan.documents))
    block = math.lcm(*lengths)
    is_closed = len(lengths) == len(plan.pattern.segment_lengths) and block < longest
    return block if is_closed else None


def _pattern_in_words(plan: AttentionPlan, size: costs.TensorSize) -> Iterator[str]:
    from ..plan import plan_cache

    block = closed_block(plan)
    if block is not None:
        yield (
            f"positions in different blocks of {block:,} never influence each other, in any number "
            "of layers: no segment crosses the end of a block"
            + (SPANNING if plan.pattern == named("longnet").pattern else "")
        )
    if plan.is_causal:
        length, heads = plan.layout.length, plan.num_kv_heads
        cache = plan_cache(plan.pattern, heads, length)
        nbytes = cache.nbytes(1, size.head_dim, size.element_size)
        share = nbytes / size.key_value_bytes(length * heads)
        yield f"a KV cache takes {in_bytes(nbytes)} a layer, {share:.1%} of all keys and values"


def _choice_in_words(plan: AttentionPlan, size: costs.TensorSize, hosts: int) -> str:
    """What ``exchange="auto"`` takes, and why."""
    from ..choice import ROWS, choose_exchange, predicted

    seconds, taken = predicted(plan, size, hosts), choose_exchange(plan, size, hosts)
    taken = next(iter(seconds)) if taken == ROWS else taken
    others = (f"{way} {in_seconds(each)}" for way, each in seconds.items() if way != taken)
    return (
        f'exchange="auto" takes {taken}: forward and backward {in_seconds(seconds[taken])} on the '
        f"busiest of {count_of(plan.layout.world_size, 'H200')}, predicted by a cost model; "
        + ", ".join(others)
    )


def _predict(
    plan: AttentionPlan, size: costs.TensorSize, hosts: int, shown: Sequence[dict[str, Any]]
) -> str:
    """Add predicted times to the figures of ranks; return those of the slowest, in words."""
    from ..choice import LINK_GB_S, NETWORK_GB_S, h200_rates
    from ..plan import costs

    rates, times = h200_rates(size), []
    with working("predict"):
        for figures in shown:
            rank = plan.rank(figures["rank"])
            for name in ("forward", "backward"):
                found = costs.predict(rank, size, rates, backward=name == "backward", hosts=hosts)
                figures[name] = asdict(found)
            times.append((figures["forward"]["seconds"], figures["backward"]["seconds"]))
    forward, backward = max(times, key=sum)
    share = costs.efficiency(plan, size, rates, forward + backward)
    return (
        f"predicted by a cost model, not measured: forward {in_seconds(forward)}, with backward "
        f"{in_seconds(forward + backward)}, {share:.0%} of the rate of one GPU with a sequence as "
        f"long as a shard ({count_of(hosts, 'host')} of "
        f"{plan.layout.world_size // hosts} H200, "
        f"{LINK_GB_S:g} GB/s per GPU inside a host, {NETWORK_GB_S:g} between hosts)"
    )


def _tables(
    shown: Sequence[dict[str, Any]], *, more: bool
) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
    """Titles, headings and rows: of forward; and with `more` of exchange and memory."""
    ways = [way for way in ("forward", "backward") if way in shown[0]]
    figures = ["positions", "FLOP", "KV received", "from ranks", "memory"]
    rows = [
        [
            str(x["rank"]),
            x["positions"],
            in_flop(x["flops"]),
            in_bytes(x["traffic_bytes"]["forward_received"]),
            x["senders"],
            in_bytes(x["memory_bytes"]["total"]),
            *(in_seconds(x[way]["seconds"]) for way in ways),
        ]
        for x in shown
    ]
    yield "Forward of each rank", ["rank", *figures, *ways], rows
    details = {
        "traffic_bytes": "Exchange: keys and values in forward; in backward their gradients too",
        "memory_bytes": "Memory during forward; buffers are keys and values of other ranks",
    }
    for name, title in details.items() if more else ():
        headings = [part.replace("_", " ") for part in shown[0][name]]
        rows = [[str(x["rank"]), *map(in_bytes, x[name].values())] for x in shown]
        yield title, ["rank", *headings], rows
