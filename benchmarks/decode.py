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

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from harness import in_a_row, join, leave, seen, write

from ring_dilated_attention import (
    DilatedKVCache,
    DilatedPattern,
    SequenceLayout,
    cached_attention,
)
from ring_dilated_attention.bench import peak_bytes
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.decode import CapturedStep
from ring_dilated_attention.named_patterns import named
from ring_dilated_attention.nn import LongNet, LongNetConfig

TIMED_CALLS = 1400
"""More calls than a case is timed with. Its first call is this many positions before the end of a
segment, so that its caches are nearly full in all of them."""
IN_A_ROW = 20
Timer: TypeAlias = Callable[..., dict[str, dict[str, float]]]
"""`in_a_row` of the ranks."""
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


def cases(ranks: int, *, small: bool) -> list[Case]:
    """Those of the issue: a million keys, or few on a CPU; on ranks a million on each."""
    longnet, dense = named("longnet").pattern, DilatedPattern.dense()
    keys = 1000 if small else 1 << 20
    if ranks > 1:
        return [Case(f"dense, on {ranks} ranks", dense, ranks * keys, ranks=ranks)]
    more = DilatedPattern([*longnet.segment_lengths, None], [*longnet.dilation_rates, 64])
    full = keys if small else keys - TIMED_CALLS - MEAN_OVER
    found = [
        Case("dense", dense, keys, is_dense=True),
        Case("longnet", longnet, full),
        Case("longnet and (document, 64)", more, full),
        Case("dense, batch 32", dense, 32768, 32, is_dense=True),
        Case("longnet, batch 32", longnet, 31_400, 32),
    ]
    return found[:3] if small else found


def medians(timed: Timer, count: int, **calls: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each call, of `count` in a row."""
    return {name: each["median_ms"] for name, each in timed(calls, count).items()}


def copy_rate(timed: Timer, device: torch.device) -> float:
    """Bytes a second that a copy in the device's memory moves: those read and those written."""
    nbytes = 4 << 30 if device.type == "cuda" else 64 << 20
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = medians(timed, IN_A_ROW, copy=lambda: target.copy_(source))["copy"]
    return 2 * nbytes / taken * 1e3


def attention(
    case: Case, timed: Timer, device: torch.device, dtype: torch.dtype, rate: float
) -> dict[str, Any]:
    """One case: its error and its times."""
    heads, kv_heads, head_dim = 32, 8, 128
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
    shown = [  # of the next positions, over all KV heads
        sum(map(len, chain(*seen(case.pattern, kv_heads, position, position + 1))))
        for position in range(case.keys, case.keys + MEAN_OVER)
    ]
    read = 2 * case.batch * head_dim * dtype.itemsize * statistics.mean(shown) / case.ranks
    before = cache.known()
    found = {"case": case.name, "keys": case.keys, "batch": case.batch, "bytes": read}
    out = cached_attention(query, key, value, cache)
    found["error"] = error_of(
        out, query, torch.cat([keys, key], 1), torch.cat([values, value], 1), case
    )
    cache.set_known(before)

    def call() -> torch.Tensor:
        return cached_attention(query, key, value, cache)

    found["limit_ms"] = read / rate * 1e3
    beside = {}
    if case.is_dense:
        k, v = (torch.cat([x, new], 1).transpose(1, 2) for x, new in ((keys, key), (values, value)))
        k, v = k.contiguous(), v.contiguous()
        q = query.transpose(1, 2)
        beside["sdpa_ms"] = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    found |= medians(timed, IN_A_ROW, wall_ms=call, **beside)
    found |= medians(timed, 1, wall_alone_ms=call)
    if device.type == "cuda" and not is_shared:
        captured = CapturedStep(lambda x: cached_attention(x, key, value, cache), query, [cache])
        found |= medians(timed, IN_A_ROW, graph_ms=lambda: captured(query))
    return found


def error_of(
    out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, case: Case
) -> float:
    """The relative error of the first row of the batch, against a softmax in float64."""
    wanted = []
    for head, ranges in enumerate(seen(case.pattern, keys.shape[2], case.keys, case.keys + 1)):
        slices = [slice(x.start, x.stop, x.step) for x in ranges]
        k, v = (torch.cat([x[0, each, head].double() for each in slices]) for x in (keys, values))
        for q in query[0, 0].double().chunk(keys.shape[2])[head]:
            wanted.append(torch.softmax(k @ q * q.shape[0] ** -0.5, 0) @ v)
    return relative_error(out[0, 0], torch.stack(wanted))


def model_step(timed: Timer, device: torch.device, prompt: int, *, small: bool) -> dict[str, Any]:
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
    dtype = torch.float32 if small else torch.bfloat16
    model = LongNet(config, chunk_rows=65_536).to(device, dtype)
    tokens = torch.randint(model.config.vocab_size, (1, prompt), device=device)
    token = tokens[:, :1]
    found: dict[str, Any] = {"case": "longnet-base", "prompt": prompt}
    with torch.no_grad():
        caches = model.make_caches(1, max_length=prompt + 100_000)
        found["loss_peak_bytes"] = peak_bytes(device, lambda: model.loss(tokens, tokens))
        found["prefill_peak_bytes"] = peak_bytes(device, lambda: model.prefill(tokens, caches))
        found |= medians(timed, 1, prefill_ms=lambda: model.prefill(tokens, caches))
        found |= medians(timed, 1, loss_ms=lambda: model.loss(tokens, tokens))
        model.prefill(tokens, caches)
        found |= medians(timed, 1, step_ms=lambda: model.step(token, caches))
        if device.type == "cuda":
            captured = CapturedStep(lambda x: model.step(x, caches), token, caches)
            found |= medians(timed, 1, graph_ms=lambda: captured(token))
            found |= medians(timed, IN_A_ROW, graph_in_a_row_ms=lambda: captured(token))
    found["cache_bytes"] = sum(cache.nbytes for cache in caches)
    count = 16 if small else 256
    drawn = model.stream(tokens, count)
    begun = time.perf_counter()
    int([*drawn][-1])  # waits for the device
    found["generate_ms"] = (time.perf_counter() - begun) * 1e3 / count
    return found


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="few keys, float32")] = False,
    repeats: int = 9,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Check and time everything; a table at the end."""
    ranks = join(device)
    torch.manual_seed(0)  # the same keys on every rank
    timed = partial(in_a_row, ranks=ranks, repeats=repeats)
    dtype = torch.float32 if small else torch.bfloat16
    rate = copy_rate(timed, ranks.device)
    taken = cases(ranks.size, small=small)
    found = [attention(case, timed, ranks.device, dtype, rate) for case in taken]
    if ranks.size == 1:
        found.append(model_step(timed, ranks.device, 500 if small else 1 << 20, small=small))
    if ranks.rank == 0:
        write(out, ranks.device, {"copy_bytes_per_s": rate, "cases": found})
        for each in found:
            print(json.dumps(each))
    leave()


if __name__ == "__main__":
    typer.run(main)
