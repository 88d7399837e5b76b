"""A sequence of a billion tokens: one head, LongNet's pattern extended to the whole sequence.

    torchrun --nproc-per-node 4 benchmarks/billion_tokens.py --log2-length 30
    torchrun --nproc-per-node 4 benchmarks/billion_tokens.py --log2-length 29 --backward

Times calls, and recomputes rows in float64 at positions in every branch and at every rank border.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from harness import join, leave, spread, write

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.bench import take_turns
from ring_dilated_attention.exchange import all_gather, resolve_exchange
from ring_dilated_attention.named_patterns import named


def extended(length: int) -> DilatedPattern:
    """LongNet's branches, then both numbers doubled until a segment is the whole sequence."""
    longnet = named("longnet").pattern
    branches = list(zip(longnet.segment_lengths, longnet.dilation_rates, strict=True))
    w, r = branches[-1]
    assert w is not None
    kept = [(each, rate) for each, rate in branches if each is not None and each < length]
    while w < length:
        w, r = 2 * w, 2 * r
        kept.append((min(w, length), r))
    return DilatedPattern([w for w, _ in kept], [r for _, r in kept])


def positions_to_check(pattern: DilatedPattern, layout: SequenceLayout, seed: int) -> list[int]:
    """Two positions at random in every branch, and both sides of every border of ranks."""
    random, length = Random(seed), layout.length
    positions = {0, length - 1}
    for branch, (w, rate) in enumerate(pattern.branches):
        w = length if w is None else min(w, length)
        offset = dict(pattern.heads(branch, 1)).get(0, w)
        for _ in range(2):
            start = random.randrange(-(-length // w)) * w
            rows = range(start + offset, min(start + w, length), rate)
            positions.update(random.sample(rows, min(1, len(rows))))
    borders = {border for ranges in layout.ranges for each in ranges for border in each}
    near = {position for border in borders for position in (border - 1, border)}
    return sorted(positions | {p for p in near if 0 <= p < length})


NAMES = ("query", "key", "value", "out", "lse", "dout", "dquery", "dkey", "dvalue")


def rows_at(
    shard: dict[str, torch.Tensor], layout: SequenceLayout, group: object, positions: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Rows of the only head at `positions`, float64: each rank's among zeros, all added up."""
    ends: Any = resolve_exchange(group)
    own = [piece for piece in layout.pieces if piece.rank == ends.rank]
    held = [
        (place, piece.local + position - piece.start)
        for place, position in enumerate(positions)
        for piece in own
        if piece.start <= position < piece.stop
    ]
    places, local = ([pair[i] for pair in held] for i in (0, 1))
    found = {}
    for name, tensor in shard.items():
        of_head = tensor[0, 0] if name == "lse" else tensor[0, :, 0]
        rows = of_head.new_zeros(len(positions), *of_head.shape[1:], dtype=torch.float64)
        rows[places] = of_head[local].double()
        with ends.calls.enter("spot_check", "rows"):
            found[name] = torch.stack(all_gather(ends, rows)).sum(0)
    return found


def spot_check(
    shard: dict[str, torch.Tensor],
    pattern: DilatedPattern,
    layout: SequenceLayout,
    group: object,
    positions: Sequence[int],
) -> dict[str, float]:
    """Relative errors of out, lse and gradients at `positions`, over all of them together.

    A row is recomputed in float64 from the keys that its branches show it, dK and dV from the
    queries that see the position, with their lse and out as the call returned them. The mask is not
    causal, so these are the same positions.
    """
    squares: dict[str, torch.Tensor] = {}
    for position in positions:
        seen: list[int] = []
        for branch, (w, rate) in enumerate(pattern.branches):
            w = layout.length if w is None else min(w, layout.length)
            start = position - position % w
            offset = dict(pattern.heads(branch, 1)).get(0, w)
            rows = range(start + offset, min(start + w, layout.length), rate)
            seen.extend(rows if position in rows else ())
        own = {name: x[0] for name, x in rows_at(shard, layout, group, [position]).items()}
        other = rows_at(shard, layout, group, seen)
        scale = own["query"].shape[0] ** -0.5
        scores = scale * other["key"] @ own["query"]
        out = scores.softmax(0) @ other["value"]
        want = {"out": out, "lse": scores.logsumexp(0)}
        if "dout" in own:
            ds = scores.softmax(0) * (other["value"] @ own["dout"] - own["dout"] @ out)
            want["dquery"] = scale * ds @ other["key"]
            p = torch.exp(scale * other["query"] @ own["key"] - other["lse"])
            delta = (other["dout"] * other["out"]).sum(-1)
            ds = p * (other["dout"] @ own["value"] - delta)
            want["dkey"], want["dvalue"] = scale * ds @ other["query"], p @ other["dout"]
        for name, expected in want.items():  # both lse are -inf where no key is visible
            error = torch.where(own[name] == expected, 0.0, own[name] - expected)
            pair = torch.stack([x.square().sum() for x in (error, expected.nan_to_num(neginf=0.0))])
            squares[name] = squares.get(name, 0.0) + pair
    # Where nothing is expected, what there is is the error.
    return {
        name: (error / (size or 1.0)) ** 0.5
        for name, (error, size) in ((name, pair.tolist()) for name, pair in squares.items())
    }


def main(
    log2_length: int = 30,
    backward: bool = False,
    head_dim: int = 64,
    workspace: Annotated[float, typer.Option(help="see dilated_attention")] = 0.05,
    repeats: int = 5,
    seed: int = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Time and check."""
    ranks = join()
    on_cuda, length = ranks.device.type == "cuda", 2**log2_length
    pattern, layout = extended(length), SequenceLayout.contiguous(length, ranks.size)
    generator = torch.Generator(ranks.device).manual_seed(seed + ranks.rank)
    shape = 1, layout.local_length(ranks.rank), 1, head_dim
    dtype = torch.bfloat16 if on_cuda else torch.float32

    def draw() -> torch.Tensor:
        return torch.empty(shape, device=ranks.device, dtype=dtype).normal_(generator=generator)

    query, key, value = (draw().requires_grad_(backward) for _ in range(3))
    dout = draw() if backward else None

    def call() -> tuple[torch.Tensor, ...]:
        result, lse = dilated_attention(
            query, key, value, pattern, group=ranks.world, layout=layout, workspace=workspace,
            return_lse=True,
        )  # fmt: skip
        if dout is None:
            return result, lse
        return result.detach(), lse, *torch.autograd.grad(result, (query, key, value), dout)

    times = take_turns({"call": call}, ranks.device, repeats=repeats, group=ranks.host)["call"]
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30 if on_cuda else 0.0)
    if ranks.host is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=ranks.host)
    result, lse, *gradients = call()
    detached = [x.detach() for x in (query, key, value, result)]
    given = [*detached, lse, *([] if dout is None else [dout, *gradients])]
    shard = dict(zip(NAMES, given, strict=False))
    positions = positions_to_check(pattern, layout, seed)
    errors = spot_check(shard, pattern, layout, ranks.world, positions)
    if ranks.rank == 0:
        found = {
            "length": length,
            "world_size": ranks.size,
            "backward": backward,
            "pattern": str(pattern),
            **spread(times),
            "peak_gib_with_inputs": peak.item(),
            "rows_checked": len(positions),
            "relative_errors": errors,
        }
        print(json.dumps(found, indent=1))
        write(out, ranks.device, found)
    leave()


if __name__ == "__main__":
    typer.run(main)
