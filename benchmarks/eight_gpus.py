"""Attention on all GPUs of one host: every exchange beside one GPU, Ulysses and context_parallel.

    torchrun --standalone --nproc-per-node 8 benchmarks/eight_gpus.py --out attention.json
    torchrun --standalone --nproc-per-node 8 benchmarks/eight_gpus.py --rows tokens
    torchrun --standalone --nproc-per-node 2 benchmarks/eight_gpus.py --small    # on a CPU

Runs on any number of GPUs and needs flash-attn-4. Each contender first makes two calls of a pass,
whose results are compared with those of one GPU; then all take turns for `--seconds`. Of a call
expected to take more than a sixteenth of `--seconds`, the second time counts instead; more than a
quarter: it is called once. Values are of forward, and of forward+backward.

Row `tokens` has one head of 64 and LongNet's branches, doubled up to the whole sequence: 2^27
positions a GPU, at most 2^30. Tensors fill 128 GiB of each GPU: run it in a process of its own. A
few positions are compared with float64 sums over all that they see.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from harness import Ranks, join, leave, seen, write
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.attention import SDPBackend, _fa4, sdpa_kernel

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.bench import Workload, peak_bytes, take_turns
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.choice import ROWS, choose_exchange, predicted
from ring_dilated_attention.plan import costs, head_split

OF_ATTENTION = "dense,documents,crossing,dense_256k,window,dense_1m"
DOCUMENTS = (0, 1, 3, 4, 10, 16, 17, 28, 30, 31, 53, 64)
"""Where they begin, in 64ths of the sequence."""
RATE = 600e12
"""FLOP/s of a GPU, about: so long are calls taken to be."""
COLUMNS = ("ms", "model_ms", "tflops", "times_one", "sent_mb", "peak_gib", "errors")
LAST_BEGIN = 400
"""Seconds after which no row is begun."""


def workloads(ranks: int, *, small: bool) -> dict[str, Workload]:
    """The rows; `small`: 1/1024 of their positions, and 1/16 of head_dim."""
    k, d = (1, 8) if small else (1024, 128)
    n, tokens = 8 * k * ranks, ranks * min(k << 17, (k << 20) // ranks)
    dense, window = DilatedPattern.dense(), DilatedPattern.window(max(k - 1, 1))
    crossing = DilatedPattern([2 * k, 16 * k, 128 * k, None], [1, 8, 64, 512])
    lengths, rates = [2 * k, 4 * k, 8 * k, 16 * k, 32 * k], [1, 2, 4, 6, 12]
    while lengths[-1] < tokens:
        lengths, rates = [*lengths, min(2 * lengths[-1], tokens)], [*rates, 2 * rates[-1]]
    packed = tuple(sorted({begin * n // 64 for begin in DOCUMENTS}))
    table = {  # pattern, positions, query heads, KV heads, head_dim, causal, documents
        "dense": (dense, n, 64, 8, d, True, None),
        "documents": (dense, n, 64, 8, d, True, packed),
        "crossing": (crossing, 1024 * k, 12, 12, d, False, None),
        "dense_256k": (dense, 256 * k, 16, 16, d, True, None),
        "window": (window, 1024 * k, 32, 8, d, True, None),
        "dense_1m": (dense, 1024 * k, 16, 16, d, True, None),
        "tokens": (DilatedPattern(lengths, rates), tokens, 1, 1, d // 2, False, None),
    }
    names = "pattern", "seq_len", "num_heads", "num_kv_heads", "head_dim", "is_causal", "documents"
    dtype = "float32" if small else "bfloat16"
    return {x: Workload(**dict(zip(names, y, strict=True)), dtype=dtype) for x, y in table.items()}


class Contender(NamedTuple):
    """What computes a workload on the ranks of a layout; on one rank, each GPU computes it all."""

    name: str
    layout: SequenceLayout
    attend: Callable[..., Any]  # query, key, value -> out, or out and lse
    sent: tuple[int, ...] = ()  # bytes of each pass, by the rank that sends most; (): not known
    model_ms: tuple[float, ...] = ()  # forward+backward, by the cost model
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext


def contenders(work: Workload, ranks: Ranks) -> Iterator[Contender]:
    """All that compute a workload."""
    p, n, one_head = ranks.size, work.seq_len, work.num_heads == 1
    contiguous, layout = SequenceLayout.contiguous(n, p), work.layout(p)  # zigzag, if causal
    if work.documents:
        layout = SequenceLayout.balanced(work.documents, p, work.pattern, is_causal=True)
    elif work.pattern.has_windows:
        layout = contiguous
    if not one_head:
        yield ours("one GPU", work, SequenceLayout.contiguous(n, 1), None)
    groups = [f"heads:{m}" for m in range(p, 1, -1) if p % m == 0 and m <= work.num_heads]
    for exchange in ("auto",) if one_head else ("auto", "ring", "gather", *groups):
        yield ours(exchange, work, contiguous if exchange == f"heads:{p}" else layout, ranks.world)
    is_alike = work.is_causal and work.pattern.heads_are_alike
    if is_alike and n % p == work.kv_heads % p == 0:
        yield ulysses(work, contiguous, ranks.device)
    is_dense = is_alike and not (work.pattern.has_windows or work.documents)
    if is_dense and ranks.device.type == "cuda" and n % (2 * p) == 0:
        yield from context_parallel(work, layout)


def ours(name: str, work: Workload, layout: SequenceLayout, group: Any) -> Contender:
    """This library by an exchange, with what its plan says."""
    exchange = "auto" if group is None else name
    attend = partial(
        dilated_attention, pattern=work.pattern, is_causal=work.is_causal, group=group,
        layout=layout, documents=work.documents, exchange=exchange, return_lse=True,
        workspace=0.05 if work.num_heads == 1 else None,
    )  # fmt: skip
    plan, size = replace(work.plan(), layout=layout), work.size
    way = choose_exchange(plan, size) if exchange == "auto" else exchange
    way = way.replace(ROWS, "gather" if plan.gathers else "ring")
    split, sent = head_split(way, plan.pattern, layout, plan.num_heads, plan.num_kv_heads), []
    for rank in range(layout.world_size):
        heads = split.traffic(rank, size) if split else (0, 0)
        rows = costs.traffic(split.plan_of(plan, rank) if split else plan.rank(rank), size)
        forward = heads[0] + rows.forward_sent
        sent.append((forward, forward + heads[1] + rows.backward_sent))
    most = tuple(max(each) for each in zip(*sent, strict=True))
    name = f"auto: {way}" if name == "auto" else name
    return Contender(name, layout, attend, most, (1e3 * predicted(plan, size)[way],))


def ulysses(work: Workload, layout: SequenceLayout, device: torch.device) -> Contender:
    """Plain: an all-to-all of query, key and value, flash-attn-4 on a few heads, one of out."""
    p, backend = layout.world_size, "fa4" if device.type == "cuda" else "auto"
    options = {"is_causal": True, "documents": work.documents, "backend": backend}
    splits = {"output_split_sizes": None, "input_split_sizes": None}  # part i for rank i
    swap = partial(all_to_all_single_autograd, group=dist.group.WORLD, **splits)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        parts = [x.view(-1, p, x.shape[2] // p, x.shape[3]).transpose(0, 1) for x in tensors]
        rows = swap(torch.cat(parts, 2)).flatten(0, 1)[None]
        own = rows.split([x.shape[2] for x in parts], 2)
        out = dilated_attention(*own, work.pattern, **options)  # on this GPU
        out = swap(out.reshape(p, -1, *out.shape[2:]))
        return out.transpose(0, 1).flatten(1, 2)[None]

    row = 2 * (work.num_heads + work.kv_heads) * work.head_dim * work.torch_dtype.itemsize
    sent = row * layout.local_length(0) * (p - 1) // p
    return Contender("Ulysses", layout, attend, (sent, 2 * sent))


def context_parallel(work: Workload, layout: SequenceLayout) -> Iterator[Contender]:
    """torch's, with flash-attn-4 inside, by each of its ways to move keys and values."""
    torchs = import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    mesh = dist.init_device_mesh("cuda", (layout.world_size,))
    if "fa4_of_torch" not in sys.modules:  # torch expects fewer results than there are by now
        flash, known = import_module("flash_attn.cute.interface"), ModuleType("fa4_of_torch")
        known._flash_attn_fwd = lambda *x, **options: flash._flash_attn_fwd(*x, **options)[:2]
        known._flash_attn_bwd = lambda *x, **options: flash._flash_attn_bwd(*x, **options)[:3]
        sys.modules["fa4_of_torch"] = known
        known.handle = _fa4.register_flash_attention_fa4("fa4_of_torch")
    options = {} if work.kv_heads == work.num_heads else {"enable_gqa": True}

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        inputs, sdpa = [x.transpose(1, 2) for x in tensors], torch.nn.functional
        # SDPA returns the lse, which merging needs, only where gradients are enabled.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = sdpa.scaled_dot_product_attention(*inputs, is_causal=True, **options)
        return out.transpose(1, 2)

    def inside(method: str) -> AbstractContextManager[Any]:
        torchs.set_rotate_method(method)
        x = torch.arange(work.seq_len, device="cuda")[None]  # it wants a buffer to shard
        buffers = {"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": {x}}
        return torchs.context_parallel(mesh, **buffers)

    for method in ("allgather", "alltoall"):
        name = f"context_parallel {method}"
        yield Contender(name, layout, attend, inside=partial(inside, method))


