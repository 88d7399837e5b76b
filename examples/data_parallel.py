"""Train on a grid of ranks: other sequences on data-parallel ranks, parts of them on the others.

    torchrun --nproc-per-node 4 examples/data_parallel.py --wrap hsdp

Ranks are arranged as (data parallel, sequence parallel). DDP or FSDP2 averages gradients over all
of them; `labels_per_rank` makes that the gradient of the mean over all labels. Afterwards every
rank trains once more alone, and the program exits with code 1 if losses or weights differ.
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ring_dilated_attention import SequenceLayout, check_same_batch, labels_per_rank
from ring_dilated_attention.nn import LongNet, LongNetConfig

TOLERANCE = 1e-4
"""Relative error allowed between the grid and one process, after a few float32 steps."""
MICRO_BATCHES = 2
"""Of a step: gradients are accumulated."""


def read_batch(step: int, data_rank: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of a step for one data-parallel group; lengths and labels are uneven."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    found = []
    for micro in range(MICRO_BATCHES):
        length = 300 + 70 * data_rank + 11 * micro
        text = torch.randint(32, 127, (1, length + 1), generator=generator)
        labels = text[:, 1:].clone()
        labels[:, : 40 * data_rank] = -100  # nothing is learnt there, as of a prompt
        found.append({"tokens": text[:, :-1], "labels": labels})
    return found


# region wrap
def wrap(model, mesh, how):
    """Gradients are averaged over all ranks of the mesh, which holds dp and sp."""
    if how == "ddp":
        return DistributedDataParallel(model)
    # FSDP shards weights over all ranks; HSDP over the ranks of a sequence, with copies over dp.
    over = mesh if how == "hsdp" else mesh["dp", "sp"]._flatten("dp_sp")
    for block in model.blocks:
        fully_shard(block, mesh=over)
    return fully_shard(model, mesh=over)


# endregion wrap


# region step
def train_step(model, optimizer, micro_batches, group, averaging) -> torch.Tensor:
    """One step; returns this rank's part of the loss."""
    shards = []
    for batch in micro_batches:
        check_same_batch(batch, group)  # data are split over dp only
        layout = SequenceLayout.zigzag(batch["tokens"].shape[1], group.size() if group else 1)
        rank = group.get_local_rank() if group else 0
        shards.append(({name: layout.shard(x, rank, 1) for name, x in batch.items()}, layout))
    # Of all micro-batches of all ranks: every label of the step counts the same.
    divisor = labels_per_rank([shard["labels"] for shard, _ in shards], averaging, group)
    optimizer.zero_grad()
    total = torch.zeros(())
    for shard, layout in shards:
        loss = model(**shard, group=group, layout=layout) / divisor
        loss.backward()
        total += loss.detach()
    optimizer.step()
    return total


# endregion step


def new_model() -> tuple[LongNet, torch.optim.Optimizer]:
    """A small LongNet and its optimizer."""
    torch.manual_seed(0)  # the same weights on every rank
    config = LongNetConfig(
        num_layers=2,
        embed_dim=64,
        num_heads=4,
        ffn_dim=128,
        segment_lengths=(64, None),
        dilation_rates=(1, 4),
    )
    model = LongNet(config)
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """All of a parameter, which FSDP may have sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def main() -> list[float]:
    """Train; return the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wrap", choices=["ddp", "fsdp", "hsdp"], default="ddp")
    parser.add_argument("--sequence-ranks", type=int, default=2, help="that share a sequence")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "0"))  # torchrun sets it
    if not ranks or ranks % args.sequence_ranks:
        sys.exit(
            "start this with: torchrun --nproc-per-node 4 examples/data_parallel.py, on a "
            f"multiple of --sequence-ranks, {args.sequence_ranks}; got {ranks or 'no'} ranks"
        )
    dist.init_process_group("gloo")
    shape = (ranks // args.sequence_ranks, args.sequence_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))

    own, _ = new_model()
    model = wrap(copy.deepcopy(own), mesh, args.wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)  # of the weights as they now are
    losses = []
    for step in range(args.steps):
        data = read_batch(step, mesh.get_local_rank("dp"))
        loss = train_step(model, optimizer, data, mesh["sp"], model)
        dist.all_reduce(loss)
        losses.append((loss / ranks).item())  # the mean, as DDP and FSDP take it of gradients
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")

    alone, optimizer = new_model()
    one = dist.new_subgroups(1)[0]  # a group of this rank, over which it averages
    errors = []
    for step in range(args.steps):
        data = [batch for data_rank in range(shape[0]) for batch in read_batch(step, data_rank)]
        loss = train_step(alone, optimizer, data, None, one)
        errors.append(abs(losses[step] - loss.item()) / loss.item())
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        difference = (whole(mine) - expected).norm() / expected.norm().clamp(min=1e-3)
        errors.append(difference.item())
    if dist.get_rank() == 0:
        print(f"largest relative difference from one process: {max(errors):.1e}")
    dist.destroy_process_group()
    if not all(error <= TOLERANCE for error in errors):  # NaN, too
        sys.exit("training on the grid differs from one process")
    return losses


if __name__ == "__main__":
    main()
