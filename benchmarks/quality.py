"""What dilation is worth: models of text and of slides with one pattern each, trained alike.

    python benchmarks/quality.py --out found                   # every arm, then the page
    python benchmarks/quality.py --out found --arms dense_32k,window_32k --seeds 0,1
    python benchmarks/quality.py --out found --page            # the page alone, of what is there
    python benchmarks/quality.py --plan                        # operations and seconds of each arm
    python benchmarks/quality.py --small --out found           # tiny, on a CPU

Text is Python sources as bytes. At each step all arms see the same bytes, cut into sequences of the
arm's length. OUT/ARM-SEED.json has all numbers of a training; one that is there is not run again.
"""

from __future__ import annotations

import hashlib
import json
import math
import site
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from harness import write

from ring_dilated_attention import DilatedPattern, SequenceLayout, Window
from ring_dilated_attention.nn import LongNet, LongNetConfig
from ring_dilated_attention.plan import costs, plan_attention

Branches = Sequence[tuple[Any, int]]
DENSE: Branches = [(None, 1)]
LONGNET: Branches = [(2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12)]


def window(left: int) -> Branches:
    """The window of that many positions before a token."""
    return [(Window(left), 1)]


class Arm(NamedTuple):
    """A model of text: training length, branches of each block in turn, gradient, seeds."""

    length: int
    blocks: Sequence[Branches]
    seeds: int = 1
    gradient: str = "exact"


ARMS = {
    "dense_2k": Arm(2048, [DENSE]),
    "dense_8k": Arm(8192, [DENSE]),
    "dense_32k": Arm(32768, [DENSE], 3),
    "longnet_8k": Arm(8192, [LONGNET[:3]]),
    "longnet_32k": Arm(32768, [LONGNET], 3),
    "longnet_32k_detached": Arm(32768, [LONGNET], 3, "detached"),  # torchscale's gradient
    # The operations of LongNet's five branches within 2%:
    "window_32k": Arm(32768, [window(2207)], 3),
    "strided_32k": Arm(32768, [[(4096, 1), (None, 16)]], 3),
    # Segments that are not nested: no two borders are at the same place.
    "crossing_32k": Arm(32768, [[(2048, 1), (3583, 2), (8779, 4), (17011, 6), (None, 12)]]),
    "window_and_dense": Arm(32768, [window(1023)] * 3 + [DENSE]),
    "window_and_dilated": Arm(32768, [window(1023), LONGNET]),
}
LENGTHS = 2048, 8192, 32768
"""Of sequences in tests; --small divides these and all of `ARMS` by 128."""
BUCKETS = 0, 2048, 4096, 8192, 16384, 32768
TEST_BYTES = 2_600_000
MATRIX_RATE, ATTENTION_RATE = 350e12, 450e12
"""Guesses for an H200, forward and backward, for --plan."""


class Claim(NamedTuple):
    """A number below a bound, written down before any run: bits per byte, or a ratio."""

    text: str
    number: str  # of `numbers_of`, less that of `than`
    arm: str
    than: str | None
    bound: float
    half_width: bool = False  # whether the bound is one on half of the interval


