"""Train LongNet with its heads split over ranks, and its sequences too; compared with one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py     # 2 ranks share the heads
    torchrun --nproc-per-node 4 examples/tensor_parallel.py     # and 2 x 2 the sequence

Exits with code 1 if a loss differs from that of a copy trained on this process alone.
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.integrations.tensor_parallel import HeadParallel
from ring_dilated_attention.nn import LongNet, LongNetConfig

TOLERANCE = 1e-5
"""Relative error allowed between the losses, after a few float32 steps."""


def make_optimizer(model):
    """AdamW, with parameters that are split over ranks and whole ones in groups of their own."""
    # region optimizer
    parameters = list(model.parameters())
    split = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    groups = [{"params": each} for each in (split, whole) if each]
    return torch.optim.AdamW(groups, lr=1e-3)
    # endregion optimizer


# region clip
def clip_gradients(model, max_norm: float) -> None:
    """`clip_grad_norm_` of gradients some of which are split over ranks."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    split = [p for p in parameters if isinstance(p, DTensor)]
    whole = [p for p in parameters if not isinstance(p, DTensor)]
    norms = [get_total_norm([p.grad for p in each]) for each in (split, whole) if each]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.stack(norms).norm()
    for each in (split, whole):
        clip_grads_with_norm_(each, max_norm, total)


# endregion clip


# region step
def train_step(model, optimizer, text, mesh=None) -> float:
    """One step on whole sequences, which all ranks have here; returns the mean loss."""
    tokens, labels = text[:, :-1], text[:, 1:]
    where = {}
    if mesh is not None:
        sequence = mesh["sp"]
        layout = SequenceLayout.zigzag(tokens.shape[1], sequence.size())
        tokens, labels = (
            layout.shard(x, sequence.get_local_rank(), dim=1).contiguous() for x in (tokens, labels)
        )
        where = {"group": sequence, "layout": layout}
    loss = model.loss(tokens, labels, **where) / text[:, 1:].numel()
    optimizer.zero_grad()
    loss.backward()
    loss = loss.detach()
    if mesh is not None:  # sums over the ranks of a sequence; ranks that share heads have them all
        for tensor in (loss, *(p.grad for p in model.parameters())):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            dist.all_reduce(local, group=mesh["sp"].get_group())
    clip_gradients(model, max_norm=0.5)
    optimizer.step()
    return loss.item()


# endregion step


def main() -> None:
    """Train, split and alone; compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=1001)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks that share heads")
    args = parser.parse_args()
    started = int(os.environ.get("WORLD_SIZE", "0"))  # torchrun sets it
    if not started or started % args.tensor_parallel:
        sys.exit(
            "start this with: torchrun --nproc-per-node 4 examples/tensor_parallel.py, on a "
            f"multiple of --tensor-parallel, {args.tensor_parallel}; got {started or 'no'} ranks"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)  # the same weights and text on every rank
    config = LongNetConfig(
        num_layers=2,
        embed_dim=64,
        num_heads=8,
        ffn_dim=128,
        segment_lengths=[64, 256, None],
        dilation_rates=[1, 2, 5],  # offsets of heads go by their number among all 8
    )
    model = LongNet(config).to(device)
    text = torch.randint(256, (1, args.seq_len + 1)).to(device)
    twin = copy.deepcopy(model)

    # region mesh
    ranks, split = dist.get_world_size(), args.tensor_parallel
    mesh = init_device_mesh(device, (ranks // split, split), mesh_dim_names=("sp", "tp"))
    parallelize_module(model, mesh["tp"], {"blocks.*": HeadParallel()})
    # endregion mesh

    optimizer, twin_optimizer = make_optimizer(model), make_optimizer(twin)
    errors = []
    for step in range(args.steps):
        loss = train_step(model, optimizer, text, mesh)
        alone = train_step(twin, twin_optimizer, text)
        errors.append(abs(loss - alone) / alone)
        if dist.get_rank() == 0:
            start, stop, total = model.blocks[0].attention.head_slice
            held = f"KV heads {start} to {stop - 1} of {total}"
            print(f"step {step}: loss {loss:.4f}; rank 0 has {held}")
    dist.destroy_process_group()
    if not all(error <= TOLERANCE for error in errors):  # NaN, too
        sys.exit(f"training differs from one process: {errors}")


if __name__ == "__main__":
    main()
