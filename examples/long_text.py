"""Train a LongNet on sequences of text that are sharded over all ranks.

    python examples/long_text.py                             # a few seconds on a laptop
    torchrun --nproc-per-node 2 examples/long_text.py        # the same losses, sharded
    torchrun --nproc-per-node 4 examples/long_text.py --text FILE --seq-len 8388608 --no-compare

Text is read as bytes; without `--text` it is source code of the Python standard library.
`--compare`, the default, trains a second copy on this process alone, and exits with code 1 if the
two differ.
examples/train_longnet.py adds held-out text, checkpoints, a plot, DDP and FSDP2.
"""

import argparse
import copy
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.nn import LongNet, LongNetConfig

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Relative error allowed between sharded and not, after a few steps that each round differently."""


def read_bytes(path: str | None, count: int) -> torch.Tensor:
    """At least `count` bytes of text, int64."""
    if path is None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        data = b"".join(file.read_bytes() for file in files)
    else:
        data = Path(path).read_bytes()
    if len(data) < count:
        sys.exit(f"the text needs {count:,} bytes, one sequence and a label; it has {len(data):,}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


# region step
def train_step(model, optimizer, sequence, device, group=None) -> float:
    """One step on one sequence (n + 1,); returns the mean loss of a token, in nats."""
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    length = len(sequence) - 1
    layout = SequenceLayout.zigzag(length, ranks)  # balances causal work
    # Labels are shifted before sharding: the next token of a shard's last one is on another rank.
    tokens = layout.shard(sequence[:-1], rank, dim=0)[None].to(device)
    labels = layout.shard(sequence[1:], rank, dim=0)[None].to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        # A sum over this rank's positions, divided by the number of positions of ALL ranks.
        loss = model.loss(tokens, labels, group=group, layout=layout) / length
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if group is not None:
        for tensor in (loss, *(p.grad for p in model.parameters())):
            dist.all_reduce(tensor, group=group)
    optimizer.step()
    return loss.item()


# endregion step


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a file")
    parser.add_argument("--seq-len", type=int, default=8192, help="bytes of a sequence")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--embed-dim", type=int, default=128)
    parser.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> list[float]:
    """Train; return the losses."""
    args = arguments()
    sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1  # torchrun sets it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if sharded:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group = dist.group.WORLD if sharded else None
    first = not sharded or dist.get_rank() == 0

    # region model
    config = LongNetConfig(
        num_layers=2,
        embed_dim=args.embed_dim,
        num_heads=4,
        ffn_dim=4 * args.embed_dim,
        segment_lengths=[1024, 4096, None],  # None: the last branch spans the whole sequence
        dilation_rates=[1, 4, 16],
    )
    torch.manual_seed(0)  # equal weights on every rank
    model = LongNet(config, checkpoint="keep_attention", chunk_rows=4096).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # endregion model
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=2e-3)

    text = read_bytes(args.text, args.seq_len + 1)
    losses, errors = [], [0.0]
    for step in range(args.steps):
        start = step * args.seq_len % (len(text) - args.seq_len)
        sequence = text[start : start + args.seq_len + 1]
        losses.append(train_step(model, optimizer, sequence, device, group))
        if args.compare and sharded:
            alone = train_step(twin, twin_optimizer, sequence, device)
            errors.append(abs(losses[-1] - alone) / alone)
        if first:
            print(f"step {step}: {losses[-1] / math.log(2):.4f} bits per byte")
    if first and args.compare and sharded:
        print(f"largest relative difference of a loss from one process: {max(errors):.1e}")
    if sharded:
        dist.destroy_process_group()
    most = TOLERANCE[torch.bfloat16 if device.type == "cuda" else torch.float32]
    if not all(error <= most for error in errors):  # NaN, too
        sys.exit("sharded training differs from one process")
    return losses


if __name__ == "__main__":
    main()
