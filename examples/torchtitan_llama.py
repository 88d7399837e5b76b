"""torchtitan's debug Llama with dilated attention and context parallelism, against one process.

    torchrun --nproc-per-node 2 examples/torchtitan_llama.py        # CPU processes, gloo

Needs torchtitan and torch 2.14 or 2.15. Exits with code 1 if the loss or a gradient is wrong.
"""

import os
import sys

import torch
import torch._utils
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

if not torch.accelerator.is_available():  # torchtitan takes CUDA for granted
    torch._utils._get_available_device_type = lambda: "cpu"

import spmd_types as spmd
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_utils
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from ring_dilated_attention import DilatedPattern
from ring_dilated_attention.integrations.torchtitan import with_dilated_attention

TOKENS = 512
DOCUMENTS = [0, 100, 101, 300, TOKENS]
TOLERANCE = 1e-4  # relative, in float32: sums are formed in another order


# region config
def dilated_debugmodel() -> Trainer.Config:
    """Torchtitan's debug Llama, dilated: start it with --module and --config."""
    pattern = DilatedPattern([32, 128, None], [1, 3, 8])
    config = llama3_debugmodel()
    config.model_spec = with_dilated_attention(model_registry("debugmodel"), pattern)
    config.training.disable_cuda_graphs = True  # documents are read on the host
    return config


# endregion config


def step(cp: int, world_size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss of a batch, and the gradients, of a model on `cp` context-parallel ranks."""
    config = dilated_debugmodel()
    parallelism = config.parallelism
    parallelism.context_parallel_degree = cp
    config.training.mixed_precision_param = "float32"
    config.training.max_context_length = TOKENS
    dims = ParallelDims.from_config(parallelism, world_size)
    titan_utils.set_spmd_backend(parallelism.spmd_backend)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    torch.manual_seed(0)  # whole weights, the same on every rank, before they are sharded
    model = spec.model.build()
    model.init_states()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    tokens, labels = torch.randint(2048, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor(DOCUMENTS).diff().tolist()
    extra = {"positions": torch.cat([torch.arange(length) for length in lengths])}
    if cp > 1:
        mesh = dims.get_mesh("cp")
        tokens, labels, extra = prepare_context_parallel_input(
            tokens, labels, extra, mesh, torch.device("cpu")
        )
    tokens, labels, extra = annotate_input_spmd_types(dims, tokens, labels, extra)
    with titan_utils.get_spmd_context(parallel_dims=dims)():
        logits = model(tokens, **extra)
        with spmd.no_typecheck():
            loss = F.cross_entropy(logits, labels, reduction="sum")
            loss.backward()
    total = loss.detach()
    if cp > 1:
        dist.all_reduce(total, group=mesh.get_group())
    return total.item(), {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def main() -> None:
    """Compute on all ranks and on one; compare."""
    if "RANK" not in os.environ:
        sys.exit("start this with: torchrun --nproc-per-node 2 examples/torchtitan_llama.py")
    ranks = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    loss, gradients = step(ranks, ranks)
    dist.barrier()
    dist.destroy_process_group()
    # One process: a world of its own.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    want, expected = step(1, 1)
    dist.destroy_process_group()
    errors = {"loss": abs(loss - want) / want}
    for name, gradient in expected.items():
        errors[name] = ((gradients[name] - gradient).norm() / gradient.norm()).item()
    worst = max(errors, key=lambda name: errors[name])
    print(f"rank {rank}: loss {loss:.3f}; largest relative error {errors[worst]:.1e}, of {worst}")
    if not errors[worst] <= TOLERANCE:  # NaN, too
        sys.exit(f"rank {rank}: {ranks} ranks differ from one process: {errors}")


if __name__ == "__main__":
    main()
