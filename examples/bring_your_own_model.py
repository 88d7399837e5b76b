"""Train your own PyTorch model with the sequence split over several processes.

    python examples/bring_your_own_model.py --text FILE                              # one process
    torchrun --nproc-per-node 2 examples/bring_your_own_model.py --text FILE         # two

Only the places marked (1) to (4) know that the sequence is split. At the end rank 0 trains once
more in one process, and the script exits with code 1 if losses or gradients differ.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention
from ring_dilated_attention.nn import RotaryEmbedding

TOLERANCE = 1e-4  # relative; float32 sums in another order differ by about 1e-6
# Every segment of 256 in full, and every 4th position of the whole sequence (None).
PATTERN = DilatedPattern(segment_lengths=[256, None], dilation_rates=[1, 4])


class Block(nn.Module):
    """Attention on your own projections, then an MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, rotation, **shards):
        """`x` has shape (batch, local_sequence, dim)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.heads, -1)).chunk(3, dim=2)
        q, k = rotation(q), rotation(k)
        # (1) Attention sees the whole sequence: it is told the ranks and who holds which part.
        x = x + self.out(dilated_attention(q, k, v, PATTERN, is_causal=True, **shards).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """A small language model of bytes."""

    def __init__(self, dim: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, dim), nn.Linear(dim, 256)
        self.rope = RotaryEmbedding(dim // heads)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, tokens, positions, **shards):
        """`tokens` has shape (batch, local_sequence); returns logits."""
        x, rotation = self.embedding(tokens), self.rope(positions)
        for block in self.blocks:
            x = block(x, rotation, **shards)
        return self.head(x)


def train(text, args, device, group=None, rank=0, ranks=1):
    """Train; return the loss of every step and the gradients of the first one."""
    layout = SequenceLayout.zigzag(args.seq_len, ranks)  # balances causal work over the ranks
    # (2) Positions are global: where in the sequence the tokens of this rank are.
    positions = layout.positions(rank, device=device)
    torch.manual_seed(0)  # the same weights on every rank
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(1)  # the same windows of text on every rank
    losses, gradients = [], []
    for _ in range(args.steps):
        start = int(torch.randint(len(text) - args.seq_len, (), generator=draws))
        window = text[start : start + args.seq_len + 1].to(device)
        # (3) Shift the labels on the whole window, then take this rank's part of both.
        inputs, labels = (layout.shard(part, rank, dim=0) for part in (window[:-1], window[1:]))
        logits = model(inputs[None], positions, group=group, layout=layout)[0]
        # Divided by the global number of tokens, the losses of all ranks add up to the mean.
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / args.seq_len
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if group is not None:  # (4) Each rank has its share of the loss and of every gradient.
            for tensor in (loss, *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor, group=group)
        gradients = gradients or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default=__file__, help="any text file; default: this script")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    with open(args.text, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    if len(text) <= args.seq_len:
        sys.exit(f"{args.text} has {len(text)} bytes; --seq-len {args.seq_len} needs more")
    cuda, device, place = torch.cuda.is_available(), torch.device("cpu"), (None, 0, 1)
    if cuda:
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("nccl" if cuda else "gloo")
        place = (dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    losses, gradients = train(text, args, device, *place)
    wrong = False
    if place[1] == 0:
        alone, expected = train(text, args, device)
        loss_error = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
        pairs = zip(gradients, expected, strict=True)
        error = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {args.steps} steps; ranks: {place[2]}")
        print(f"relative difference from 1 process: loss {loss_error:.0e}, gradients {error:.0e}")
        wrong = not max(loss_error, error) <= TOLERANCE  # so that NaN is wrong
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(wrong)
