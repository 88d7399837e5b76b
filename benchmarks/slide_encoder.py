"""Training steps of a GigaPath-shaped slide encoder: time, peak memory, and where the time goes.

    python benchmarks/slide_encoder.py --tiles 45680 --out slide.json
    torchrun --nproc-per-node 4 benchmarks/slide_encoder.py --tiles 1048576 --cases checkpointed

12 layers of width 768, 16 heads of 48, GigaPath's pattern, float16 autocast with loss scaling and
fused AdamW; several steps one after the other, as a training makes them. One slide is sharded over
all ranks, whose gradients DDP brings together. Once as it is, once with activation checkpointing;
compiled where `--cases` says so: torch cuts a compiled model in DDP into a graph for each bucket of
gradients, `one_graph` is without these cuts, and `blocks` compiles each block by itself, so that
gradients of one are summed while those of the next are computed. `one_reduction` is `one_graph`
without DDP: behind backward, one all-reduce sums all gradients side by side. A slide of so many
tiles is a sequence of one position more.
`--traces` keeps what the GPU of each rank did in one step, and when the host launched it, for
Perfetto or chrome://tracing.
"""

import json
import math
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch.nn.parallel import DistributedDataParallel

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig

KINDS = {  # a kernel belongs to the first kind that one of these is a part of its name
    "communication": ("nccl",),
    "attention": ("flash", "fmha", "sdpa", "attn", "attention", "_kernel_cutlass", "rows", "merge"),
    "projections": ("gemm", "nvjet", "cutlass", "splitk", "sm90_"),
    "norms": ("layer_norm", "layernorm", "gelu_norm", "gammabeta"),
    "optimizer": ("multi_tensor", "adam"),
}

Compiled = Literal["encoder", "blocks", ""]

CASES: dict[str, Compiled] = {
    "plain": "",
    "checkpointed": "",
    "compiled": "encoder",
    "one_graph": "encoder",
    "one_reduction": "encoder",
    "blocks": "blocks",
}
"""What is compiled; see `Training`."""


