"""What dilation is worth: models of text and of slides with one pattern each, trained alike.

    python benchmarks/quality.py --out found                   # every arm, then the page
    python benchmarks/quality.py --out found --arms text       # or slides, or names by commas
    python benchmarks/quality.py --out found --page            # the page alone, of what is there
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
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from harness import write

from ring_dilated_attention import DilatedPattern, SequenceLayout, Window, nn
from ring_dilated_attention.plan import costs, plan_attention

Branches = Sequence[tuple[Any, int]]  # segment length or window, dilation rate
DENSE: Branches = [(None, 1)]
WINDOW: Branches = [(Window(1023), 1)]
LONGNET: Branches = [(2048, 1), (4096, 2), (8192, 4), (16384, 6), (32768, 12)]


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
    "window_32k": Arm(32768, [[(Window(2207), 1)]], 3),
    "strided_32k": Arm(32768, [[(4096, 1), (None, 16)]], 3),
    # Segments that are not nested: no two borders are at the same place.
    "crossing_32k": Arm(32768, [[(2048, 1), (3583, 2), (8779, 4), (17011, 6), (None, 12)]]),
    "window_and_dense": Arm(32768, [WINDOW] * 3 + [DENSE]),
    "window_and_dilated": Arm(32768, [WINDOW, LONGNET]),
}
SLIDES = {
    "slide_closed": [(128, 1), (512, 2), (1024, 4)],  # in blocks of a quarter of the slide
    "slide_crossing": [(128, 1), (724, 2), (4096, 4)],  # GigaPath's, of slides 8 times as large
    "slide_window": [(Window(282, 282), 1)],  # the operations of the line above
    "slide_dense": DENSE,
}
SLIDE_SEEDS, SLIDE_STEPS, SLIDE_TILES, TESTED_SLIDES = 2, 1500, 4096, 256
DISTANCES = 128, 256, 512, 1024, 2048, 3584
LENGTHS = 2048, 8192, 32768
"""Of sequences in tests; --small divides these and all of `ARMS` by 128."""
BUCKETS = 0, 2048, 4096, 8192, 16384, 32768
TEST_BYTES = 2_600_000
MUON = 5  # the learning rate of blocks' matrices, times that of all else


class Claim(NamedTuple):
    """A number below a bound, written down before any run: bits per byte, or a ratio."""

    text: str
    number: str  # of `number_of`, less that of `than`
    arm: str
    than: str | None
    bound: float
    half_width: bool = False  # whether the bound is on half of the interval


CLAIMS = (
    Claim("far context is used: bits at 16-32K less 0-2K", "far", "longnet_32k", None, -0.05),
    Claim("dilated less dense, at 32K", "bits", "longnet_32k", "dense_32k", 0.02),
    Claim("its operations, of those of dense", "flops", "longnet_32k", "dense_32k", 0.255),
    Claim("dilated less the window alone", "bits", "longnet_32k", "window_32k", -0.01),
    Claim("dilated less one strided branch", "bits", "longnet_32k", "strided_32k", 0.0),
    Claim("torchscale's gradient less the exact one: half the interval", "bits",
          "longnet_32k_detached", "longnet_32k", 0.005, True),
)  # fmt: skip
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t of 95%, by the number of seeds


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes: those of the issue, or tiny ones."""

    scale: int = 1
    layers: int = 8
    width: int = 512
    batch: int = 131_072  # tokens of one forward and backward

    @property
    def longest(self) -> int:
        """Of sequences."""
        return LENGTHS[-1] // self.scale

    def pattern(self, branches: Branches) -> DilatedPattern:
        """The pattern of these branches, lengths divided by the scale."""
        lengths = [
            tuple(x // self.scale for x in w) if isinstance(w, Window) else w and w // self.scale
            for w, _ in branches
        ]
        return DilatedPattern(lengths, [r for _, r in branches])

    def patterns(self, arm: Arm) -> list[DilatedPattern]:
        """One for each block."""
        return [self.pattern(arm.blocks[i % len(arm.blocks)]) for i in range(self.layers)]


SMALL = Shape(scale=128, layers=2, width=64, batch=1024)
SLIDE, SMALL_SLIDE = Shape(layers=4, width=128), Shape(scale=16, layers=2, width=32)


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


def is_held_out(name: str, files: int) -> bool:
    """Whether a package is for tests: by its name, one in five of those that are not large."""
    return files <= 500 and hashlib.sha256(name.encode()).digest()[0] < 51


def read(folders: Sequence[Path], longest: int, train_bytes: int, test_bytes: int) -> Text:
    """Cut packages into blocks until there are enough: a file of the same bytes only once.

    Of one package at most a quarter of `test_bytes` is for tests. What is left of a package behind
    its last whole block is left out.
    """
    seen: set[bytes] = set()
    kept: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    missing = {False: -(-train_bytes // longest), True: -(-test_bytes // longest)}
    most_of_one, held = max(1, missing[True] // 4), []
    for name, paths in packages(folders):
        is_test, document = is_held_out(name, len(paths)), bytearray()
        most = min(most_of_one, missing[True]) if is_test else missing[False]
        for path in (path for path in paths if path.is_file()):
            if len(document) > most * longest:
                break
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            if digest not in seen:
                seen.add(digest)
                document += content
        if (blocks := min((len(document) - 1) // longest, most)) > 0:
            whole = torch.frombuffer(document, dtype=torch.uint8)
            kept[is_test].append(whole.unfold(0, longest + 1, longest)[:blocks].clone())
            missing[is_test] -= blocks
            held += [name] * is_test
    if not all(kept.values()):
        sys.exit(f"too little text in {', '.join(map(str, folders))} for blocks of {longest}")
    train, test = (torch.cat(kept[each]) for each in (False, True))
    digest = hashlib.sha256(train.numpy().tobytes() + test.numpy().tobytes()).hexdigest()[:16]
    about = {"train_bytes": len(train) * longest, "test_bytes": len(test) * longest}
    return Text(train, test, about | {"held_out": held, "sha256": digest})


def buckets(nats: torch.Tensor, borders: Sequence[int]) -> list[float]:
    """Bits per byte by position, of losses (sequences, positions) in nats."""
    rows = [nats[:, a:b] for a, b in pairwise(borders)]
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


def make_model(arm: Arm, shape: Shape, seed: int, device: torch.device) -> nn.LongNet:
    """With this arm's pattern in each block; equal weights for equal seeds."""
    torch.manual_seed(seed)
    config = nn.LongNetConfig(
        num_layers=shape.layers,
        embed_dim=shape.width,
        num_heads=8,
        ffn_dim=4 * shape.width,
        patterns=shape.patterns(arm),
    )
    model = nn.LongNet(config).to(device)
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
def test(model: nn.LongNet, text: Text, shape: Shape, length: int) -> list[float]:
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
    tokens: int, step_tokens: int, lr: float,
) -> dict[str, Any]:  # fmt: skip
    """Train one model and test it."""
    began = time.monotonic()
    on_cuda, length = device.type == "cuda", arm.length // shape.scale
    torch.compiler.reset()
    model = make_model(arm, shape, seed, device)
    autocast = partial(torch.autocast, "cuda", torch.bfloat16, on_cuda, cache_enabled=False)
    if on_cuda:  # in a graph: a slow CPU launches kernels later than the GPU could compute them
        torch.cuda.reset_peak_memory_stats()
        for block in model.blocks:
            block.compile(dynamic=False)
        sample = torch.zeros(step_tokens // length, length, dtype=torch.long, device=device)
        with autocast():
            torch.cuda.make_graphed_callables(model, (sample, sample.clone()))
    matrices = [x for x in model.blocks.parameters() if x.dim() == 2]
    others = [x for x in model.parameters() if all(x is not y for y in matrices)]
    optimizers = [
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"),
    ]
    per_step, steps = step_tokens // shape.longest, tokens // step_tokens
    generator = torch.Generator().manual_seed(seed)
    epochs = -(-per_step * steps // len(text.train))
    order = torch.cat([torch.randperm(len(text.train), generator=generator) for _ in range(epochs)])
    losses, start = [], time.monotonic()
    for step in range(steps):
        blocks = text.train[order[step * per_step : (step + 1) * per_step]].to(device).long()
        tokens_bn, labels = (x.reshape(-1, length) for x in (blocks[:, :-1], blocks[:, 1:]))
        with autocast():
            loss = model(tokens_bn, labels) / step_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, times in zip(optimizers, (1, MUON), strict=True):
            optimizer.param_groups[0]["lr"] = times * lr * rate_at(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    nats = torch.stack(losses).tolist()  # waits for the GPU
    seconds = time.monotonic() - start
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    model.__dict__.pop("forward", None)  # the graph's, which holds the model, too
    with torch.compiler.set_stance("force_eager"):
        bits = {str(x): test(model, text, shape, x // shape.scale) for x in LENGTHS}
    matrix, attention = flops_of(arm, shape, steps * step_tokens)
    return {
        "bits": bits,
        "loss": [round(x / math.log(2), 4) for x in nats],
        "flops": matrix + attention,
        "attention_flops": attention,
        "tokens_per_s": steps * step_tokens / seconds,
        "peak_bytes": peak,
        "seconds": time.monotonic() - began,
        "text": text.about,
        "settings": {"tokens": steps * step_tokens, "step_tokens": step_tokens, "lr": lr},
    }


# -------------------------------------------------------------------------------------- slides


def made_up(
    distance: torch.Tensor, tiles: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (slides, tiles, 16) along the curve, and labels (slides,), 0.0 or 1.0.

    A slide has two regions of marked tiles at its `distance`, each of one of two kinds; the label
    says whether the kinds are equal. What adds up over regions that do not see each other is right
    for 3 of the 4 pairs of kinds at most.
    """
    count, device, region = len(distance), distance.device, tiles // 32
    features = torch.randn(count, tiles, 16, generator=generator, device=device) / 2
    kinds = torch.randint(2, (count, 2), generator=generator, device=device)
    room = tiles - region - distance
    start = (torch.rand(count, generator=generator, device=device) * room).long()
    rows = torch.arange(count, device=device)[:, None]
    for i in range(2):
        columns = (start + i * distance)[:, None] + torch.arange(region, device=device)
        features[rows, columns, 0] += 4
        features[rows, columns, 1 + kinds[:, i : i + 1]] += 4
    return features, (kinds[:, 0] == kinds[:, 1]).float()


def train_slides(
    branches: Branches, seed: int, shape: Shape, device: torch.device, steps: int
) -> dict[str, Any]:
    """Train a small encoder of slides; its accuracy by the distance of the two regions."""
    began, tiles, batch = time.monotonic(), SLIDE_TILES // shape.scale, 16
    torch.manual_seed(seed)
    config = nn.SlideEncoderConfig(
        in_dim=16, num_layers=shape.layers, embed_dim=shape.width, num_heads=8, tile_size=1.0,
        ffn_dim=4 * shape.width, patterns=[shape.pattern(branches)] * shape.layers, pooling="mean",
    )  # fmt: skip
    encoder, head = nn.SlideEncoder(config).to(device), torch.nn.Linear(shape.width, 1).to(device)
    side = math.isqrt(tiles)
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side)).to(device)
    places = grid[nn.hilbert_order(grid)]
    distances = torch.tensor([x // shape.scale for x in DISTANCES], device=device)
    generator = torch.Generator(device).manual_seed(seed)

    def logits(features: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            encoded = encoder(features, places.expand(len(features), -1, -1))
            return head(encoded.cls).float().flatten()

    parameters = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for step in range(steps):
        chosen = torch.randint(len(distances), (batch,), generator=generator, device=device)
        features, labels = made_up(distances[chosen], tiles, generator)
        loss = F.binary_cross_entropy_with_logits(logits(features), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = 2e-3 * rate_at(step, steps)
        optimizer.step()
    generator.manual_seed(1_000_000)  # the same tests for all arms
    accuracy, turns = {}, TESTED_SLIDES // shape.scale // batch
    with torch.no_grad():
        for name, distance in zip(DISTANCES, distances, strict=True):
            slides = (made_up(distance.expand(batch), tiles, generator) for _ in range(turns))
            right = [(logits(x) > 0) == labels.bool() for x, labels in slides]
            accuracy[str(name)] = float(torch.cat(right).float().mean())
    settings = {"steps": steps, "batch": batch, "tiles": tiles}
    return {"accuracy": accuracy, "seconds": time.monotonic() - began, "settings": settings}


# ---------------------------------------------------------------------------------------- page


def bits_at(run: dict[str, Any], length: int) -> float:
    """Bits per byte at all positions of sequences of that length."""
    widths = [b - a for a, b in pairwise(BUCKETS)]
    found = run["bits"][str(length)]
    return sum(map(math.prod, zip(found, widths, strict=False))) / sum(widths[: len(found)])


def number_of(run: dict[str, Any], number: str) -> float:
    """One of the numbers that a `Claim` is about."""
    if number == "far":
        return run["bits"][str(LENGTHS[-1])][-1] - run["bits"][str(LENGTHS[-1])][0]
    return bits_at(run, LENGTHS[-1]) if number == "bits" else run[number]


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of Student's 95% interval around it; NaN of one sample."""
    half = math.nan
    if len(samples) > 1:
        half = T95[min(len(samples), 5)] * statistics.stdev(samples) / len(samples) ** 0.5
    return statistics.mean(samples), half


def verdict(claim: Claim, runs: dict[str, dict[int, Any]]) -> tuple[str, str]:
    """What was measured, and whether the claim holds: by the whole interval, seed by seed."""
    mine, others = runs.get(claim.arm, {}), runs.get(claim.than or claim.arm, {})
    samples = []
    for seed in sorted(mine.keys() & others.keys()):
        found = number_of(mine[seed], claim.number)
        other = number_of(others[seed], claim.number) if claim.than else 0.0
        samples.append(found / other if claim.number == "flops" else found - other)
    if len(samples) < 2:
        return "", "not measured"
    mean, half = interval(samples)
    shown = f"{mean:+.4f} ± {half:.4f} ({len(samples)} seeds)"
    if claim.half_width:
        return shown, "holds" if half <= claim.bound else "fails"
    if mean + half <= claim.bound:
        return shown, "holds"
    return shown, "fails" if mean - half > claim.bound else "undecided"


def runs_in(out: Path) -> tuple[dict[str, dict[int, Any]], list[dict[str, Any]]]:
    """Trainings by arm and seed, and all documents: those of text with one text and settings."""
    documents = [json.loads(path.read_text()) for path in sorted(out.glob("*-*.json"))]
    runs: dict[str, dict[int, Any]] = {name: {} for name in (*ARMS, *SLIDES)}
    for each in documents:
        runs[each["found"]["arm"]][each["found"]["seed"]] = each["found"]
    text = [x["found"] for x in documents if x["found"]["arm"] in ARMS]
    kinds = {json.dumps([x["settings"], x["text"]["sha256"]]) for x in text}
    if len(kinds) != 1:
        sys.exit(f"{out} needs trainings of text, of one text with one setting; it has {kinds}")
    return {name: found for name, found in runs.items() if found}, documents


def draw(runs: dict[str, dict[int, Any]], out: Path) -> None:
    """The two figures: bits by position, bits against operations."""
    import matplotlib.pyplot as plt

    middles = [(a + b) / 2048 for a, b in pairwise(BUCKETS)]
    figures = [plt.subplots(figsize=(8, 4.5)) for _ in range(2)]
    by_position, by_flops = (axes for _, axes in figures)
    for i, name in enumerate(x for x in runs if x in ARMS):
        found, marker = list(runs[name].values()), "osv^D*PX<>h"[i]
        bits = zip(*(x["bits"][str(LENGTHS[-1])] for x in found), strict=True)
        style = {"marker": marker, "color": plt.colormaps["tab20"](i), "label": name}
        by_position.plot(middles, [*map(statistics.mean, bits)], **style)
        at_32k = [bits_at(x, LENGTHS[-1]) for x in found]
        by_flops.plot([x["flops"] for x in found], at_32k, linestyle="", **style)
    by_position.set(xlabel="position (thousands of bytes)", ylabel="bits per byte")
    by_flops.set(xlabel="operations of training", xscale="log", ylabel="bits per byte, 32K")
    for (figure, axes), name in zip(figures, ("position", "flops"), strict=True):
        low = min(min(line.get_ydata()) for line in axes.lines)
        axes.set_ylim(low - 0.02, min(axes.get_ylim()[1], low + 0.25))  # 2K models at 32K are worse
        axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
        figure.tight_layout()
        figure.savefig(out / f"quality_{name}.png", dpi=120)


def write_page(out: Path) -> None:
    """OUT/quality.md with figures and quality.json, of the JSON files of OUT."""
    runs, documents = runs_in(out)
    draw(runs, out)
    text = {name: list(found.values()) for name, found in runs.items() if name in ARMS}
    mean = {name: statistics.mean(bits_at(x, LENGTHS[-1]) for x in text[name]) for name in text}
    best = min(mean, key=mean.__getitem__)
    lines = [
        f"# What dilation is worth\n\nLowest at 32K: **{best}**, {mean[best]:.3f} bits per byte.\n",
        "| claim, fixed before running | bound | measured | |\n|---|---|---|---|",
    ]
    for claim in CLAIMS:
        lines.append(f"| {claim.text} | {claim.bound} | {' | '.join(verdict(claim, runs))} |")
    lines += [
        "\n± is half of Student's 95% interval over seeds, of differences seed by seed: a claim "
        "holds or fails if all of it does.\n",
        "| arm | at 2K | at 8K | at 32K | 16-32K less 0-2K | 10¹⁵ operations | tokens/s | GiB | "
        f"seeds |\n{'|---' * 9}|",
    ]
    for name, found in text.items():
        bits = [f"{statistics.mean(bits_at(x, n) for x in found):.3f}" for n in LENGTHS]
        if len(found) > 1:
            bits[-1] += f"±{interval([bits_at(x, LENGTHS[-1]) for x in found])[1]:.3f}"
        far = statistics.mean(number_of(x, "far") for x in found)
        speed = statistics.median(x["tokens_per_s"] for x in found)
        peak = max(x["peak_bytes"] for x in found) / 2**30
        cells = [name, *bits, f"{far:+.3f}", f"{found[0]['flops'] / 1e15:.3g}", f"{speed:,.0f}"]
        lines.append(f"| {' | '.join([*cells, f'{peak:.1f}', str(len(found))])} |")
    for name, what in (("position", "by position"), ("flops", "against operations")):
        lines.append(f"\n![Bits per byte {what}](quality_{name}.png)")
    if slides := {name: list(found.values()) for name, found in runs.items() if name in SLIDES}:
        lines.append(f"\n| accuracy at distance | {' | '.join(map(str, DISTANCES))} | seeds |")
        lines.append("|---" * (len(DISTANCES) + 2) + "|")
        for name, found in slides.items():
            rows = [statistics.mean(x["accuracy"][str(d)] for x in found) for d in DISTANCES]
            lines.append(f"| {name} | {' | '.join(f'{x:.3f}' for x in rows)} | {len(found)} |")
        lines.append("\nWithout a way between the regions at most 0.75 is possible.")
    first, about = text[best][0], documents[0]
    source, (tokens, step, lr) = first["text"], first["settings"].values()
    held_out = len(source["held_out"])
    seconds = sum(x["found"]["seconds"] for x in documents)
    lines += [
        f"\n- **Text:** {source['train_bytes']:,} bytes of Python sources; tests are "
        f"{source['test_bytes']:,} of {held_out} others; SHA-256 `{source['sha256']}`.",
        f"- **Settings:** {tokens:,} tokens, {step:,} a step, learning rate {MUON * lr:g} (Muon, "
        f"matrices), {lr:g} (AdamW). All trainings: {seconds:,.0f} s of one GPU.",
        f"- **Measured** {time.strftime('%Y-%m-%d')}: {about.get('gpu', 'CPU')}, torch "
        f"{about['torch']}. **Data:** [quality.json](quality.json).\n\n## Reproduce\n",
        *sorted({f"    python {x['found']['command']}" for x in documents}),
        "\n## Not measured\n\n- Larger models, longer training, other languages, several GPUs.",
    ]
    (out / "quality.md").write_text("\n".join(lines) + "\n")
    for each in documents:
        each["found"].pop("loss", None)
    (out / "quality.json").write_text(json.dumps(documents))
    print(out / "quality.md")


# ---------------------------------------------------------------------------------------- runs


def jobs_of(arms: str, seeds: str) -> list[tuple[str, int]]:
    """Arms and seeds, as the options name them; the first seed of every arm comes first."""
    count = {name: arm.seeds for name, arm in ARMS.items()} | dict.fromkeys(SLIDES, SLIDE_SEEDS)
    groups = {"": count, "text": ARMS, "slides": SLIDES}
    names = groups.get(arms) or arms.split(",")
    if unknown := [name for name in names if name not in count]:
        sys.exit(f"no arm {', '.join(unknown)}; there are text, slides, {', '.join(count)}")
    given = [int(x) for x in seeds.split(",")] if seeds else None
    jobs = [(name, seed) for name in names for seed in given or range(count[name])]
    return sorted(jobs, key=lambda job: job[1])


def run_share(
    rank: int, gpus: int, jobs: Sequence[tuple[str, int]], out: Path, folders: Sequence[Path],
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
        if name in SLIDES:
            sizes, steps = (SMALL_SLIDE, 3) if shape == SMALL else (SLIDE, SLIDE_STEPS)
            found = train_slides(SLIDES[name], seed, sizes, device, steps)
        else:
            if text is None:
                test_bytes = 4 * shape.longest if shape == SMALL else TEST_BYTES
                text = read(folders, shape.longest, options["tokens"], test_bytes)
                print(f"text: {text.about}", flush=True)
            found = train(ARMS[name], seed, text, shape, device, **options)
        write(path, device, {"arm": name, "seed": seed, "command": " ".join(sys.argv), **found})
        shown = ("seconds", "tokens_per_s", "peak_bytes", "bits", "accuracy")
        print(f"{name}-{seed}:", {x: found[x] for x in shown if x in found}, flush=True)


def main(
    out: Annotated[Path, typer.Option(help="folder of results")] = Path("quality"),
    arms: Annotated[str, typer.Option(help="names, by commas; text; slides; all")] = "",
    seeds: Annotated[str, typer.Option(help="numbers, by commas; as many as an arm has")] = "",
    tokens: Annotated[int, typer.Option(help="of each training")] = 39_321_600,
    step_tokens: int = 65_536,
    lr: Annotated[float, typer.Option(help=f"AdamW's highest; Muon has {MUON} times it")] = 2e-3,
    data: Annotated[Path | None, typer.Option(help="folder of packages")] = None,
    gpus: Annotated[int, typer.Option(help="trainings at a time")] = 1,
    small: Annotated[bool, typer.Option(help="a tiny model of tiny sequences")] = False,
    page: Annotated[bool, typer.Option(help="write the page alone")] = False,
) -> None:
    """Train, test, write."""
    shape, jobs = SMALL if small else Shape(), jobs_of(arms, seeds)
    if small:
        tokens, step_tokens = min(tokens, 8192), min(step_tokens, 1024)
    out.mkdir(parents=True, exist_ok=True)
    options = {"tokens": tokens, "step_tokens": step_tokens, "lr": lr}
    share = gpus, [] if page else jobs, out, [data] if data else sources(), shape, options
    if gpus == 1:
        run_share(0, *share)
    else:
        torch.multiprocessing.spawn(run_share, share, nprocs=gpus)
    if page or (find_spec("matplotlib") and any([*out.glob(f"{x}-*.json")] for x in ARMS)):
        write_page(out)


if __name__ == "__main__":
    typer.run(main)
