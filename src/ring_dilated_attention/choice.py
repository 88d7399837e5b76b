"""Which exchange ``"auto"`` takes: the fastest by the cost model, with the rates of an H200.

Every rank predicts the same ranks of the same plan, so that all choose alike; nothing is measured.
"""

from __future__ import annotations

from dataclasses import replace

from .plan import AttentionPlan, costs, head_split

LINK_GB_S, NETWORK_GB_S = 350.0, 45.0
"""Bandwidth of a GPU in 10**9 bytes per second and direction, for the cost model: inside its host,
about that of an H200 over NVLink; to other hosts, 0.9 of an adapter of 400 Gbit/s."""
MOST_TIME = 0.97
"""Most of the time of a ring or gather that heads may take to be chosen: they hold one more copy
of query, key, value and out."""
ROWS = "rows"
"""Exchange of a call: ring or gather, as the plan decides. For users it is a part of ``"auto"``."""


def h200_rates(size: costs.TensorSize) -> costs.Rates:
    """The cost model's constants, of rows of a size that is not float64.

    Fitted to the times of one and two H200 in benchmarks/results/many_gpus_x2.json, in bfloat16 or
    float16 with heads of 128; `host_call` and `host_empty_step` measured on their own: a call of
    two ranks that exchange nothing, and a step without rows; `host_message` is NCCL's. Latencies
    are not measured.
    """
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
        host_message=50e-6,
    )


def predicted(plan: AttentionPlan, size: costs.TensorSize, hosts: int = 1) -> dict[str, float]:
    """Seconds of forward and backward on the busiest rank, by exchange.

    Args:
        plan: of a call on several ranks.
        size: of its tensors; float64 counts as float32.
        hosts: see `costs.predict`.

    Returns:
        Of ``"ring"``, ``"gather"``, and of ``"heads:M"`` for every M that ranks and heads allow.
    """
    size = replace(size, element_size=min(size.element_size, 4))
    rates, work = h200_rates(size), costs.flops_by_rank(plan, size)
    seconds: dict[str, float] = {}
    groups = [x for x in range(2, len(work) + 1) if len(work) % x == 0]
    for exchange in ("ring", "gather", *(f"heads:{ranks}" for ranks in groups)):
        heads = plan.num_heads, plan.num_kv_heads
        try:
            split = head_split(exchange, plan.pattern, plan.layout, *heads)
        except ValueError:  # fewer heads than ranks
            break
        rank = work.index(max(work))
        if split is not None:
            of_groups = [sum(work[x] for x in split.members(i)) for i in range(len(work))]
            members = split.members(of_groups.index(max(of_groups)))
            rank = max(members, key=lambda x: len(split.units_of(x)))
        one = plan.rank(rank)
        seconds[exchange] = sum(
            costs.predict(one, size, rates, backward=x, hosts=hosts, exchange=exchange).seconds
            for x in (False, True)
        )
    return seconds


def choose_exchange(plan: AttentionPlan, size: costs.TensorSize, hosts: int = 1) -> str:
    """What ``exchange="auto"`` takes: `ROWS` or ``"heads:M"``; see `predicted` for arguments."""
    seconds = predicted(plan, size, hosts)
    rows = seconds["gather" if plan.gathers else "ring"]
    best = min(list(seconds)[2:], key=seconds.__getitem__, default=ROWS)
    return best if seconds.get(best, rows) <= MOST_TIME * rows else ROWS
