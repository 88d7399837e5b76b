"""Train a GigaPath-shaped slide encoder on one slide, on one process or on many.

    python examples/slide_encoder.py                               # seconds on a laptop
    torchrun --nproc-per-node 3 examples/slide_encoder.py          # the same losses, sharded
    torchrun --nproc-per-node 4 examples/slide_encoder.py --gigapath --tiles 1048576  # GPUs

`--slide FILE` takes a file of torch.save with "features" (tiles, in_dim) and "coordinates" (tiles,
2), which every process reads; without it, tiles of a made-up tissue have random features. The
task is made up too: the class token is to predict the mean of the features.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig, hilbert_order

SMALL = {
    "in_dim": 64,
    "num_layers": 2,
    "embed_dim": 96,
    "num_heads": 8,
    "ffn_dim": 192,
    "segment_lengths": [128, 512, None],
    "dilation_rates": [1, 4, 8],
}


def made_up_slide(tiles: int, in_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (tiles, in_dim) and pixel coordinates (tiles, 2), those of a disc, by rows."""
    generator = torch.Generator().manual_seed(0)
    side = int((2 * tiles) ** 0.5) + 2
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    nearest = (grid - side / 2).square().sum(1).argsort(stable=True)[:tiles].sort().values
    return torch.randn(tiles, in_dim, generator=generator), grid[nearest] * 256


def main() -> list[float]:
    """Train; return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slide", help="a file of torch.save")
    parser.add_argument("--tiles", type=int, default=3000, help="of a made-up slide")
    parser.add_argument("--gigapath", action="store_true", help="12 layers of 768, not 2 of 96")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if many:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group = dist.group.WORLD if many else None
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)

    if args.slide:
        slide = torch.load(args.slide, map_location="cpu", weights_only=True)
        features, coordinates = slide["features"].float(), slide["coordinates"]
    else:
        in_dim = 1536 if args.gigapath else SMALL["in_dim"]
        features, coordinates = made_up_slide(args.tiles, in_dim)
    options = {} if args.gigapath else SMALL
    config = SlideEncoderConfig(**{**options, "in_dim": features.shape[1]})

    order = hilbert_order(coordinates)  # segments become patches of tissue
    features, coordinates, target = features[order], coordinates[order], features.mean(0).to(device)
    # Position 0 is the class token, tile i is position i + 1; shards are as equal as they can be.
    layout = SequenceLayout.contiguous(len(features) + 1, ranks)
    own = layout.positions(rank)
    own = own[own > 0] - 1
    features, coordinates = features[None, own].to(device), coordinates[None, own].to(device)

    torch.manual_seed(0)  # equal weights on every rank
    encoder = SlideEncoder(config, checkpoint="keep_attention", chunk_rows=4096).to(device)
    head = torch.nn.Linear(config.embed_dim, config.in_dim).to(device)
    parameters = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for step in range(args.steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            encoded = encoder(features, coordinates, group=group, layout=layout)
            predicted = head(encoded.cls)  # of no rows on ranks without the class token
        loss = F.mse_loss(predicted, target.expand_as(predicted), reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if many:  # each rank has its share of the loss and of the gradients
            for tensor in (loss, *(p.grad for p in parameters)):
                dist.all_reduce(tensor)
        optimizer.step()
        losses.append(loss.item())
        if rank == 0:
            print(
                f"step {step}: loss {losses[-1]:.6f}, {layout.length:,} positions, ranks: {ranks}"
            )
    if many:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
