"""A training loop with accelerate, the sequences sharded over the ranks of a group.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py                         # dp 1, sp 2
    torchrun --nproc-per-node 4 examples/accelerate_loop.py --sequence-ranks 2      # dp 2, sp 2

`Accelerator.prepare` splits the data of a DataLoader over all ranks. `prepare_data_loader` splits
them over as many groups as it is told: the data-parallel groups. Afterwards every rank trains once
more alone on the batches of all ranks, and the program exits with code 1 if weights differ.
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from ring_dilated_attention import DilatedPattern, SequenceLayout, labels_per_rank
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch

TOLERANCE = 1e-4
"""Relative error allowed between sharded and not, after a few float32 steps."""
PATTERN = DilatedPattern([64, None], [1, 4])


def new_model() -> LlamaForCausalLM:
    """A small Llama."""
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation="ring_dilated_attention",
    )
    return LlamaForCausalLM(config)


def texts(count: int, length: int) -> list[dict]:
    """Prompts of different lengths, of which nothing is learnt, and what follows them."""
    tokens = torch.randint(256, (count, length), generator=torch.Generator().manual_seed(0))
    prompts = torch.randint(1, length // 2, (count,), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(length) < prompts[:, None], -100)
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def train_alone(model, steps: list[list[dict]]) -> None:
    """The same in plain torch, on one process: `steps` has the batches of each."""
    set_attention(model, PATTERN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batches in steps:
        count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        for batch in batches:
            model(**batch, num_items_in_batch=count).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train, and compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequence-ranks", type=int, default=2, help="that share a sequence")
    parser.add_argument("--seq-len", type=int, default=301)
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "0"))  # torchrun sets it
    if not ranks or ranks % args.sequence_ranks:
        sys.exit(
            "start this with: torchrun --nproc-per-node 4 examples/accelerate_loop.py, on a "
            f"multiple of --sequence-ranks, {args.sequence_ranks}; got {ranks or 'no'} ranks"
        )
    data = texts(12, args.seq_len)
    model = new_model()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    # region loop
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    shape = (ranks // args.sequence_ranks, args.sequence_ranks)
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("dp", "sp"))
    layout = SequenceLayout.zigzag(args.seq_len, args.sequence_ranks)
    set_attention(model, PATTERN, group=mesh["sp"], layout=layout)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = prepare_data_loader(  # not accelerator.prepare: ranks of a group get the same batches
        DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0)),
        accelerator.device,
        num_processes=mesh["dp"].size(),
        process_index=mesh.get_local_rank("dp"),
    )
    for batch in loader:
        shard = shard_batch(batch, layout, mesh["sp"])  # raises if the ranks' batches differ
        shard = {name: x.to(accelerator.device) for name, x in shard.items()}
        count = labels_per_rank(shard["shift_labels"], model, mesh["sp"])
        loss = model(**shard, num_items_in_batch=count).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"loss {mean.item():.4f}")
        # endregion loop
        seen.append(batch)

    everyone = [None] * ranks
    dist.all_gather_object(everyone, seen)
    groups = everyone[:: args.sequence_ranks]  # the ranks of a group have seen the same
    train_alone(twin, list(zip(*groups, strict=True)))
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    error = max(((a.cpu() - b).norm() / b.norm()).item() for a, b in pairs)
    accelerator.print(f"largest relative difference of weights from one process: {error:.1e}")
    accelerator.end_training()
    if not error <= TOLERANCE:  # NaN, too
        sys.exit("sharded training differs from one process")


if __name__ == "__main__":
    main()
