"""What the programs of this folder share: ranks, times of kernels, and JSON.

Times in turns, and peak memory, are `ring_dilated_attention.bench.take_turns` and `peak_bytes`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ring_dilated_attention import DilatedPattern, Window
from ring_dilated_attention.bench import environment, take_turns


class Ranks(NamedTuple):
    """The ranks of torchrun, as one of them sees them; one rank without torchrun.

    Attributes:
        rank: this one.
        size: how many.
        world: all of them, with NCCL on GPUs; None: one rank.
        host: all of them, with gloo, to meet without taking the device; None: one rank.
        device: this rank's.
    """

    rank: int
    size: int
    world: dist.ProcessGroup | None
    host: dist.ProcessGroup | None
    device: torch.device


def join(kind: str = "auto") -> Ranks:
    """Meet the other ranks.

    Args:
        kind: ``"cuda"``, a GPU for each rank; ``"cpu"``; ``"auto"``: CUDA where there is a GPU.
    """
    on_cuda = kind == "cuda" or (kind == "auto" and torch.cuda.is_available())
    device = torch.device("cpu")
    if on_cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Ranks(0, 1, None, None, device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    host = dist.new_group(backend="gloo")
    return Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, host, device)


def small_llama(hidden: int, mlp: int, heads: int, kv_heads: int, **options: Any) -> Any:
    """A Llama of transformers: four layers with random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp, num_attention_heads=heads,
        num_key_value_heads=kv_heads, num_hidden_layers=4, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def leave() -> None:
    """End the process groups of `join`."""
    if dist.is_initialized():
        dist.destroy_process_group()


def write(out: Path | None, device: torch.device, found: Any) -> None:
    """Write results to a JSON file, with the device and the versions; None: do not."""
    if out is not None:
        about = {"platform": platform.platform(), **environment(device)}
        out.write_text(json.dumps({**about, "found": found}, indent=1) + "\n")


def seen(pattern: DilatedPattern, kv_heads: int, position: int, length: int) -> list[list[range]]:
    """The keys before `length` in the segments of a position, by KV head and branch."""
    found: list[list[range]] = [[] for _ in range(kv_heads)]
    for branch, (segment_length, rate) in enumerate(pattern.branches):
        w = length if segment_length is None else segment_length
        assert not isinstance(w, Window)
        start = position - position % w
        for head, offset in pattern.heads(branch, kv_heads):
            keys = range(start + offset, min(start + w, length), rate)
            if position in keys:
                found[head].append(keys)
    return found


def spread(samples_ms: Sequence[float]) -> dict[str, float]:
    """The median, the lowest and the highest of times."""
    middle, low, high = statistics.median(samples_ms), min(samples_ms), max(samples_ms)
    return {"median_ms": round(middle, 4), "min_ms": round(low, 4), "max_ms": round(high, 4)}


def in_a_row(
    calls: Mapping[str, Callable[[], Any]], count: int, ranks: Ranks, **options: Any
) -> dict[str, dict[str, float]]:
    """The `spread` of each call, of `count` of them in a row; `options` are of `take_turns`."""

    def several(call: Callable[[], Any]) -> None:
        for _ in range(count):
            call()

    rows = {name: partial(several, call) for name, call in calls.items()}
    times = take_turns(rows, ranks.device, group=ranks.host, **options)
    return {name: spread([ms / count for ms in each]) for name, each in times.items()}


def kernels_of(call: Callable[[], Any]) -> dict[str, float]:
    """How many kernels a call launches on the GPU, and their milliseconds together."""
    # The host's activities are left out: with them a step takes half as long again.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_time_total > 0]
    ms = sum(event.device_time_total for event in events) / 1e3
    return {"kernels": sum(event.count for event in events), "kernels_ms": round(ms, 4)}
