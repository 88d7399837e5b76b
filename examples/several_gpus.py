"""One call of dilated_attention on several ranks, forward and backward, compared with one process.

    torchrun --nproc-per-node 2 examples/several_gpus.py                       # CPU processes, gloo
    torchrun --nproc-per-node 4 examples/several_gpus.py --seq-len 262144      # GPUs, NCCL

Exits with code 1 if out or a gradient is wrong.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative error allowed: sums are formed in another order, and rounded to the dtype."""


# region setup
def start(device: torch.device) -> None:
    """Join the process group that torchrun has prepared."""
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before NCCL starts
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")


# endregion setup


def whole_inputs(args: argparse.Namespace, device: torch.device, dtype: torch.dtype):
    """Query, key, value and dout of the whole sequence, the same on every rank.

    Only because this example compares with one process: a real rank never holds them.
    """
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, args.seq_len, args.num_heads, args.head_dim)
    return [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(4)]


def main() -> None:
    """Compute sharded and on one process; compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=10_001)
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start this with: torchrun --nproc-per-node 2 examples/several_gpus.py")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    start(device)

    # region layout
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pattern = DilatedPattern([256, 1024, None], [1, 2, 16])
    layout = SequenceLayout.zigzag(args.seq_len, ranks)  # any length, any number of ranks
    # endregion layout
    whole = whole_inputs(args, device, dtype)
    # region call
    shards = [layout.shard(x, rank, dim=1).clone() for x in whole]
    query, key, value = (x.requires_grad_() for x in shards[:3])
    out = dilated_attention(
        query, key, value, pattern, is_causal=True, group=dist.group.WORLD, layout=layout
    )
    out.backward(shards[3])  # gradients of remote keys and values are returned to their owners
    # endregion call

    # region compare
    leaves = [x.clone().requires_grad_() for x in whole[:3]]
    expected = dilated_attention(*leaves, pattern, is_causal=True)
    expected.backward(whole[3])
    errors = {}
    for name, got, want in zip(
        ("out", "dquery", "dkey", "dvalue"),
        (out, query.grad, key.grad, value.grad),
        (expected, *(x.grad for x in leaves)),
        strict=True,
    ):
        own = layout.shard(want, rank, dim=1)
        errors[name] = ((got - own).norm() / own.norm()).item()
        held = f"rank {rank} holds {layout.local_length(rank):,} positions"
        print(f"{held}; relative error of {name}: {errors[name]:.1e}")
    # endregion compare
    dist.destroy_process_group()
    if not all(error <= TOLERANCE[dtype] for error in errors.values()):  # NaN, too
        sys.exit(f"rank {rank}: the sharded call differs from one process: {errors}")


if __name__ == "__main__":
    main()
