"""The cost model beside measured speed-ups, and what it predicts for many hosts of GPUs.

    python benchmarks/many_hosts.py --out benchmarks/results/many_hosts.json

Runs on any computer: it needs no GPU. The measured times are those of many_gpus_x2.json and
many_gpus_x4.json, beside the results page. It also times what a first call plans on one of 4,096
ranks.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from ring_dilated_attention import AttentionPlan, DilatedPattern, SequenceLayout, plan_attention
from ring_dilated_attention.kernels import H200
from ring_dilated_attention.plan import costs

RESULTS = Path(__file__).parent / "results"
FITTED, HELD_OUT = "many_gpus_x2.json", "many_gpus_x4.json"
"""The constants were fitted to the first; the second had no part in that."""
SHORT = 262_144
"""Tokens of the two-branch pattern of heads of 64 below which the CPU decides, not the GPU."""
INSIDE_GB_S, ACROSS_GB_S = 350.0, 45.0
GPUS = (1, 2, 4, 8, 64, 512, 4096)
PER_HOST, PER_GPU = 8, 262_144
LONGNET = ((2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12))
CROSSING = ((2048, 1), (16_384, 8), (131_072, 64), (None, 512))
PREDICTED: dict[str, tuple[tuple[tuple[int | None, int], ...], int, bool]] = {
    "LongNet": (LONGNET, 12, False),
    "LongNet + (all, 65536), causal": ((*LONGNET, (None, 65_536)), 12, True),
    "crossing": (CROSSING, 12, False),
    "dense causal": (((None, 1),), 16, True),
}
"""Branches, heads and whether it is causal."""
PLANS: dict[str, tuple[tuple[tuple[int | None, int], ...], int]] = {
    "LongNet + (all, 65536)": ((*LONGNET, (None, 65_536)), 12),
    "dense": (((None, 1),), 16),
}
"""What a first call plans: branches and heads."""
PLANNED = 7
"""Times, each anew."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured speed-up and the model's.

    Attributes:
        file: where it was measured.
        case: pattern, tokens and dtype.
        gpus: how many.
        backward: whether with backward.
        measured: time of one GPU over that of `gpus`; with as many tokens per GPU, under "weak".
        predicted: the model's.
    """

    file: str
    case: str
    gpus: int
    backward: bool
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """By what share the model's is too high."""
        return self.predicted / self.measured - 1


