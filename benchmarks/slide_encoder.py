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
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from harness import Ranks, join, kernels_of, leave, spread, write
from torch.nn.parallel import DistributedDataParallel

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.bench import take_turns
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
    ranks, found = join(), []
    for count in tiles or [45_680]:
        for name in names:
            options = {"checkpoint": "keep_attention", "chunk_rows": chunk_rows}
            torch._dynamo.config.optimize_ddp = name == "compiled"
            case = Case(name, count, layers, options if name == "checkpointed" else {})
            measured = measure(case, Method(samples, in_a_row, traces), ranks)
            found.append(measured)
            if ranks.rank == 0:
                print(json.dumps(measured), flush=True)
    if ranks.rank == 0:
        write(out, ranks.device, found)
    leave()


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


def measure(case: Case, method: Method, ranks: Ranks) -> dict[str, Any]:
    """Train on one slide; the slowest rank's times, and the largest rank's memory."""
    on_cuda = ranks.device.type == "cuda"
    multiple = math.lcm(*SlideEncoderConfig().pattern.dilation_rates)
    layout = SequenceLayout.contiguous(case.tiles + 1, ranks.size, multiple=multiple)
    how: dict[str, Any] = {"compiles": CASES[case.name], "ddp": case.name != "one_reduction"}
    training = Training(case.layers, ranks.device, group=ranks.world, **how, **case.options)
    torch.manual_seed(1 + ranks.rank)
    slide = training.slide(layout.local_length(ranks.rank) - (ranks.rank == 0))
    losses = []

    def step() -> None:
        losses.append(training.step(slide, layout))

    def steps() -> None:
        for _ in range(method.in_a_row):
            step()

    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    times = take_turns(
        {"": steps}, ranks.device, repeats=method.samples, seconds=600, group=ranks.host,
    )[""]  # fmt: skip
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 1e9 if on_cuda else 0.0)
    if ranks.host is not None:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=ranks.host)
    trace = method.traces and method.traces / f"{case.name}_{case.tiles}_rank{ranks.rank}.json.gz"
    return {
        "case": case.name,
        "positions": case.tiles + 1,
        "ranks": ranks.size,
        "options": case.options,
        "in_a_row": method.in_a_row,
        **spread([ms / method.in_a_row for ms in times]),
        "peak_gb": round(peak.item(), 3),
        "parameters": sum(p.numel() for p in training.parameters),
        "losses": [round(loss.item(), 5) for loss in losses],
        **(by_kind(step, trace) if on_cuda else {}),
    }


def by_kind(step: Any, trace: Path | None) -> dict[str, Any]:
    """Milliseconds of GPU time in a step, by kind of kernel; kinds may run at the same time."""
    kinds: dict[str, float] = defaultdict(float)
    kernels = kernels_of(step, trace)
    for name, (_, ms) in kernels.items():
        known = [kind for kind, parts in KINDS.items() if any(x in name.lower() for x in parts)]
        kinds[known[0] if known else "other"] += ms
    longest = [[name[:120], *found] for name, found in list(kernels.items())[:30]]
    return {"kernels_ms": dict(kinds), "longest_kernels_ms": longest}


if __name__ == "__main__":
    typer.run(main)
