"""Which exchange ``"auto"`` takes: the fastest by the cost model, with the rates of an H200.

Every rank predicts the same ranks of the same plan, so that all choose alike; nothing is measured.
"""

from __future__ import annotations

from functools import partial

from .plan import AttentionPlan, costs, head_split

LINK_GB_S, NETWORK_GB_S = 232.0, 45.0
"""Bandwidth of a GPU in 10**9 bytes per second and direction, for the cost model: inside its host,
what NCCL moves between two H200; to other hosts, 0.9 of an adapter of 400 Gbit/s."""
MOST_TIME = 0.97
"""Most of the time of a ring or gather that heads may take to be chosen: they hold one more copy
of query, key, value and out."""
ROWS = "rows"
"""Exchange of a call: ring or gather, as the plan decides. For users it is a part of ``"auto"``."""


def h200_rates(size: costs.TensorSize) -> costs.Rates:
    """The cost model's constants; float64, of which no rate is known, counts as float32.

    Fitted to the times of one and two H200 in benchmarks/results/many_gpus_x2.json, in bfloat16 or
    float16 with heads of 128; `host_call` and `host_empty_step` measured on their own: a call of
    two ranks that exchange nothing, and a step without rows; `host_message` is NCCL's. Latencies
    are not measured.
    """
    share = 0.064 if size.element_size > 2 else 0.81 if size.head_dim < 128 else 1.0
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
        host_message=50e-6,
    )


def predicted(
    plan: AttentionPlan, size: costs.TensorSize, hosts: int = 1, *, search: bool = False
) -> dict[str, float]:
    """Seconds of forward and backward on the busiest rank, by exchange.

    First of what the plan decides, ``"ring"`` or ``"gather"``; of the other, unless this is a
    `search`, which ends once smaller groups take longer; and of ``"heads:M"``. For `hosts` see
    `costs.predict`.
    """
    rates, work = h200_rates(size), costs.flops_by_rank(plan, size)
    ways = ["gather", "ring"] if plan.gathers else ["ring", "gather"]
    groups = [x for x in range(len(work), 1, -1) if len(work) % x == 0]
    seconds: dict[str, float] = {}
    for exchange in (*ways[: 2 - search], *(f"heads:{ranks}" for ranks in groups)):
        heads = plan.num_heads, plan.num_kv_heads
        try:
            split = head_split(exchange, plan.pattern, plan.layout, *heads)
        except ValueError:  # fewer heads than ranks
            continue
        rank = work.index(max(work))
        if split is not None:
            of_groups = [sum(work[i : i + split.ranks]) for i in range(0, len(work), split.ranks)]
            members = split.members(of_groups.index(max(of_groups)) * split.ranks)
            rank = max(members, key=lambda x: len(split.units_of(x)))
        predict = partial(costs.predict, plan.rank(rank), size, rates, hosts=hosts)
        both = (predict(backward=backward, exchange=exchange) for backward in (False, True))
        seconds[exchange] = sum(each.seconds for each in both)
        if search and len(seconds) > 2 and seconds[exchange] > min(list(seconds.values())[1:]):
            break
    return seconds


def choose_exchange(plan: AttentionPlan, size: costs.TensorSize, hosts: int = 1) -> str:
    """What ``exchange="auto"`` takes: `ROWS` or ``"heads:M"``; see `predicted` for arguments."""
    seconds = predicted(plan, size, hosts, search=True)
    best = min([*seconds][1:], key=seconds.__getitem__, default=ROWS)
    rows = next(iter(seconds.values()))
    return best if seconds.get(best, rows) <= MOST_TIME * rows else ROWS
