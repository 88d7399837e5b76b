"""Checkpoints of a LongNet under FSDP2: torch's own format, rda's, and plain weights.

    torchrun --nproc-per-node 2 examples/checkpoints.py --out /tmp/longnet

Trains a step, saves with torch.distributed.checkpoint, loads into a fresh model, and writes plain
weights, which `rda sample --checkpoint /tmp/longnet/weights --prompt "def "` continues a prompt
with. Exits with code 1 if the plain weights give other logits in one process.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.nn import LongNet, LongNetConfig

CONFIG = LongNetConfig(
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    ffn_dim=128,
    segment_lengths=[64, None],
    dilation_rates=[1, 4],
)
SEQ_LEN = 301
TOLERANCE = 1e-5  # relative, in float32: sums are formed in another order


def make_model(device: torch.device) -> tuple[LongNet, torch.optim.AdamW]:
    """A model whose parameters are sharded over the ranks that share a sequence, and AdamW."""
    torch.manual_seed(dist.get_rank())  # the state that is loaded makes ranks alike
    model = LongNet(CONFIG).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


# --8<-- [start:rda]
def load_rda_checkpoint(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path
) -> None:
    """Read a checkpoint of rda train into a model and its AdamW, sharded or not."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    weights, state = get_state_dict(model, optimizer)
    found = {"model": weights, "optimizer": {"state": state["state"]}}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(path)))  # safetensors, no pickle
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


# --8<-- [end:rda]


# --8<-- [start:dcp]
def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Save with torch.distributed.checkpoint: every rank writes its shards."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load what `save` has written, on any number of ranks."""
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


# --8<-- [end:dcp]


# --8<-- [start:plain]
def write_weights(model: LongNet, folder: Path) -> None:
    """Write plain weights, which rda sample and rda train --init-from read. Every rank calls it."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)  # empty except on rank 0
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(model.config)))


# --8<-- [end:plain]


def sharded_logits(model: LongNet, tokens: Tensor, layout: SequenceLayout) -> Tensor:
    """Logits of this rank's positions."""
    mine = layout.shard(tokens, dist.get_rank(), dim=1)
    return model(mine, group=dist.group.WORLD, layout=layout)


def main() -> None:
    """Train a step, save, load, write plain weights; compare with one process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start this with: torchrun --nproc-per-node 2 examples/checkpoints.py --out ...")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    layout = SequenceLayout.zigzag(SEQ_LEN, dist.get_world_size())
    tokens = torch.randint(256, (1, SEQ_LEN), generator=torch.Generator().manual_seed(0)).to(device)

    model, optimizer = make_model(device)
    logits = sharded_logits(model, tokens, layout)
    labels = layout.shard(tokens.roll(-1, 1), rank, dim=1)
    # A step so that AdamW has a state; for losses under FSDP2 see the recipe on training.
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
    save(model, optimizer, args.out / "dcp")

    fresh, fresh_optimizer = make_model(device)
    load(fresh, fresh_optimizer, args.out / "dcp")
    write_weights(fresh, args.out / "weights")
    with torch.no_grad():
        got = sharded_logits(fresh, tokens, layout)
    dist.barrier()

    alone = LongNet(CONFIG)
    alone.load_state_dict(load_file(args.out / "weights" / "model.safetensors"))
    with torch.no_grad():
        want = layout.shard(alone.to(device)(tokens), rank, dim=1)
    error = ((got - want).norm() / want.norm()).item()
    print(f"rank {rank}: relative difference to one process with the plain weights: {error:.1e}")
    dist.destroy_process_group()
    if not error <= TOLERANCE:  # NaN, too
        sys.exit(f"rank {rank}: the plain weights give other logits")


if __name__ == "__main__":
    main()
