"""A training step on a grid of data-parallel and sequence-parallel ranks, and on one process.

Data-parallel ranks have batches of other numbers of rows, lengths and labels, in two micro-batches;
shards are uneven.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ring_dilated_attention import SequenceLayout, labels_per_rank
from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch
from support.bounds import EXACT
from support.small_models import make_model
from support.transformers_models import PATTERN, make

MICRO_BATCHES = 2
LENGTHS, ROWS = (23, 31), (2, 1)
"""Of the batches of each data-parallel rank."""


def grid() -> DeviceMesh:
    """Two data-parallel groups of two ranks that share each sequence."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))


def uneven(length: int) -> SequenceLayout:
    return SequenceLayout([[(0, 7), (length - 3, length)], [(7, length - 3)]])


def batches(data_rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels of each micro-batch; many labels are ignored, differently everywhere."""
    found = []
    for micro in range(MICRO_BATCHES):
        generator = torch.Generator().manual_seed(10 * data_rank + micro)
        shape = ROWS[data_rank], LENGTHS[data_rank]
        tokens = torch.randint(0, 61, shape, generator=generator)
        labels = torch.randint(0, 61, shape, generator=generator)
        labels[:, micro : 5 * (data_rank + 1)] = -100
        found.append((tokens, labels))
    return found


def longnet_on_one_process() -> list[torch.Tensor]:
    """The mean loss over all labels of the step, and its gradients."""
    model = make_model()
    data = [pair for data_rank in range(2) for pair in batches(data_rank)]
    total = sum(model.loss(*pair) for pair in data)
    loss = total / sum(int((labels != -100).sum()) for _, labels in data)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def longnet_shards(mesh: DeviceMesh) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data_rank, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("sp")
    layout = uneven(LENGTHS[data_rank])
    return [
        (layout.shard(tokens, rank, 1), layout.shard(labels, rank, 1))
        for tokens, labels in batches(data_rank)
    ]


def layout_of(mesh: DeviceMesh) -> SequenceLayout:
    return uneven(LENGTHS[mesh.get_local_rank("dp")])


def error(model: Any, want: list[torch.Tensor]) -> float:
    """The largest relative error of a gradient; `want` begins with the loss."""
    errors = []
    for parameter, expected in zip(model.parameters(), want[1:], strict=True):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        # That of a key's bias without rotations is a sum that cancels.
        cancels = expected.abs().max() < EXACT
        errors.append(
            float((gradient - expected).abs().max())
            if cancels
            else relative_error(gradient, expected)
        )
    return max(errors)


def llama_on_one_process(**options: Any) -> list[torch.Tensor]:
    """As `longnet_on_one_process`: whole batches of transformers, whose labels are not shifted."""
    model = make(**options)
    set_attention(model, PATTERN)
    data = [pair for data_rank in range(2) for pair in batches(data_rank)]
    count = sum(int((labels[:, 1:] != -100).sum()) for _, labels in data)
    loss = sum(
        model(input_ids=tokens, labels=labels, num_items_in_batch=count).loss
        for tokens, labels in data
    )
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def llama_backward(wrapped: Any, mesh: DeviceMesh) -> torch.Tensor:
    """Forward and backward of a step, of a model with `set_attention`; this rank's loss."""
    data = [{"input_ids": x, "labels": y} for x, y in batches(mesh.get_local_rank("dp"))]
    shards = [shard_batch(batch, layout_of(mesh), mesh["sp"]) for batch in data]
    count = labels_per_rank([shard["shift_labels"] for shard in shards], wrapped, mesh["sp"])
    total = torch.zeros(())
    for shard in shards:
        loss = wrapped(**shard, num_items_in_batch=count).loss
        loss.backward()
        total = total + loss.detach()
    return total