def seconds(
    plan: AttentionPlan, size: costs.TensorSize, *, backward: bool, per_host: int, across: float
) -> float:
    """A call on the slowest of up to four ranks."""
    rates = H200.rates(size, link_gb_s=INSIDE_GB_S, network_gb_s=across)
    ranks = plan.layout.world_size
    hosts = costs.host_of_ranks(-(-ranks // per_host), per_host)[:ranks]
    ways = (False, True) if backward else (False,)
    shown = {(ranks - 1) * i // 3 for i in range(4)}
    return max(
        sum(costs.predict(plan.rank(r), size, rates, backward=w, hosts=hosts).seconds for w in ways)
        for r in shown
    )


def compared() -> Iterator[Row]:
    """Every measured speed-up of this library where the GPU decides how long a call takes."""
    for file in (FITTED, HELD_OUT):
        for table, found in json.loads((RESULTS / file).read_text())["tables"].items():
            rows = found["results"] if isinstance(found, dict) else found
            for row in rows:
                case = row["case"]
                is_short = table == "earlier" and case["length"] < SHORT
                if row["contender"] == "ours" and row["ranks"] > 1 and not is_short:
                    yield from _rows(file, table, row)


def _rows(file: str, table: str, row: dict[str, Any]) -> Iterator[Row]:
    case, gpus = row["case"], row["ranks"]
    length = case["length"] // gpus if row["scaling"] == "weak" else case["length"]
    element_size = 2 if case["dtype"] == "bfloat16" else 4
    size = costs.TensorSize(batch=1, head_dim=case["head_dim"], element_size=element_size)
    causal = ", causal" * (case["is_causal"] and table != "dense")
    for name, backward in (("forward", False), ("forward_backward", True)):
        one, several = (
            seconds(_measured_plan(case, tokens, ranks), size, backward=backward, per_host=8,
                    across=ACROSS_GB_S)
            for tokens, ranks in ((length, 1), (case["length"], gpus))
        )  # fmt: skip
        yield Row(
            file=file,
            case=f"{table}{causal}, {case['length']:,} tokens, {case['dtype']}",
            gpus=gpus,
            backward=backward,
            measured=row["derived"][name]["speed_up"],
            predicted=one / several,
        )


def _measured_plan(case: dict[str, Any], length: int, ranks: int) -> AttentionPlan:
    pattern, causal = case["pattern"], case["is_causal"]
    return plan_attention(
        DilatedPattern(pattern["segment_lengths"], pattern["dilation_rates"]),
        SequenceLayout.named("auto", length, ranks, is_causal=causal),
        is_causal=causal,
        num_heads=case["heads"],
    )


def predictions(case: str, across: float = ACROSS_GB_S) -> Iterator[dict[str, Any]]:
    """A case of `PREDICTED` with `PER_GPU` tokens on each of `GPUS`."""
    branches, heads, causal = PREDICTED[case]
    size = costs.TensorSize(batch=1, head_dim=128, element_size=2)
    rates = H200.rates(size, link_gb_s=INSIDE_GB_S, network_gb_s=across)
    for gpus in GPUS:
        layout = SequenceLayout.named("auto", PER_GPU * gpus, gpus, is_causal=causal)
        pattern = DilatedPattern([w for w, _ in branches], [r for _, r in branches])
        plan = plan_attention(pattern, layout, is_causal=causal, num_heads=heads)
        hosts = costs.host_of_ranks(-(-gpus // PER_HOST), min(gpus, PER_HOST))
        ranks = [plan.rank(rank) for rank in sorted({0, gpus // 2, gpus - 1})]
        ways = [
            tuple(costs.predict(rank, size, rates, backward=w, hosts=hosts) for w in (False, True))
            for rank in ranks
        ]
        slowest = max(ways, key=lambda x: sum(y.seconds for y in x))
        total = sum(x.seconds for x in slowest)
        yield {
            "gpus": gpus,
            "forward": asdict(slowest[0]),
            "backward": asdict(slowest[1]),
            "efficiency": costs.efficiency(plan, size, rates, total),
            "device_efficiency": costs.efficiency(
                plan, size, rates, sum(x.device for x in slowest)
            ),
        }


def planning(branches: Sequence[tuple[int | None, int]], heads: int) -> Iterator[dict[str, Any]]:
    """Seconds in which all steps of a rank of the most GPUs are planned; zigzag."""
    lengths, rates = zip(*branches, strict=True)
    ranks = max(GPUS)
    layout = SequenceLayout.zigzag(PER_GPU * ranks, ranks)
    for is_causal, rank in product((True, False), (0, ranks // 2, ranks - 1)):
        taken = []
        for _ in range(PLANNED):
            gc.collect()
            begun = time.perf_counter()
            plan = plan_attention(
                DilatedPattern(lengths, rates), layout, is_causal=is_causal, num_heads=heads
            )
            one = plan.rank(rank)
            steps = sum(1 for each in one.rounds(gathers=plan.gathers) for _ in each.steps())
            tiles = len(one.local)
            taken.append(time.perf_counter() - begun)
            del plan, one
        yield {
            "is_causal": is_causal, "rank": rank, "steps": steps, "local_tiles": tiles,
            "seconds": [statistics.median(taken), min(taken), max(taken)],
        }  # fmt: skip


def main(out: Annotated[Path, typer.Option(help="JSON to write.")]) -> None:
    """Compare, predict and print."""
    rows = list(compared())
    for row in rows:
        way = "forward+backward" if row.backward else "forward"
        print(
            f"{row.file[10:12]} | {row.case} | {way} | {row.gpus} GPUs | {row.measured:.3f} | "
            f"{row.predicted:.3f} | {row.error:+.1%}"
        )
    found: dict[str, Any] = {
        "per_gpu": PER_GPU, "gpus_per_host": PER_HOST, "link_gb_s": INSIDE_GB_S,
        "network_gb_s": ACROSS_GB_S, "compared": [asdict(x) for x in rows], "predicted": {},
        "slower_network": {},
    }  # fmt: skip
    for case in PREDICTED:
        for name, across in (("predicted", ACROSS_GB_S), ("slower_network", ACROSS_GB_S / 8)):
            found[name][case] = list(predictions(case, across))
        for x in found["predicted"][case]:
            print(
                f"{case} | {x['gpus']:,} | {x['forward']['seconds']:.4g} s | "
                f"{x['forward']['seconds'] + x['backward']['seconds']:.4g} s | "
                f"{x['efficiency']:.1%} | {x['device_efficiency']:.1%}"
            )
    found["planning"] = {}
    for name, (branches, heads) in PLANS.items():
        found["planning"][name] = list(planning(branches, heads))
        for x in found["planning"][name]:
            middle, least, most = x["seconds"]
            causal = "causal" if x["is_causal"] else "not causal"
            print(
                f"planning: {name}, {causal} | rank {x['rank']:,} | {x['steps']:,} steps | "
                f"{middle:.3f} [{least:.3f} .. {most:.3f}] s"
            )
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
