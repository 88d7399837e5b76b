"""Decoding one token: attention to a KV cache beside torch's SDPA, and a model's whole step.

    python benchmarks/decode.py --device cuda --out found.json
    torchrun --nproc-per-node 2 benchmarks/decode.py --device cuda --out found.json
    python benchmarks/decode.py --device cpu --small

Under torchrun the ranks share the rows of one dense cache, 1,048,576 of each, and nothing else is
timed; times are those of the slowest rank.

First every case is compared with a float64 softmax over the keys that the query sees. Then each is
timed by the clock until the device is idle: per call of 20 in a row, in turns with its baseline, as
a call by itself, and in a CUDA graph. The limit is the time in which a copy inside the device's
memory moves as many bytes as the call has to read.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Ranks, join, leave, write

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
)
from ring_dilated_attention.bench import peak_bytes, take_turns
from ring_dilated_attention.decode import CapturedStep
from ring_dilated_attention.named_patterns import named
from ring_dilated_attention.nn import LongNet, LongNetConfig

TIMED_CALLS = 1400
"""More calls than a case is timed with. Its first call is this many positions before the end of a
segment, so that its caches are nearly full in all of them."""
IN_A_ROW = 20
CHUNK_ROWS = 65_536
"""Of `LongNet`: rows of the MLP that are computed at a time."""
MEAN_OVER = 768
"""Positions: a multiple of all rates, so that each head is a member as often as on average."""


class Case(NamedTuple):
    """Attention of one new token to a cache.

    Attributes:
        name: in the table.
        pattern: which keys each head sees.
        keys: positions before the token.
        batch: rows of the batch.
        is_dense: whether SDPA computes the same.
        ranks: that share the rows of the cache.
    """

    name: str
    pattern: DilatedPattern
    keys: int
    batch: int = 1
    is_dense: bool = False
    ranks: int = 1


def cases(*, small: bool) -> list[Case]:
    """Those of the issue: a million keys, or few on a CPU."""
    longnet, keys = named("longnet").pattern, 1000 if small else 1 << 20
    more = DilatedPattern([*longnet.segment_lengths, None], [*longnet.dilation_rates, 64])
    full = keys if small else keys - TIMED_CALLS - MEAN_OVER
    found = [
        Case("dense", DilatedPattern.dense(), keys, is_dense=True),
        Case("longnet", longnet, full),
        Case("longnet and (document, 64)", more, full),
        Case("dense, batch 32", DilatedPattern.dense(), 32768, 32, is_dense=True),
        Case("longnet, batch 32", longnet, 31_400, 32),
    ]
    return found[:3] if small else found


def shared_case(ranks: int, *, small: bool) -> Case:
    """A dense cache of a million keys on each rank."""
    keys = 4096 if small else 1 << 20
    return Case(f"dense, on {ranks} ranks", DilatedPattern.dense(), ranks * keys, ranks=ranks)


class Timer:
    """Times calls on one device, by the rules of `rda bench`.

    Args:
        ranks: whose device it is; times are those of the slowest rank.
        repeats: samples of each time.
    """

    def __init__(self, ranks: Ranks, repeats: int) -> None:
        self.device, self.group, self.repeats = ranks.device, ranks.host, repeats

    def in_a_row(self, *calls: Callable[[], Any]) -> list[float]:
        """Milliseconds of each call, of `IN_A_ROW` calls in a row, in turns."""
        rows = {str(number): partial(several, call) for number, call in enumerate(calls)}
        times = take_turns(rows, self.device, repeats=self.repeats, group=self.group)
        return [statistics.median(samples) / IN_A_ROW for samples in times.values()]

    def wall(self, call: Callable[[], Any]) -> float:
        """Milliseconds of a call by itself, until the device is idle."""
        times = take_turns({"": call}, self.device, repeats=2 * self.repeats, group=self.group)
        return statistics.median(times[""])


def several(call: Callable[[], Any]) -> None:
    """`IN_A_ROW` calls."""
    for _ in range(IN_A_ROW):
        call()


def copy_rate(timer: Timer, nbytes: int = 4 << 30) -> float:
    """Bytes a second that a copy in the device's memory moves: those read and those written."""
    nbytes = nbytes if timer.device.type == "cuda" else 64 << 20
    source = torch.empty(nbytes, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    (taken,) = timer.in_a_row(lambda: target.copy_(source))
    return 2 * nbytes / taken * 1e3


def attention(case: Case, timer: Timer, dtype: torch.dtype, rate: float) -> dict[str, Any]:
    """One case: its error and its times."""
    device, heads, kv_heads, head_dim = timer.device, 32, 8, 128
    query, key, value = (
        torch.randn(case.batch, 1, n, head_dim, device=device, dtype=dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    is_shared = case.ranks > 1
    cache = DilatedKVCache(
        case.pattern, case.batch, kv_heads, head_dim, max_length=case.keys + 4 * TIMED_CALLS,
        dtype=dtype, device=device, group=dist.group.WORLD if is_shared else None,
        sharded=is_shared,
    )  # fmt: skip
    keys, values = torch.randn(
        2, case.batch, case.keys, kv_heads, head_dim, device=device, dtype=dtype
    ).unbind(0)
    layout = SequenceLayout.contiguous(case.keys, case.ranks)
    cache.prefill(*(layout.shard(x, cache.exchange.rank, 1) for x in (keys, values)), layout=layout)
    read = 2 * case.batch * head_dim * dtype.itemsize * mean_rows(cache, case.keys) / case.ranks
    before = cache.known()
    found = {"case": case.name, "keys": case.keys, "batch": case.batch, "bytes": read}
    out = cached_attention(query, key, value, cache)
    found["error"] = error_of(out, (query, key, value), (keys, values), case, cache)
    cache.set_known(before)

    def call() -> torch.Tensor:
        return cached_attention(query, key, value, cache)

    for _ in range(5):
        call()
    found["limit_ms"] = read / rate * 1e3
    beside = {}
    if case.is_dense:
        k, v = (torch.cat([x, new], 1).transpose(1, 2) for x, new in ((keys, key), (values, value)))
        k, v = k.contiguous(), v.contiguous()
        q = query.transpose(1, 2)
        beside["sdpa_ms"] = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    found["wall_ms"], *taken = timer.in_a_row(call, *beside.values())
    found |= zip(beside, taken, strict=True)
    found["wall_alone_ms"] = timer.wall(call)
    if device.type == "cuda" and not is_shared:
        captured = CapturedStep(lambda x: cached_attention(x, key, value, cache), query, [cache])
        (found["graph_ms"],) = timer.in_a_row(lambda: captured(query))
    return found


def mean_rows(cache: DilatedKVCache, length: int) -> float:
    """Rows that the next position is shown, of all KV heads: the mean over the next ones."""
    rows = 0
    for position in range(length, length + MEAN_OVER):
        for branch in cache.plan.branches:
            for _, offset in branch.heads:
                member = branch.members_before(offset, position)
                if branch.members_before(offset, position + 1) > member:
                    rows += member + 1 - branch.first_shown(offset, member)
    return rows / MEAN_OVER


def error_of(
    out: torch.Tensor,
    new: tuple[torch.Tensor, ...],
    before: tuple[torch.Tensor, torch.Tensor],
    case: Case,
    cache: DilatedKVCache,
) -> float:
    """The relative error of the first row of the batch, against a softmax in float64."""
    query, *own = (x[0, 0].double() for x in new)
    position, members = case.keys, query.shape[0] // own[0].shape[0]
    wrong = total = 0.0
    for head in range(own[0].shape[0]):
        shown = []
        for branch in cache.plan.branches:
            offset = dict(branch.heads).get(head)
            if offset is None:
                continue
            member = branch.members_before(offset, position)
            if branch.members_before(offset, position + 1) == member:
                continue  # not a member itself
            members_seen = range(branch.first_shown(offset, member), member)
            for _, positions in branch.positions(offset, members_seen):
                shown.append(slice(positions.start, positions[-1] + 1, positions.step))
            shown.append(None)  # itself
        rows = [
            torch.cat([own[i][head][None] if s is None else x[0, s, head].double() for s in shown])
            for i, x in enumerate(before)
        ]
        for q, got in zip(
            query[head * members : (head + 1) * members],
            out[0, 0, head * members : (head + 1) * members].double(),
            strict=True,
        ):
            weights = torch.softmax(rows[0] @ q * q.shape[0] ** -0.5, 0)
            want = weights @ rows[1]
            wrong += float((got - want).square().sum())
            total += float(want.square().sum())
    return (wrong / total) ** 0.5


def model_step(timer: Timer, prompt: int, *, small: bool) -> dict[str, Any]:
    """`longnet-base` after a long prompt: prefill, then token by token, also in a graph."""
    width = {"num_layers": 2, "embed_dim": 96, "num_heads": 4, "ffn_dim": 384}
    if not small:
        width = {"num_layers": 12, "embed_dim": 768, "num_heads": 12, "ffn_dim": 3072}
    longnet = named("longnet").pattern
    config = LongNetConfig(
        segment_lengths=[*longnet.segment_lengths, None],
        dilation_rates=[*longnet.dilation_rates, 2048],
        **width,
    )
    device, dtype = timer.device, torch.float32 if small else torch.bfloat16
    model = LongNet(config, chunk_rows=CHUNK_ROWS).to(device, dtype)
    tokens = torch.randint(model.config.vocab_size, (1, prompt), device=device)
    token = tokens[:, :1]
    found: dict[str, Any] = {"case": "longnet-base", "prompt": prompt}
    with torch.no_grad():
        caches = model.make_caches(1, max_length=prompt + 100_000)
        found["loss_peak_bytes"] = peak_bytes(device, lambda: model.loss(tokens, tokens))
        found["prefill_peak_bytes"] = peak_bytes(device, lambda: model.prefill(tokens, caches))
        for _ in range(2):
            model.prefill(tokens, caches)
            model.loss(tokens, tokens)
        found["prefill_ms"] = timer.wall(lambda: model.prefill(tokens, caches))
        found["loss_ms"] = timer.wall(lambda: model.loss(tokens, tokens))
        model.prefill(tokens, caches)
        for _ in range(20):
            model.step(token, caches)
        found["step_ms"] = timer.wall(lambda: model.step(token, caches))
        if device.type == "cuda":
            captured = CapturedStep(lambda x: model.step(x, caches), token, caches)
            found["graph_ms"] = timer.wall(lambda: captured(token))
            (found["graph_in_a_row_ms"],) = timer.in_a_row(lambda: captured(token))
    found["cache_bytes"] = sum(cache.nbytes for cache in caches)
    count = 16 if small else 256
    drawn = model.stream(tokens, count)
    begun = time.perf_counter()
    int([*drawn][-1])  # waits for the device
    found["generate_ms"] = (time.perf_counter() - begun) * 1e3 / count
    return found


def main() -> None:
    """Check and time everything; a table at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--small", action="store_true", help="few keys, a small model, float32")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    ranks = join(options.device)
    torch.manual_seed(0)  # the same keys on every rank
    timer = Timer(ranks, options.repeats)
    dtype = torch.float32 if options.small else torch.bfloat16
    rate = copy_rate(timer)
    if ranks.size > 1:
        found = [attention(shared_case(ranks.size, small=options.small), timer, dtype, rate)]
    else:
        found = [attention(case, timer, dtype, rate) for case in cases(small=options.small)]
        found.append(model_step(timer, 500 if options.small else 1 << 20, small=options.small))
    if ranks.rank == 0:
        write(options.out, ranks.device, {"copy_bytes_per_s": rate, "cases": found})
        for each in found:
            print(json.dumps(each))
    leave()


if __name__ == "__main__":
    main()
