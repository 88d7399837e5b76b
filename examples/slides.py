"""Train a slide encoder on slides of different sizes, each sharded over all ranks.

    python examples/slides.py                                       # seconds on a laptop
    torchrun --nproc-per-node 2 examples/slides.py                  # the same losses, sharded
    torchrun --nproc-per-node 4 examples/slides.py --gigapath --tiles 1048576 --no-compare  # GPUs

`--slide FILE` (may be given several times) takes files of torch.save with "features" (tiles,
in_dim) and "coordinates" (tiles, 2) in pixels, of tiles of 256 by 256. Without it, slides are made
up: a disc of tissue whose features are noise around a mean, and the encoder learns to predict the
mean. `--compare`, the default, trains a second copy on this process alone, and exits with code 1 if
the two differ.
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig, hilbert_order

SMALL = {
    "num_layers": 2,
    "embed_dim": 96,
    "num_heads": 8,
    "ffn_dim": 192,
    "segment_lengths": [128, 512, None],
    "dilation_rates": [1, 4, 8],
}
SMALL_IN_DIM = 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative error allowed between sharded and not, after a few steps that each round differently."""


def made_up_slides(count: int, most_tiles: int, in_dim: int) -> list[dict[str, torch.Tensor]]:
    """Slides of random sizes: features (tiles, in_dim), pixel coordinates (tiles, 2)."""
    generator = torch.Generator().manual_seed(0)
    slides = []
    for _ in range(count):
        tiles = int(torch.randint(most_tiles // 2, most_tiles + 1, (), generator=generator))
        side = int((2 * tiles) ** 0.5) + 2
        grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        nearest = (grid - side / 2).square().sum(1).argsort(stable=True)[:tiles].sort().values
        mean = torch.randn(in_dim, generator=generator)
        features = mean + torch.randn(tiles, in_dim, generator=generator)
        slides.append({"features": features, "coordinates": grid[nearest] * 256})
    return slides


# region shard
def shard_of_slide(slide, rank: int, ranks: int):
    """This rank's features and coordinates, and the layout that says which those are."""
    order = hilbert_order(slide["coordinates"])  # segments become compact patches of tissue
    features, coordinates = slide["features"][order].float(), slide["coordinates"][order]
    # Position 0 is the class token, tile i is position i + 1. Shards begin at multiples of the
    # dilation rates, 1 to 16: fewer kernel calls.
    layout = SequenceLayout.contiguous(len(features) + 1, ranks, multiple=16)
    own = layout.positions(rank)
    own = own[own > 0] - 1
    return features[None, own], coordinates[None, own], layout


# endregion shard


# region step
def train_step(model, optimizer, slide, device, group=None) -> float:
    """One step on one slide; returns the loss. Every rank of the group calls it."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    features, coordinates, layout = shard_of_slide(slide, rank, ranks)
    target = slide["features"].float().mean(0).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        encoded = model["encoder"](
            features.to(device), coordinates.to(device), group=group, layout=layout
        )
        predicted = model["head"](encoded.cls)  # has no rows on ranks without the class token
    loss = F.mse_loss(predicted.float(), target.expand_as(predicted), reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if group is not None:  # each rank has its part of the loss and of the gradients: add them up
        for tensor in (loss, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=group)
    optimizer.step()
    return loss.item()


# endregion step


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slide", action="append", help="a file of torch.save; repeatable")
    parser.add_argument("--slides", type=int, default=4, help="how many made-up slides")
    parser.add_argument("--tiles", type=int, default=3000, help="most tiles of a made-up slide")
    parser.add_argument("--gigapath", action="store_true", help="12 layers of 768, not 2 of 96")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> list[float]:
    """Train; return the mean loss of every epoch."""
    args = arguments()
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun sets it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if sharded:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group = dist.group.WORLD if sharded else None
    first = not sharded or dist.get_rank() == 0

    if args.slide:
        slides = [torch.load(path, map_location="cpu", weights_only=True) for path in args.slide]
        for path, slide in zip(args.slide, slides, strict=True):
            got = {name: tuple(x.shape) for name, x in slide.items() if torch.is_tensor(x)}
            tiles, *more = got.get("features", (0,))
            if len(more) != 1 or got.get("coordinates") != (tiles, 2):
                sys.exit(
                    f"{path} must have features (tiles, in_dim), coordinates (tiles, 2): {got}"
                )
    else:
        slides = made_up_slides(args.slides, args.tiles, 1536 if args.gigapath else SMALL_IN_DIM)
    in_dim = slides[0]["features"].shape[1]
    # region model
    config = SlideEncoderConfig(in_dim=in_dim, **({} if args.gigapath else SMALL))
    torch.manual_seed(0)  # equal weights on every rank
    encoder = SlideEncoder(config, checkpoint="keep_attention", chunk_rows=4096)
    model = torch.nn.ModuleDict(
        {"encoder": encoder, "head": torch.nn.Linear(config.embed_dim, in_dim)}
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # endregion model
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=3e-3)

    losses, errors = [], [0.0]
    for epoch in range(args.epochs):
        total = 0.0
        for slide in slides:
            loss = train_step(model, optimizer, slide, device, group)
            total += loss
            if args.compare and sharded:
                alone = train_step(twin, twin_optimizer, slide, device)
                errors.append(abs(loss - alone) / alone)
        losses.append(total / len(slides))
        if first:
            print(f"epoch {epoch}: mean loss {losses[-1]:.4f}")
    if first:
        tiles = ", ".join(f"{len(slide['features']):,}" for slide in slides)
        ranks = dist.get_world_size() if sharded else 1
        print(f"slides of {tiles} tiles, ranks: {ranks}")
        if args.compare and sharded:
            print(f"largest relative difference of a loss from one process: {max(errors):.1e}")
    if sharded:
        dist.destroy_process_group()
    most = TOLERANCE[torch.bfloat16 if device.type == "cuda" else torch.float32]
    if not all(error <= most for error in errors):  # NaN, too
        sys.exit("sharded training differs from one process")
    return losses


if __name__ == "__main__":
    main()
