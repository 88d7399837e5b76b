"""Train a LongNet by Lightning, its sequences sharded over the ranks of a group.

    torchrun --nproc-per-node 2 examples/lightning_module.py                         # dp 1, sp 2
    torchrun --nproc-per-node 4 examples/lightning_module.py --sequence-ranks 2      # dp 2, sp 2

Lightning's own sampler splits data over all ranks, so it is switched off: a DistributedSampler
splits them over data-parallel groups. Afterwards every rank trains once more alone on the batches
of all ranks, and the program exits with code 1 if weights differ.
"""

import argparse
import os
import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ring_dilated_attention import SequenceLayout, check_same_batch, labels_per_rank
from ring_dilated_attention.nn import LongNet, LongNetConfig

TOLERANCE = 1e-4
"""Relative error allowed between sharded and not, after a few float32 steps."""


def new_model() -> LongNet:
    """A small LongNet."""
    torch.manual_seed(0)  # the same weights on every rank
    config = LongNetConfig(
        num_layers=2,
        embed_dim=64,
        num_heads=4,
        ffn_dim=128,
        segment_lengths=(64, None),
        dilation_rates=(1, 4),
    )
    return LongNet(config)


def texts(count: int, length: int) -> TensorDataset:
    """Prompts of different lengths, of which nothing is learnt, and what follows them."""
    tokens = torch.randint(256, (count, length + 1), generator=torch.Generator().manual_seed(0))
    prompts = torch.randint(1, length // 2, (count,), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].masked_fill(torch.arange(length) < prompts[:, None], -100)
    return TensorDataset(tokens[:, :-1], labels)


# region module
class Module(lightning.LightningModule):
    """A LongNet on a mesh of (dp, sp): ranks along sp share each sequence."""

    def __init__(self, data, sequence_ranks):
        super().__init__()
        self.model, self.data, self.sequence_ranks = new_model(), data, sequence_ranks

    def setup(self, stage):
        """Arrange the ranks."""
        shape = (self.trainer.world_size // self.sequence_ranks, self.sequence_ranks)
        kind = self.trainer.strategy.root_device.type
        self.mesh = init_device_mesh(kind, shape, mesh_dim_names=("dp", "sp"))

    def train_dataloader(self):
        """Batches that differ between data-parallel groups, and not within one."""
        groups, group = self.mesh["dp"].size(), self.mesh.get_local_rank("dp")
        sampler = DistributedSampler(self.data, num_replicas=groups, rank=group)
        return DataLoader(self.data, batch_size=2, sampler=sampler)

    def training_step(self, batch, index):
        """This rank's part of the loss."""
        check_same_batch(dict(enumerate(batch)), self.mesh["sp"])
        layout = SequenceLayout.zigzag(batch[0].shape[1], self.sequence_ranks)
        tokens, labels = (layout.shard(x, self.mesh.get_local_rank("sp"), 1) for x in batch)
        # The wrapped model says over which ranks gradients are averaged.
        divisor = labels_per_rank(labels, self.trainer.strategy.model, self.mesh["sp"])
        loss = self.model.loss(tokens, labels, group=self.mesh["sp"], layout=layout) / divisor
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.3)


# endregion module


class Recording(Module):
    """Keeps all batches, for the comparison with one process."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def training_step(self, batch, index):
        """See Module."""
        self.seen.append(batch)
        return super().training_step(batch, index)


def train_alone(steps: list[list]) -> LongNet:
    """The same in plain torch, on one process: `steps` has the batches of each."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for batches in steps:
        count = sum((labels != -100).sum() for _, labels in batches)
        for tokens, labels in batches:
            (model.loss(tokens, labels) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    """Train, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence-ranks", type=int, default=2, help="that share a sequence")
    parser.add_argument("--seq-len", type=int, default=301)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "0"))  # torchrun sets it
    if not ranks or ranks % args.sequence_ranks:
        sys.exit(
            "start this with: torchrun --nproc-per-node 4 examples/lightning_module.py, on a "
            f"multiple of --sequence-ranks, {args.sequence_ranks}; got {ranks or 'no'} ranks"
        )
    module = Recording(texts(12, args.seq_len), args.sequence_ranks)
    # region trainer
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"),
        use_distributed_sampler=False,  # it would split data over all ranks
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    # endregion trainer
    everyone = [None] * ranks
    dist.all_gather_object(everyone, module.seen)
    groups = everyone[:: args.sequence_ranks]  # the ranks of a group have seen the same
    alone = train_alone(list(zip(*groups, strict=True)))
    pairs = zip(module.model.parameters(), alone.parameters(), strict=True)
    error = max(((a - b).norm() / b.norm().clamp(min=1e-3)).item() for a, b in pairs)
    if dist.get_rank() == 0:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")
        print(f"largest relative difference of weights from one process: {error:.1e}")
    dist.destroy_process_group()
    if not error <= TOLERANCE:  # NaN, too
        sys.exit("sharded training differs from one process")


if __name__ == "__main__":
    main()