def results_of(one: Contender, given: list[torch.Tensor], backward: int) -> list[torch.Tensor]:
    """Out and, of forward and backward, dq, dk and dv; then, of ours, lse."""
    *leaves, dout = given
    with torch.set_grad_enabled(bool(backward)):
        out = one.attend(*leaves)
    out, *lse = out if isinstance(out, tuple) else (out,)
    gradients = torch.autograd.grad(out, leaves, dout) if backward else ()
    return [x.detach() for x in (out, *gradients, *lse)]


def on_all(value: Any, ranks: Ranks) -> list[Any]:
    """The values of all ranks."""
    values = [None] * ranks.size
    dist.all_gather_object(values, value, group=ranks.host)
    return values


def first(call: Callable[[], Any], one: Contender, ranks: Ranks) -> tuple[Any, float, float]:
    """Results, milliseconds and GiB at most of a call; what is raised on one rank is on all."""
    got, took, wrong, peak, on_cuda = [], 0.0, "", None, ranks.device.type == "cuda"

    def run() -> None:
        nonlocal took
        dist.barrier(group=ranks.host)
        begun = time.perf_counter()
        got.extend(call())
        if on_cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - begun

    with one.inside():
        try:  # in here: torch 2.11 leaves SDPA patched where an error leaves its context
            peak = peak_bytes(ranks.device, run) if on_cuda else run()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}".partition("\n")[0]
    found = on_all((wrong, took, peak or 0), ranks)
    reasons, seconds, peaks = zip(*found, strict=True)
    if any(reasons):
        raise RuntimeError(max(reasons))
    return got, 1e3 * max(seconds), max(peaks) / 2**30


