"""What `rda plan --hosts` prints: how long a call would take on several hosts, by a cost model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from rich.console import Console

from ..kernels import H200
from ..plan import costs
from ..terminal import (
    BYTES,
    SECONDS,
    Progress,
    Table,
    amounts,
    counts,
    in_seconds,
    numbers,
    show_table,
    texts,
)
from .sharded import Sharded


class Hosts(NamedTuple):
    """The hosts that a plan is for.

    Attributes:
        number: how many.
        gpus: ranks of each.
        link_gb_s: 10**9 bytes per second that a rank sends inside its host, and receives.
        network_gb_s: the same to and from other hosts.
    """

    number: int
    gpus: int
    link_gb_s: float
    network_gb_s: float


class _Predicted(NamedTuple):
    rank: int
    forward: costs.Prediction
    backward: costs.Prediction

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds


def show_hosts(
    sharded: Sharded, hosts: Hosts, shown: Sequence[int], console: Console
) -> dict[str, Any]:
    """Print predictions for some ranks.

    Args:
        sharded: what is computed; its ranks are those of all hosts.
        hosts: where.
        shown: which ranks.
        console: where to print.

    Returns:
        The same numbers, for JSON.

    Raises:
        ValueError: a rate is not above 0, or none is known for the dtype.
    """
    size = sharded.workload.size
    rates = H200.rates(size, link_gb_s=hosts.link_gb_s, network_gb_s=hosts.network_gb_s)
    host_of = costs.host_of_ranks(hosts.number, hosts.gpus)
    found = []
    with Progress("predict", total=len(shown), unit="ranks") as progress:
        for rank in shown:
            ways = [
                costs.predict(sharded.plan.rank(rank), size, rates, backward=way, hosts=host_of)
                for way in (False, True)
            ]
            found.append(_Predicted(rank, *ways))
            progress.update(len(found))
    seconds = max(x.seconds for x in found)
    share = costs.efficiency(sharded.plan, size, rates, seconds)
    slowest = max(found, key=lambda x: x.seconds)
    console.print(_in_words(slowest, share))
    console.print(f"model, not a measurement: {_assumed(rates)}")
    show_table(console, _table(found))
    return {
        "hosts": hosts.number,
        "gpus_per_host": hosts.gpus,
        "link_gb_s": hosts.link_gb_s,
        "network_gb_s": hosts.network_gb_s,
        "efficiency": share,
        "ranks": [
            {"rank": x.rank, "forward": _document(x.forward), "backward": _document(x.backward)}
            for x in found
        ],
    }


def _in_words(slowest: _Predicted, share: float) -> str:
    forward, backward = slowest.forward, slowest.backward
    limits = [
        f"the host limits {name}"
        for name, way in (("forward", forward), ("backward", backward))
        if way.host > way.device
    ]
    return (
        f"predicted: forward {in_seconds(forward.seconds)}, forward+backward "
        f"{in_seconds(slowest.seconds)} per call, {share:.1%} of the rate of one GPU with a "
        f"sequence as long as a shard{''.join(f'; {limit}' for limit in limits)}"
    )


def _assumed(rates: costs.Rates) -> str:
    return (
        f"H200, {rates.forward.flops / 1e12:.0f} TFLOP/s in long tiles of forward and "
        f"{rates.backward.flops / 1e12:.0f} of backward, "
        f"{rates.inside.bytes_per_second / 1e9:g} GB/s per GPU inside a host, "
        f"{rates.across.bytes_per_second / 1e9:g} between hosts"
    )


def _table(found: Sequence[_Predicted]) -> Table:
    ways = [way for x in found for way in (x.forward, x.backward)]
    names = ["forward", "backward"] * len(found)
    return Table(
        title="Predicted time per call",
        keys=[numbers("rank", [x.rank for x in found for _ in range(2)], "d"),
              texts("direction", names)],
        columns=[
            *amounts(
                [
                    ("call", [x.seconds for x in ways]),
                    ("step", [x.step_seconds for x in ways]),
                    ("compute", [x.compute for x in ways]),
                    ("exposed", [x.exposed for x in ways]),
                    ("CPU", [x.host for x in ways]),
                ],
                SECONDS,
            ),
            counts("steps", [x.steps for x in ways]),
            *amounts(
                [
                    ("inside", [x.inside_bytes for x in ways]),
                    ("across", [x.across_bytes for x in ways]),
                ],
                BYTES,
            ),
        ],
        note="Exposed: compute waits for rows. Inside, across: rows received from the own host and "
        "from others.",
    )  # fmt: skip


def _document(way: costs.Prediction) -> dict[str, Any]:
    return {**asdict(way), "step_seconds": way.step_seconds}
