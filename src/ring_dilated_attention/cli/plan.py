"""`rda plan`: what each rank would compute, hold and receive; nothing is run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from ..layout import SequenceLayout
from ..named_patterns import given_pattern
from ..units import count_of, in_bytes, in_flop, in_seconds
from . import common
from .common import Call, app, integer, make_console, option, show_table, working, write_json

if TYPE_CHECKING:
    from ..plan import RankPlan, costs

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
LINK_GB_S, NETWORK_GB_S = 350.0, 45.0
"""Bandwidth of a GPU in 10**9 bytes per second and direction, for the cost model: inside its host,
about that of an H200 over NVLink; to other hosts, 0.9 of an adapter of 400 Gbit/s."""

# fmt: off
Hosts = Annotated[int | None, option(
    "--hosts", "Predict times, with --ranks on that many hosts of H200 GPUs.", integer(1, 1 << 14))]
Tables = Annotated[bool, option(
    "--tables", "Print tables of exchange and memory too.", kind="")]
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
    call = Call(
        given_pattern(pattern, segment_lengths, dilation_rates),
        seq_len=seq_len,
        ranks=ranks,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        causal=causal,
        layout=layout,
        documents=documents,
    )
    if hosts and ranks % hosts:
        raise ValueError(f"--ranks must be a multiple of --hosts; got {ranks} and {hosts}")
    if check:
        _prove(call)
    shown = [_figures(call, call.plan.rank(rank)) for rank in shown_ranks(ranks)]
    verdict = [*_traffic_in_words(call, shown), *work_in_words(call), *_pattern_in_words(call)]
    if hosts:
        verdict.append(_predict(call, hosts, shown))
    console = make_console(json)
    console.print(f"{call}\n")
    for words in verdict:
        console.print(f"- {words}", style="bold")
    console.print()
    _show(console, shown)
    if tables:
        _show_more(console, shown)
    if check:
        console.print(PROVEN)
    asked = {**call.options, "hosts": hosts}
    write_json(json, {"options": asked, "verdict": verdict, "proven": check, "ranks": shown})


def _prove(call: Call) -> None:
    from ..plan import check_plan, costs

    pairs = costs.enumerated(call.plan)
    if pairs > CHECKED_PAIRS:
        raise ValueError(
            f"--check would enumerate {pairs:,} pairs of positions, more than {CHECKED_PAIRS:,}: "
            "take a shorter --seq-len or fewer --heads"
        )
    check_plan(call.plan)


def shown_ranks(ranks: int) -> Sequence[int]:
    """The ranks that have a row in tables: a few where there are many."""
    if ranks <= SHOWN_ALL:
        return range(ranks)
    return [(ranks - 1) * i // (SHOWN_FEW - 1) for i in range(SHOWN_FEW)]


def _figures(call: Call, rank: RankPlan) -> dict[str, Any]:
    """What tables and JSON say of a rank, in bytes, operations and positions."""
    from ..plan import costs, lower

    held = costs.memory(rank, call.size)
    program = lower(rank, gathers=call.plan.gathers, backward=False)
    return {
        "rank": rank.index,
        "positions": call.layout.local_length(rank.index),
        "flops": costs.flops_by_rank(call.plan, call.size)[rank.index],
        "senders": len({action.receives[0] for action in program if action.receives is not None}),
        "messages": sum(action.sends is not None for action in program),
        "traffic_bytes": asdict(costs.traffic(rank, call.size)),
        "memory_bytes": {**asdict(held), "total": held.total},
    }


def _traffic_in_words(call: Call, shown: Sequence[dict[str, Any]]) -> Iterator[str]:
    received = sorted(x["traffic_bytes"]["forward_received"] for x in shown)
    if call.ranks == 1:
        return
    if any(received):
        who = "each rank" if len(shown) == call.ranks else f"each of {len(shown)} ranks shown"
        senders = sorted(x["senders"] for x in shown)
        ranks = "rank" if senders[-1] == 1 else "ranks"
        way = "all at once" if call.plan.gathers else "step by step around a ring"
        yield (
            f"{who} receives {_from_to(received, in_bytes)} of keys and values from "
            f"{_from_to(senders, '{:,}'.format)} other {ranks} in forward, {way}"
        )
    elif call.ranks > MOST_COUNTED or any(
        call.plan.rank(rank).total_received_rows for rank in range(call.ranks)
    ):
        yield f"nothing travels to ranks {', '.join(str(x['rank']) for x in shown)}"
    else:
        yield "nothing travels: every segment lies on one rank"


def _from_to(values: Sequence[int], in_words: Callable[[int], str]) -> str:
    first, last = in_words(values[0]), in_words(values[-1])
    return first if first == last else f"{first} to {last}"


def work_in_words(call: Call) -> Iterator[str]:
    """Which of several ranks is the busiest."""
    from ..plan import costs

    found = costs.balance(costs.flops_by_rank(call.plan, call.size))
    if call.ranks == 1:
        return
    if found.imbalance < 1.005:
        yield "the work is even"
        return
    text = (
        f"rank {found.largest_rank} is the busiest: {found.imbalance:.2f} times the mean, so that "
        f"{call.ranks:,} ranks are at most {found.speed_up_bound:,.1f} times as fast as one"
    )
    if call.causal and call.layout_name != "zigzag":
        zigzag = replace(call.plan, layout=SequenceLayout.zigzag(call.seq_len, call.ranks))
        even = costs.balance(costs.flops_by_rank(zigzag, call.size)).imbalance
        text += f" (--layout zigzag: {even:.2f} times the mean)"
    yield text


def closed_block(call: Call) -> int | None:
    """The length of the blocks that a pattern never leaves; None: there are no such blocks.

    Where a multiple of all segment lengths ends, so does a segment of every branch, and nothing
    passes that position in any number of layers.
    """
    lengths = [x for x in call.pattern.segment_lengths if x is not None]
    longest = max(stop - start for start, stop in pairwise(call.documents or (0, call.seq_len)))
    block = math.lcm(*lengths)
    is_closed = len(lengths) == len(call.pattern.segment_lengths) and block < longest
    return block if is_closed else None


def _pattern_in_words(call: Call) -> Iterator[str]:
    from ..plan import plan_cache

    block = closed_block(call)
    if block is not None:
        yield (
            f"positions in different blocks of {block:,} never influence each other, in any number "
            "of layers: no segment crosses the end of a block"
        )
    if call.causal:
        cache = plan_cache(call.pattern, call.kv_heads, call.seq_len)
        nbytes = cache.nbytes(1, call.head_dim, call.size.element_size)
        share = nbytes / call.size.key_value_bytes(call.seq_len * call.kv_heads)
        yield f"a KV cache takes {in_bytes(nbytes)} a layer, {share:.1%} of all keys and values"


def h200_rates(size: costs.TensorSize) -> costs.Rates:
    """The cost model's constants, of rows of a size that is not float64.

    Fitted to the times of one and two H200 in benchmarks/results/many_gpus_x2.json, in bfloat16 or
    float16 with heads of 128; `host_call` and `host_empty_step` measured on their own: a call of
    two ranks that exchange nothing, and a step without rows. Latencies are not measured.
    """
    from ..plan import costs

    if size.element_size > 4:
        raise ValueError(
            "the cost model knows no rate of float64; allowed: bfloat16, float16, float32"
        )
    share = 0.064 if size.element_size == 4 else 0.81 if size.head_dim < 128 else 1.0
    compute = costs.ComputeRates
    return costs.Rates(
        forward=compute(flops=657e12 * share, half_keys=340, group_seconds=15e-6, host_step=0.6e-3),
        backward=compute(
            flops=618e12 * share, half_keys=465, group_seconds=60e-6, host_step=0.8e-3
        ),
        inside=costs.Link(bytes_per_second=LINK_GB_S * 1e9, latency=20e-6),
        across=costs.Link(bytes_per_second=NETWORK_GB_S * 1e9, latency=30e-6),
        beside_transfers=1.035,
        host_call=0.3e-3,
        host_empty_step=3e-6,
    )


def _predict(call: Call, hosts: int, shown: Sequence[dict[str, Any]]) -> str:
    """Add predicted times to what is shown of ranks; return those of the slowest, in words."""
    from ..plan import costs

    size, rates, times = call.size, h200_rates(call.size), []
    with working("predict"):
        for figures in shown:
            rank = call.plan.rank(figures["rank"])
            for name in ("forward", "backward"):
                way = costs.predict(rank, size, rates, backward=name == "backward", hosts=hosts)
                figures[name] = asdict(way)
            times.append((figures["forward"]["seconds"], figures["backward"]["seconds"]))
    forward, backward = max(times, key=sum)
    share = costs.efficiency(call.plan, size, rates, forward + backward)
    return (
        f"predicted by a cost model, not measured: forward {in_seconds(forward)}, with backward "
        f"{in_seconds(forward + backward)}, {share:.0%} of the rate of one GPU with a sequence as "
        f"long as a shard ({count_of(hosts, 'host')} of {call.ranks // hosts} H200, "
        f"{LINK_GB_S:g} GB/s per GPU inside a host, {NETWORK_GB_S:g} between hosts)"
    )


def _show(console: Any, shown: Sequence[dict[str, Any]]) -> None:
    headings = ["rank", "positions", "FLOP", "KV received", "from ranks", "memory"]
    ways = [way for way in ("forward", "backward") if way in shown[0]]
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
    show_table(console, "Forward of each rank", [*headings, *ways], rows)


def _show_more(console: Any, shown: Sequence[dict[str, Any]]) -> None:
    ways = ("forward_received", "forward_sent", "backward_received", "backward_sent")
    parts = ("query", "key", "value", "out", "lse", "buffers")

    def table(title: str, headings: list[str], row: Callable[[dict[str, Any]], list[Any]]) -> None:
        show_table(console, title, ["rank", *headings], [[str(x["rank"]), *row(x)] for x in shown])

    table(
        "Exchange: keys and values in forward; in backward their gradients too",
        [*(way.replace("_", " ") for way in ways), "messages"],
        lambda x: [*(in_bytes(x["traffic_bytes"][way]) for way in ways), x["messages"]],
    )
    table(
        "Memory during forward; buffers are keys and values of other ranks",
        list(parts),
        lambda x: [in_bytes(x["memory_bytes"][part]) for part in parts],
    )