CLAIMS = (
    Claim("far context is used: bits at 16-32K less those at 0-2K", "far", "longnet_32k", None,
          -0.05),
    Claim("dilated less dense, at 32K", "bits", "longnet_32k", "dense_32k", 0.02),
    Claim("its operations, of those of dense", "flops", "longnet_32k", "dense_32k", 0.255),
    Claim("dilated less the window alone", "bits", "longnet_32k", "window_32k", -0.01),
    Claim("dilated less one strided branch", "bits", "longnet_32k", "strided_32k", 0.0),
    Claim("torchscale's gradient less the exact one: half the interval", "bits",
          "longnet_32k_detached", "longnet_32k", 0.005, True),
)  # fmt: skip
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for intervals of 95%, by the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes: those of the issue, or tiny ones."""

    scale: int = 1
    layers: int = 8
    width: int = 512
    batch: int = 131_072  # tokens of one forward and backward

    @property
    def longest(self) -> int:
        return LENGTHS[-1] // self.scale

    def pattern(self, branches: Branches) -> DilatedPattern:
        """The pattern of these branches, lengths divided by the scale."""

        def scaled(w: Any) -> Any:
            if isinstance(w, Window):
                return Window(w.left // self.scale, w.right // self.scale)
            return None if w is None else w // self.scale

        return DilatedPattern([scaled(w) for w, _ in branches], [r for _, r in branches])

    def patterns(self, arm: Arm) -> list[DilatedPattern]:
        """One for each block."""
        return [self.pattern(arm.blocks[i % len(arm.blocks)]) for i in range(self.layers)]


SMALL = Shape(scale=128, layers=2, width=64, batch=1024)


# ---------------------------------------------------------------------------------------- text


class Text(NamedTuple):
    """Blocks of bytes, (blocks, longest + 1) uint8: the last byte is a label only."""

    train: torch.Tensor
    test: torch.Tensor
    about: dict[str, Any]


def sources() -> list[Path]:
    """Folders with the Python sources of this machine: installed packages, standard library."""
    paths = sysconfig.get_paths()
    found = [paths["purelib"], paths["platlib"], *site.getsitepackages(), paths["stdlib"]]
    return [path for path in dict.fromkeys(map(Path, found)) if path.is_dir()]


def packages(folders: Sequence[Path]) -> Iterator[tuple[str, list[Path]]]:
    """Packages by name, in path order; the loose modules of a folder are one package."""
    for folder in folders:
        entries = sorted(folder.iterdir())
        yield f"{folder.name}/*.py", [x for x in entries if x.suffix == ".py" and x.is_file()]
        for entry in entries:
            if entry.is_dir() and entry not in folders and entry.name != "__pycache__":
                yield f"{folder.name}/{entry.name}", sorted(entry.rglob("*.py"))


def is_held_out(name: str) -> bool:
    """Whether a package is for tests: by its name, one in ten."""
    return hashlib.sha256(name.encode()).digest()[0] < 26


def read(folders: Sequence[Path], longest: int, train_bytes: int, test_bytes: int) -> Text:
    """Cut packages into blocks until there are enough: a file of the same bytes only once.

    Of one package at most a quarter of `test_bytes` is for tests. What is left of a package behind
    its last whole block is left out.
    """
    seen: set[bytes] = set()
    kept: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    held: list[str] = []
    wanted = {False: train_bytes // longest, True: -(-test_bytes // longest)}
    count = {False: 0, True: 0}
    for name, paths in packages(folders):
        if all(count[each] >= wanted[each] for each in wanted):
            break
        is_test = is_held_out(name)
        most = max(1, wanted[True] // 4) if is_test else wanted[False]
        most = min(most, wanted[is_test] - count[is_test])
        document = bytearray()
        for path in paths:
            if len(document) > most * longest:
                break
            try:
                content = path.read_bytes()
            except OSError:  # a broken link
                continue
            digest = hashlib.sha256(content).digest()
            if digest not in seen:
                seen.add(digest)
                document += content
        blocks = min((len(document) - 1) // longest, most)
        if blocks > 0:
            whole = torch.frombuffer(document, dtype=torch.uint8)
            kept[is_test].append(whole.unfold(0, longest + 1, longest)[:blocks].clone())
            count[is_test] += blocks
            held += [name] * is_test
    if not min(count.values()):
        sys.exit(f"too little text in {', '.join(map(str, folders))}: {count} blocks of {longest}")
    train, test = (torch.cat(kept[each]) for each in (False, True))
    digest = hashlib.sha256(train.numpy().tobytes() + test.numpy().tobytes()).hexdigest()[:16]
    about = {
        "train_bytes": len(train) * longest,
        "test_bytes": len(test) * longest,
        "held_out": held,
        "sha256": digest,
    }
    return Text(train, test, about)


def buckets(nats: torch.Tensor, borders: Sequence[int]) -> list[float]:
    """Bits per byte by position, of losses (sequences, positions) in nats."""
    rows = [nats[:, a:b] for a, b in zip(borders, borders[1:], strict=False)]
    return [float(x.double().mean()) / math.log(2) for x in rows if x.numel()]


# ------------------------------------------------------------------------------------ training


def flops_of(arm: Arm, shape: Shape, tokens: int) -> tuple[float, float]:
    """Operations of a training: of matrix products, of attention."""
    weights = 12 * shape.layers * shape.width**2 + 256 * shape.width
    length, heads = arm.length // shape.scale, 8
    size = costs.TensorSize(batch=1, head_dim=shape.width // heads, element_size=2)
    forward = 0
    for pattern in shape.patterns(arm):
        layout = SequenceLayout.contiguous(length, 1)
        plan = plan_attention(pattern, layout, is_causal=True, num_heads=heads)
        forward += sum(costs.flops_by_rank(plan, size))
    return 6.0 * weights * tokens, 3.5 * forward * (tokens / length)


def make_model(arm: Arm, shape: Shape, seed: int, device: torch.device) -> LongNet:
    """With this arm's pattern in each block; equal weights for equal seeds."""
    torch.manual_seed(seed)
    config = LongNetConfig(
        num_layers=shape.layers,
        embed_dim=shape.width,
        num_heads=8,
        ffn_dim=4 * shape.width,
        patterns=shape.patterns(arm),
    )
    model = LongNet(config).to(device)
    for block in model.blocks:
        block.attention.branch_gradients = arm.gradient
    return model


