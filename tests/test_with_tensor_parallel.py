"""Tensor parallelism beside sharded sequences: 2 x 2 processes against one, in float64."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ring_dilated_attention import SequenceLayout
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.integrations.tensor_parallel import HeadParallel
from ring_dilated_attention.nn import LongNet, LongNetConfig, SlideEncoder, SlideEncoderConfig

LENGTH = 45
UNEVEN = SequenceLayout([[(31, LENGTH), (0, 4)], [(4, 31)]])
TOLERANCE = 1e-12
OPTIONS: dict[str, dict[str, Any]] = {
    "interleaved": {},
    "blocked": {"head_offsets": "blocked"},
    "split": {"head_branches": "split"},
    "grouped queries": {"num_kv_heads": 4},
    "grouped queries, blocked": {"num_kv_heads": 2, "head_offsets": "blocked"},
}
SAVED: dict[str, dict[str, Any]] = {
    "nothing recomputed": {},
    "everything recomputed": {"checkpoint": "full"},
    "all but attention, in chunks": {"checkpoint": "keep_attention", "chunk_rows": 7},
}


def mesh_of_four():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))


def longnet(**options):
    torch.manual_seed(0)
    return LongNet(
        LongNetConfig(
            vocab_size=37, num_layers=2, embed_dim=32, num_heads=8, ffn_dim=48,
            segment_lengths=[8, 19, None], dilation_rates=[1, 2, 3], **options,
        )
    ).double()  # fmt: skip


def gradients_of(model, sequence):
    """The whole gradient of each parameter: summed over the ranks that share a sequence."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        is_split = isinstance(gradient, DTensor)
        own = gradient.to_local() if is_split else gradient
        dist.all_reduce(own, group=sequence)
        found[name] = gradient.full_tensor() if is_split else own
    return found


def worst(got, wanted):
    """The largest error of a gradient, relative to the largest element of any."""
    size = max(x.abs().max() for x in wanted.values())
    assert got.keys() == wanted.keys()
    return max(((got[name] - wanted[name]).abs().max() / size).item() for name in wanted)


def train_longnet(rank, world_size):
    """Errors of loss, logits and gradients of every option and way to save memory."""
    mesh, errors = mesh_of_four(), {}
    torch.manual_seed(1)
    tokens, labels = torch.randint(37, (2, 2, LENGTH))
    kinds = [(o, {}) for o in OPTIONS.values()] + [({}, s) for s in [*SAVED.values()][1:]]
    for options, saved in kinds:
        model = longnet(**options)
        wanted_loss = model.loss(tokens, labels)
        wanted_loss.backward()
        wanted = {name: p.grad for name, p in model.named_parameters()}
        model = longnet(**options)
        split = LongNet(model.config, **saved).double()
        split.load_state_dict(model.state_dict())
        parallelize_module(split, mesh["tp"], {"blocks.*": HeadParallel()})
        assert split.blocks[0].attention.q_proj.weight.to_local().shape[0] == 16
        layout, place = UNEVEN, mesh["sp"].get_local_rank()
        shards = [layout.shard(x, place, 1) for x in (tokens, labels)]
        loss = split.loss(*shards, group=mesh["sp"], layout=layout)
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss, group=mesh["sp"].get_group())
        got = gradients_of(split, mesh["sp"].get_group())
        with torch.no_grad():
            logits = split(shards[0], group=mesh["sp"], layout=layout)
            alone = layout.shard(model(tokens), place, 1)
        errors[str((options, saved))] = (
            relative_error(loss, wanted_loss),
            relative_error(logits, alone),
            worst(got, wanted),
        )
    return errors


def test_longnet():
    """The audit's row on LongNet, which failed in unflatten."""
    for errors in run_ranks(train_longnet, 4):
        for kind, found in errors.items():
            assert max(found) < TOLERANCE, (kind, found)