def main(
    tiles: Annotated[list[int] | None, typer.Option(help="of a slide; may be repeated")] = None,
    cases: Annotated[str, typer.Option(help=f"some of {', '.join(CASES)}")] = (
        "plain,checkpointed"
    ),
    samples: int = 7,
    in_a_row: Annotated[int, typer.Option(help="steps of a sample")] = 5,
    layers: int = 12,
    chunk_rows: int = 16_384,
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
    traces: Annotated[Path | None, typer.Option(help="folder for a step of each rank")] = None,
) -> None:
    """Train a few steps of each case."""
    names = cases.split(",")
    if unknown := set(names) - set(CASES):
        raise typer.BadParameter(f"no case is called {', '.join(sorted(unknown))}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if many:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    first = not many or dist.get_rank() == 0
    found = []
    for count in tiles or [45_680]:
        for name in names:
            options = {"checkpoint": "keep_attention", "chunk_rows": chunk_rows}
            torch._dynamo.config.optimize_ddp = name == "compiled"
            case = Case(name, count, layers, options if name == "checkpointed" else {})
            measured = measure(case, Method(samples, in_a_row, traces), device, many)
            found.append(measured)
            if first:
                print(json.dumps(measured), flush=True)
    if first and out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    if many:
        dist.destroy_process_group()


class Case(NamedTuple):
    """What is measured: see `main`; `options` are the encoder's."""

    name: str
    tiles: int
    layers: int
    options: dict[str, Any]


class Method(NamedTuple):
    """How it is measured: see `main`."""

    samples: int
    in_a_row: int
    traces: Path | None


class Training:
    """An encoder with a head, and a step on one slide, of which this rank has some tiles.

    Args:
        layers: how many.
        device: where.
        compiles: what is compiled: "encoder", "blocks" (each by itself) or "" (nothing).
        group: all ranks; None: one process.
        ddp: whether DDP brings their gradients together, or else one all-reduce behind backward.
        options: of the encoder.
    """

    def __init__(
        self,
        layers: int,
        device: Any,
        *,
        compiles: Compiled,
        group: Any = None,
        ddp: bool = True,
        **options: Any,
    ) -> None:
        self.device, self.group = torch.device(device), group
        self.ddp = ddp and group is not None
        self.on_cuda = self.device.type == "cuda"
        self.config = SlideEncoderConfig(num_layers=layers)
        torch.manual_seed(0)
        encoder: torch.nn.Module = SlideEncoder(self.config, **options).to(device)
        if compiles == "encoder":
            encoder.compile()
        elif compiles == "blocks":
            for block in encoder.blocks:
                block.compile()
        head: torch.nn.Module = torch.nn.Linear(self.config.embed_dim, 2).to(device)
        self.parameters = [*encoder.parameters(), *head.parameters()]
        if self.ddp:  # gradients of the first layers are ready last
            encoder, head = (
                DistributedDataParallel(x, gradient_as_bucket_view=True) for x in (encoder, head)
            )
        self.encoder, self.head = encoder, head
        # A fused optimizer skips a step of which gradients overflow without asking the device.
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=self.on_cuda)
        self.scaler = torch.amp.GradScaler(enabled=self.on_cuda)
        self.label = torch.ones(1, dtype=torch.long, device=device)

    def slide(self, tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random features and coordinates."""
        features = torch.randn(1, tiles, self.config.in_dim, device=self.device)
        return features, torch.randint(0, 1000, (1, tiles, 2), device=self.device) * 256

    def step(
        self, slide: tuple[torch.Tensor, torch.Tensor], layout: SequenceLayout | None = None
    ) -> torch.Tensor:
        """Forward, backward and the optimizer; the loss, of which other ranks have none."""
        self.optimizer.zero_grad()
        dtype = torch.float16 if self.on_cuda else torch.bfloat16
        with torch.autocast(self.device.type, dtype):
            logits = self.head(self.encoder(*slide, group=self.group, layout=layout).cls)
        if logits.shape[1]:
            loss = F.cross_entropy(logits[:, 0].float(), self.label, label_smoothing=0.1)
        else:
            loss = logits.float().sum()  # of no rows
        ranks = dist.get_world_size(self.group) if self.ddp else 1
        self.scaler.scale(loss * ranks).backward()  # of which DDP takes the mean
        if self.group is not None and not self.ddp:
            self._sum_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _sum_gradients(self) -> None:
        """In one all-reduce; afterwards gradients are views of what it sums."""
        gradients: list[Any] = [p.grad for p in self.parameters]
        whole = torch.cat([x.flatten() for x in gradients])
        dist.all_reduce(whole, group=self.group)
        parts = whole.split([p.numel() for p in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def measure(case: Case, method: Method, device: Any, many: bool) -> dict[str, Any]:
    """Train on one slide; the slowest rank's times, and the largest rank's memory."""
    cuda = torch.cuda.is_available()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
    group = dist.group.WORLD if many else None
    multiple = math.lcm(*SlideEncoderConfig().pattern.dilation_rates)
    layout = SequenceLayout.contiguous(case.tiles + 1, ranks, multiple=multiple)
    how = {"compiles": CASES[case.name], "ddp": case.name != "one_reduction"}
    training = Training(case.layers, device, group=group, **how, **case.options)
    torch.manual_seed(1 + rank)
    slide = training.slide(layout.local_length(rank) - (rank == 0))

    def step() -> torch.Tensor:
        return training.step(slide, layout)

    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    losses, times = [step() for _ in range(3)], []  # the first compile
    for _ in range(method.samples):
        if cuda:
            torch.cuda.synchronize()
        if many:
            dist.barrier()
        before = time.perf_counter()
        losses += [step() for _ in range(method.in_a_row)]
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - before) * 1e3 / method.in_a_row)
    summary = torch.tensor([*times, torch.cuda.max_memory_allocated() if cuda else 0.0])
    summary = summary.to(torch.float64)
    if many:
        dist.all_reduce(summary, op=dist.ReduceOp.MAX)
    *slowest, peak = summary.tolist()
    trace = method.traces and method.traces / f"{case.name}_{case.tiles}_rank{rank}.json.gz"
    return {
        "case": case.name,
        "positions": case.tiles + 1,
        "ranks": ranks,
        "options": case.options,
        "in_a_row": method.in_a_row,
        "median_ms": round(statistics.median(slowest), 2),
        "min_ms": round(min(slowest), 2),
        "max_ms": round(max(slowest), 2),
        "peak_gb": round(peak / 1e9, 3),
        "parameters": sum(p.numel() for p in training.parameters),
        "losses": [round(loss.item(), 5) for loss in losses],
        **(kernels(step, trace) if cuda else {}),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def kernels(step: Any, trace: Path | None) -> dict[str, Any]:
    """Milliseconds of GPU time in a step, by kind of kernel; kinds may run at the same time.

    Args:
        step: makes one.
        trace: a file to write for what happened when; None: none.
    """
    # With what the host does, too, it takes half as long again.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    kinds: dict[str, float] = defaultdict(float)
    longest = sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
    for event in longest:
        name = event.key.lower()
        kind = next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "other")
        kinds[kind] += event.device_time_total / 1e3
    return {
        "kernels_ms": {kind: round(ms, 2) for kind, ms in sorted(kinds.items())},
        "longest_kernels_ms": [
            [event.key[:120], event.count, round(event.device_time_total / 1e3, 2)]
            for event in longest[:30]
        ],
    }


if __name__ == "__main__":
    typer.run(main)