def rate_at(step: int, steps: int) -> float:
    """The learning rate's factor: a tenth of the steps up, then a cosine down to a tenth."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


@torch.no_grad()
def test(model: LongNet, text: Text, shape: Shape, length: int) -> list[float]:
    """Bits per byte by position, of the same bytes whatever the length of sequences."""
    device = model.embedding.weight.device
    found = []
    for blocks in text.test.split(max(1, shape.batch // shape.longest)):
        blocks = blocks.to(device).long()
        tokens, labels = (x.reshape(-1, length) for x in (blocks[:, :-1], blocks[:, 1:]))
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens)
        nats = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
        found.append(nats.view_as(labels).cpu())
    return buckets(torch.cat(found), [x // shape.scale for x in BUCKETS])


def train(
    arm: Arm, seed: int, text: Text, shape: Shape, device: torch.device, *,
    tokens: int, step_tokens: int, lr: float, compiles: bool,
) -> dict[str, Any]:  # fmt: skip
    """Train one model and test it."""
    began = time.monotonic()
    on_cuda = device.type == "cuda"
    torch.compiler.reset()
    model = make_model(arm, shape, seed, device)
    for block in model.blocks:
        if compiles:
            block.compile(dynamic=False)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    per_step, steps = step_tokens // shape.longest, tokens // step_tokens
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-per_step * steps // len(text.train))
    order = torch.cat([torch.randperm(len(text.train), generator=generator) for _ in range(epochs)])
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, start = [], began
    for step in range(steps):
        if step == min(5, steps - 1):  # kernels are compiled
            if on_cuda:
                torch.cuda.synchronize()
            first, start = step, time.monotonic()
        total = torch.zeros((), device=device)
        chosen = text.train[order[step * per_step : (step + 1) * per_step]]
        for blocks in chosen.split(max(1, shape.batch // shape.longest)):
            blocks = blocks.to(device, non_blocking=True).long()
            length = arm.length // shape.scale
            tokens_bn, labels = (x.reshape(-1, length) for x in (blocks[:, :-1], blocks[:, 1:]))
            with torch.autocast("cuda", torch.bfloat16, enabled=on_cuda):
                loss = model.loss(tokens_bn, labels) / step_tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr * rate_at(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    if on_cuda:
        torch.cuda.synchronize()
    seconds = time.monotonic() - start
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    with torch.compiler.set_stance("force_eager"):
        lengths = [x // shape.scale for x in LENGTHS]
        bits = {str(x): test(model, text, shape, x) for x in lengths}
    matrix, attention = flops_of(arm, shape, steps * step_tokens)
    return {
        "bits": bits,
        "loss": [round(float(x) / math.log(2), 4) for x in losses],
        "flops": matrix + attention,
        "attention_flops": attention,
        "tokens_per_s": (steps - first) * step_tokens / seconds,
        "peak_bytes": peak,
        "seconds": time.monotonic() - began,
        "text": text.about,
        "settings": {"tokens": steps * step_tokens, "step_tokens": step_tokens, "lr": lr},
    }


# ---------------------------------------------------------------------------------------- runs


def jobs_of(arms: str, seeds: str) -> list[tuple[str, int]]:
    """Arms and seeds, as the options name them; the first seed of every arm comes first."""
    names = arms.split(",") if arms else list(ARMS)
    if unknown := [name for name in names if name not in ARMS]:
        sys.exit(f"no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    given = [int(x) for x in seeds.split(",")] if seeds else None
    jobs = [(name, seed) for name in names for seed in given or range(ARMS[name].seeds)]
    return sorted(jobs, key=lambda job: job[1])


def show_plan(jobs: Sequence[tuple[str, int]], shape: Shape, tokens: int) -> None:
    """Operations and seconds at the rates above."""
    total = 0.0
    for name, seed in jobs:
        matrix, attention = flops_of(ARMS[name], shape, tokens)
        seconds = matrix / MATRIX_RATE + attention / ATTENTION_RATE
        total += seconds
        print(f"{name}-{seed}: {matrix:.3g} + {attention:.3g} operations, {seconds:.0f} s")
    print(f"{len(jobs)} trainings of {tokens:,} tokens: {total / 60:.1f} minutes")


def run_share(
    rank: int, gpus: int, jobs: Sequence[tuple[str, int]], out: Path, data: Path | None,
    shape: Shape, options: dict[str, Any],
) -> None:  # fmt: skip
    """Train every `gpus`-th of the jobs, on GPU number `rank` where there is one."""
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    text: Text | None = None
    for name, seed in jobs[rank::gpus]:
        path = out / f"{name}-{seed}.json"
        if path.exists():
            continue
        if text is None:
            folders = sources() if data is None else [data]
            test_bytes = 4 * shape.longest if shape is SMALL else TEST_BYTES
            text = read(folders, shape.longest, options["tokens"], test_bytes)
            text = text._replace(train=text.train.pin_memory() if on_cuda else text.train)
            print(f"text: {text.about}", flush=True)
        found = train(ARMS[name], seed, text, shape, device, **options)
        found |= {"arm": name, "seed": seed, "command": " ".join(sys.argv)}
        write(path, device, found)
        last = found["bits"][str(shape.longest)]
        print(
            f"{name}-{seed}: {found['seconds']:.0f} s, {found['tokens_per_s']:,.0f} tokens/s, "
            f"{found['peak_bytes'] / 2**30:.1f} GiB, loss {found['loss'][-1]}, bits {last}",
            flush=True,
        )


def main(
    out: Annotated[Path, typer.Option(help="folder of results")] = Path("quality"),
    arms: Annotated[str, typer.Option(help="names, by commas; all")] = "",
    seeds: Annotated[str, typer.Option(help="numbers, by commas; as many as an arm has")] = "",
    tokens: Annotated[int, typer.Option(help="of each training")] = 52_428_800,
    step_tokens: int = 262_144,
    lr: Annotated[float, typer.Option(help="the highest learning rate")] = 2e-3,
    data: Annotated[Path | None, typer.Option(help="folder of packages")] = None,
    gpus: Annotated[int, typer.Option(help="trainings at a time")] = 1,
    compiles: Annotated[bool, typer.Option("--compile/--eager", help="blocks")] = True,
    small: Annotated[bool, typer.Option(help="a tiny model of tiny sequences")] = False,
    plan: Annotated[bool, typer.Option(help="print what each arm takes, train nothing")] = False,
) -> None:
    """Train, test, write."""
    shape, jobs = SMALL if small else Shape(), jobs_of(arms, seeds)
    if small:
        tokens, step_tokens = min(tokens, 8192), min(step_tokens, 1024)
    if plan:
        return show_plan(jobs, shape, tokens)
    out.mkdir(parents=True, exist_ok=True)
    options = {"tokens": tokens, "step_tokens": step_tokens, "lr": lr, "compiles": compiles}
    share = gpus, jobs, out, data, shape, options
    if gpus == 1:
        run_share(0, *share)
    else:
        torch.multiprocessing.spawn(run_share, share, nprocs=gpus)


if __name__ == "__main__":
    typer.run(main)
