"""Meshes, DTensors and torch.compile: an attention layer on ranks, compared with one process.

    torchrun --nproc-per-node 2 examples/meshes.py

Exits with code 1 if out or a gradient is wrong.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention, shard, unshard
from ring_dilated_attention.integrations.context_parallel import ContextParallel
from ring_dilated_attention.nn import LongNet, LongNetConfig, MultiheadDilatedAttention

PATTERN = DilatedPattern([256, None], [1, 4])
TOLERANCE = 1e-5  # float32: sums are formed in another order


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """By the norm of the difference."""
    return ((got - want).norm() / want.norm()).item()


def model_on_shards(mesh: DeviceMesh, length: int) -> float:
    """A compiled language model on shards that `shard` has made."""
    torch.manual_seed(0)
    config = LongNetConfig(
        num_layers=1, embed_dim=64, num_heads=4, ffn_dim=128, segment_lengths=[256, None],
        dilation_rates=[1, 4],
    )  # fmt: skip
    model = LongNet(config)
    tokens = torch.randint(256, (1, length))
    # region shard
    layout = SequenceLayout.zigzag(length, mesh.size())
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1)}  # labels are shifted before
    own = shard(mesh, batch, 1, layout)  # 1: the sequence dimension of both
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(own["tokens"], mesh=mesh, layout=layout)
    whole = unshard(mesh, logits.detach(), 1, layout)
    # endregion shard
    return relative_error(whole, model(tokens))


def attention_of_dtensors(mesh: DeviceMesh, length: int) -> float:
    """A call of DTensors: group, layout and placements are theirs."""
    tensors = torch.randn(3, 1, length, 8, 32).unbind(0)
    # region dtensor
    query, key, value = (
        distribute_tensor(x, mesh, [Shard(1)]).detach().requires_grad_() for x in tensors
    )
    out = dilated_attention(query, key, value, PATTERN, is_causal=True)
    out.square().sum().backward()
    assert out.placements == query.grad.placements == (Shard(1),)
    # endregion dtensor
    leaves = [x.clone().requires_grad_() for x in tensors]
    want = dilated_attention(*leaves, PATTERN, is_causal=True)
    want.square().sum().backward()
    pairs = [
        (out, want),
        *((x.grad, y.grad) for x, y in zip((query, key, value), leaves, strict=True)),
    ]
    return max(relative_error(a.full_tensor(), b) for a, b in pairs)


def layer_in_a_plan(mesh: DeviceMesh, length: int) -> float:
    """A style of `parallelize_module`."""
    torch.manual_seed(0)
    layer = MultiheadDilatedAttention(64, 4, segment_lengths=[256, None], dilation_rates=[1, 4])
    model = torch.nn.ModuleDict({"attention": layer})
    x = torch.randn(1, length, 64)
    want = layer(x, x, x)[0]
    # region style
    parallelize_module(model, mesh, {"attention": ContextParallel()})
    own = distribute_tensor(x, mesh, [Shard(1)])  # of any length; or this rank's shard
    out, _ = model["attention"](own, own, own)  # a DTensor, Shard(1)
    # endregion style
    return relative_error(out.full_tensor(), want)


def main() -> None:
    """Compute on the ranks of a mesh; compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=1501)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start this with: torchrun --nproc-per-node 2 examples/meshes.py")
    # region mesh
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "sp"))
    # endregion mesh
    torch.manual_seed(1)  # every rank makes the same whole tensors, only to compare
    errors = {}
    for check in (model_on_shards, attention_of_dtensors, layer_in_a_plan):
        errors[check.__name__] = check(mesh["sp"], args.seq_len)
        print(f"relative error of {check.__name__}: {errors[check.__name__]:.1e}")
    dist.destroy_process_group()
    if not all(error <= TOLERANCE for error in errors.values()):  # NaN, too
        sys.exit(f"the ranks' results differ from one process: {errors}")


if __name__ == "__main__":
    main()