def spot_errors(work: Workload, ranks: Ranks, tensors: list[torch.Tensor]) -> list[float]:
    """Relative, of out, dq, dk and dv of the only head at a few positions.

    No mask is causal: the queries that see a key are the keys that its query sees.
    """
    every = [*(x.detach()[0, :, 0] for x in tensors[:-1]), tensors[-1][0].mT]  # the last is lse
    local, scale, compared = len(every[0]), work.head_dim**-0.5, []

    def total(x: torch.Tensor) -> torch.Tensor:
        x = x.double().cpu()
        dist.all_reduce(x, group=ranks.host)
        return x.to(ranks.device)

    for position in (0, local - 1, local, work.seq_len // 2, work.seq_len - 1):
        own, keys = position - ranks.rank * local, seen(work.pattern, 1, position, work.seq_len)[0]
        at = torch.cat([torch.tensor(x) for x in keys]) - ranks.rank * local
        at = at[(at >= 0) & (at < local)].to(ranks.device)
        of_one = (x[own] if 0 <= own < local else torch.zeros_like(x[0]) for x in every)
        q, k, v, dout, out, dq, dk, dv, lse = map(total, of_one)
        qs, ks, vs, douts, outs, _, _, _, lses = (x[at].double() for x in every)
        p, ps = torch.exp(scale * ks @ q - lse), torch.exp(scale * qs @ k - lses[:, 0])
        ds, dss = p * (vs @ dout - dout @ out), ps * (douts @ v - (douts * outs).sum(1))
        sums = torch.stack([p @ vs, scale * ds @ ks, scale * dss @ qs, ps @ douts])
        compared.append(torch.stack([torch.stack([out, dq, dk, dv]), total(sums)]))
    return [relative_error(*pair) for pair in zip(*torch.cat(compared, -1), strict=True)]


def measure(work: Workload, ranks: Ranks, seconds: float) -> dict[str, Any]:
    """A row: by contender, pairs for forward and for forward and backward, and errors."""
    device, one_head = ranks.device, work.num_heads == 1
    generator = torch.Generator(device).manual_seed(ranks.rank if one_head else 0)
    draw = partial(torch.randn, generator=generator, device=device, dtype=work.torch_dtype)
    shapes = work.shapes(work.seq_len // ranks.size if one_head else work.seq_len)
    drawn = [draw(shapes[i]) for i in (0, 1, 1, 0)]
    found, samples, shards, calls, inside, want = {}, ({}, {}), {}, ({}, {}), {}, []
    for one in contenders(work, ranks):
        size, got = one.layout.world_size, []
        take = partial(one.layout.shard, rank=ranks.rank % size, dim=1)
        if one.layout not in shards:
            own = [x if one_head else take(x).contiguous() for x in drawn]
            shards[one.layout] = [*(x.detach().requires_grad_() for x in own[:3]), own[3]]
        given, expected = shards[one.layout], 3.5 * work.flops() / size / RATE
        entry = found[one.name] = {"sent_mb": [x / 1e6 for x in one.sent], "peak_gib": [0, 0]}
        entry["model_ms"] = one.model_ms
        inside[one.name], both = one.inside, [partial(results_of, one, given, x) for x in (0, 1)]
        try:
            for backward, call in enumerate(both):
                for _ in range(1 if expected > seconds / 4 else 2):
                    got.clear()
                    got, ms, entry["peak_gib"][backward] = first(call, one, ranks)
                samples[backward][one.name] = [ms]
        except RuntimeError as error:
            entry["failed"] = str(error)
            continue
        if one_head:
            errors = spot_errors(work, ranks, [*given, *got])
        elif size == 1:
            want, errors = got[:4], []
        else:
            errors = [relative_error(x, take(y)) for x, y in zip(got, want, strict=False)]
        entry["errors"] = [max(map(max, on_all(errors, ranks)))] if errors else []
        if expected < seconds / 16:
            calls[0][one.name], calls[1][one.name] = both
    del drawn, own, given, got, want
    options = {"repeats": 21, "seconds": seconds / 2 / max(1, len(calls[0])), "group": ranks.host}
    for backward, turns in enumerate(calls):
        where = {name: inside[name] for name in turns}
        samples[backward].update(take_turns(turns, device, inside=where, **options))
    for name, entry in found.items():
        if "failed" not in entry:
            entry["samples_ms"] = [each[name] for each in samples]
            ms = entry["ms"] = [statistics.median(each) for each in entry["samples_ms"]]
            alone = found.get("one GPU", {}).get("ms", ())
            entry["times_one"] = [x / y for x, y in zip(alone, ms, strict=False)]
            tflop = work.flops() / (1 if name == "one GPU" else ranks.size) / 1e12
            entry["tflops"] = [1e3 * tflop / ms[0], 3.5e3 * tflop / ms[1]]
    return found


def main(
    rows: Annotated[str, typer.Option(help="their names, by commas")] = OF_ATTENTION,
    seconds: Annotated[float, typer.Option(help="for the turns of a row")] = 24,
    small: Annotated[bool, typer.Option("--small", help="tiny, on a CPU")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
) -> None:
    """Measure rows, write them as they come, print a table."""
    begun, ranks = time.perf_counter(), join("cpu" if small else "cuda")
    assert ranks.size > 1, "start it with torchrun, on several ranks"
    works, found = workloads(ranks.size, small=small), {}
    for row in rows.split(","):
        if max(on_all(time.perf_counter() - begun, ranks)) < LAST_BEGIN:
            found[row] = measure(works[row], ranks, seconds)
            if ranks.rank == 0:
                print(f"{row}: ended after {time.perf_counter() - begun:.0f} s", flush=True)
                write(out, ranks.device, {"ranks": ranks.size, "rows": found})
    if ranks.rank == 0:
        print(" " * 37, *(name.rjust(15) for name in COLUMNS))
        for row, entries in found.items():
            for name, entry in entries.items():
                pairs = [entry.get(column, ()) for column in COLUMNS]  # none of what has failed
                cells = ["/".join(f"{x:.3g}" for x in pair).rjust(15) for pair in pairs]
                print(row.ljust(11) + name.ljust(26), *cells, entry.get("failed", ""))
    leave()


if __name__ == "__main__":
    typer.run(main)
