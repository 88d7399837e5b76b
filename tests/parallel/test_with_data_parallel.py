"""Data parallelism beside sequence parallelism: DDP, the divisor of a loss, and equal batches."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.bounds import EXACT
from support.grid_steps import (
    error,
    grid,
    layout_of,
    llama_backward,
    llama_on_one_process,
    longnet_on_one_process,
    longnet_shards,
)
from support.small_models import make_model, make_text
from support.transformers_models import PATTERN, make
from support.worlds import world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import SequenceLayout, SoloExchange, check_same_batch, labels_per_rank
from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.integrations.transformers import set_attention, shard_batch

# --- losses


def longnet_in_ddp(mesh, **options):
    """The error of a step of two micro-batches; without options gradients are averaged once."""
    model = DistributedDataParallel(make_model(), **options)
    shards = longnet_shards(mesh)
    divisor = labels_per_rank([labels for _, labels in shards], model, mesh["sp"])
    total = torch.zeros((), dtype=torch.float64)
    for index, shard in enumerate(shards):
        with nullcontext() if index or options else model.no_sync():
            loss = model(*shard, group=mesh["sp"], layout=layout_of(mesh)) / divisor
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    want = longnet_on_one_process()
    return max(relative_error(total / 4, want[0]), error(model, want))


def llama_in_ddp(mesh):
    model = make()
    set_attention(model, PATTERN, group=mesh["sp"], layout=layout_of(mesh))
    wrapped = DistributedDataParallel(model)
    llama_backward(wrapped, mesh)  # without no_sync: averages add up
    return error(model, llama_on_one_process())


def ignored_labels(mesh):
    """A rank without labels, and a step without any."""
    labels = torch.full((1, 5), -100)
    none = labels_per_rank(labels, mesh, mesh["sp"])
    some = labels_per_rank(labels if dist.get_rank() else labels + 101, mesh, mesh["sp"])
    counted = labels_per_rank(dist.get_rank(), mesh["dp", "sp"], mesh["sp"])
    return [none.item(), some.item(), counted.item()]


def refuse_wrong_averages(mesh, rank):
    """Over the data-parallel ranks alone, over no rank, or not of all parameters."""
    sequence, labels = mesh["sp"], torch.ones(1, 3, dtype=torch.int64)
    only_data = DistributedDataParallel(make_model(), process_group=mesh.get_group("dp"))
    blocks_only, mixed = make_model(), make_model()
    for block in blocks_only.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(mixed.blocks[0], mesh=mesh["sp"])
    fully_shard(mixed, mesh=mesh)
    over_data = rf"over ranks \d, \d, without rank {rank ^ 1}, which hold other parts .*: wrap the"
    unsharded = "does not know 3 parameters, .*embedding.weight.* call fully_shard"
    neither = "LongNet is neither in DistributedDataParallel nor under fully_shard"
    averages: list[tuple[Any, str]] = [
        (only_data, over_data),
        (mesh["dp"], over_data),
        (mesh.get_group("dp"), over_data),
        (make_model(), neither),
        (fully_shard(make_model(), mesh=mesh["dp"]), f"without rank {rank ^ 1}"),
        (blocks_only, unsharded),
        (mixed, "over the same ranks; got "),
    ]
    for average, message in averages:
        with pytest.raises(ValueError, match=message):
            labels_per_rank(labels, average, sequence)
    wrong_labels: list[tuple[Any, str]] = [
        (labels != -100, "labels must be tensors of ints .*Got torch.bool"),
        (None, "labels must be tensors of ints .*Got None"),
        ([3], "labels must be tensors of ints .*Got 3"),
    ]
    for wrong, message in wrong_labels:
        with pytest.raises((TypeError, ValueError), match=message):
            labels_per_rank(wrong, mesh, sequence)
    assert labels_per_rank([], mesh, sequence) == labels_per_rank(0, mesh, sequence)
    with pytest.raises(TypeError, match="group must be"):
        labels_per_rank(labels, mesh, "sp")  # type: ignore[arg-type]


OTHERS = "^1 of the ranks that average gradients refused their arguments"


def refuse_labels(rank, world_size):
    """Of one rank: the others say so instead of waiting, and all may go on. And DTensors."""
    labels = torch.ones(1, 3, dtype=torch.int64)
    cases: list[tuple[Any, Any, str]] = [
        (labels.float(), world(), "Got torch.float32"),
        (labels, "sp", "group must be"),
        (iter([labels, labels[0, 0]]), world(), r"Got torch.int64 of shape \(\)"),
        (-1, world(), "a number >= 0; got -1"),
    ]
    for wrong, group, message in cases:
        given, where, expected = (wrong, group, message) if rank else (labels, world(), OTHERS)
        with pytest.raises((TypeError, ValueError), match=expected):
            labels_per_rank(given, world(), where)
        assert labels_per_rank(labels, world(), world()) == 3
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(12).reshape(1, 12)
    labels = distribute_tensor(whole, mesh, [Shard(1)])
    for given in (labels, [labels], distribute_tensor(whole, mesh, [Replicate()])):
        with pytest.raises(TypeError, match=r"this rank's shard; got a DTensor: .*to_local\(\)"):
            labels_per_rank(given, mesh, mesh)
    assert labels_per_rank(labels.to_local(), mesh, mesh) == 6
    with pytest.raises(TypeError, match=r"held has a DTensor: compare batches before they are dis"):
        check_same_batch({"held": [labels]}, mesh)


def test_labels_per_rank_raises_on_all_ranks_and_dtensors_are_refused():
    run_ranks(refuse_labels, 2, wait_timeout=20)

    def run(ends):
        given, message = (-1, "got -1") if ends.rank == 2 else (4, OTHERS)
        with pytest.raises(ValueError, match=message):
            labels_per_rank(given, ends, ends)
        assert labels_per_rank(4, ends, ends) == 4

    run_loopback(3, run)


def in_ddp(rank, world_size):
    mesh = grid()
    refuse_wrong_averages(mesh, rank)
    return {
        "LongNet": longnet_in_ddp(mesh),
        "LongNet, a static graph": longnet_in_ddp(mesh, static_graph=True),
        "LongNet, unused parameters": longnet_in_ddp(mesh, find_unused_parameters=True),
        "Llama": llama_in_ddp(mesh),
    }, ignored_labels(mesh)


@pytest.mark.slow
def test_a_step_on_a_grid_of_ranks_in_ddp_is_that_of_one_process():
    """DDP over data- and sequence-parallel ranks, unequal batches, uneven shards, accumulation."""
    for errors, counts in run_ranks(in_ddp, 4):
        assert max(errors.values()) < EXACT, errors
        assert counts == [0.25, 5 / 4, 6 / 4]


def test_labels_on_one_process_and_of_threads():
    labels = torch.tensor([[1, -100, 3]])
    assert labels_per_rank(labels, SoloExchange(), None) == 2
    assert labels_per_rank([labels, labels], SoloExchange(), None, ignore_index=1) == 4
    counts = run_loopback(3, lambda ends: labels_per_rank(ends.rank, ends, ends))
    assert counts == [1, 1, 1]


def test_a_mean_over_the_labels_of_a_shard_is_refused():
    """A local mean loss with uneven shards, as of a Trainer that counts its own labels alone."""
    layout = SequenceLayout([[(0, 20)], [(20, 31)]])
    tokens = torch.arange(31)[None]

    def run(ends):
        model = make()
        set_attention(model, PATTERN, group=ends, layout=layout)
        shard = shard_batch({"input_ids": tokens, "labels": tokens}, layout, ends)
        count = (shard["shift_labels"] != -100).sum()
        message = r"num_items_in_batch is 20 on rank 0, 10 on rank 1\. num_items_in_batch must"
        with pytest.raises(ValueError, match=message):
            model(**shard, num_items_in_batch=count)

    run_loopback(2, run)


# --- batches


def batch():
    ids = torch.arange(30).reshape(2, 15)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.ones_like(ids),
        "cu_seq_lens_q": [0, 15],
        "inputs_embeds": torch.randn(2, 15, 4, generator=torch.Generator().manual_seed(0)),
    }


CHANGES: dict[str, Callable[[Any], Any]] = {
    "input_ids": lambda x: x.flip(0),
    "labels": lambda x: x.index_fill(1, torch.tensor([14]), 7),
    "attention_mask": lambda x: x.bool(),
    "cu_seq_lens_q": lambda x: [0, 9, 15],
    "inputs_embeds": lambda x: x.flip(0),
}


def test_ranks_of_a_group_with_other_batches_are_named():
    def run(ends):
        for name, change in CHANGES.items():
            mine = batch()
            check_same_batch(mine, ends)  # the ranks may go on after each error
            if ends.rank == 1:
                mine[name] = change(mine[name])
            message = rf"{name} is .* on ranks 0, 2, .* on rank 1\. All ranks of a group must be"
            with pytest.raises(ValueError, match=message) as caught:
                check_same_batch(mine, ends)
            assert str(caught.value).count(" is ") == 1  # nothing else differs
            with pytest.raises(ValueError, match=message):
                shard_batch(mine, SequenceLayout.zigzag(15, 3), ends)

    run_loopback(3, run)


def changed(number, dtype=torch.int64):
    """3,000 numbers, one of which `repr` does not show."""
    return torch.zeros(3000, dtype=dtype).index_fill(0, torch.tensor([1500]), number)


HELD: dict[str, Callable[[int], Any]] = {
    "nested": lambda number: [{"input_ids": (changed(0), "a", changed(number))}],
    "array of strings": lambda number: np.array(["a"] * 1500 + [str(number)] + ["a"] * 1500),
    "floats": lambda number: [torch.tensor([1.23456 + 1e-5 * number])],
    "a view": lambda number: torch.stack([changed(number)] * 2, 1)[:, ::2],
    "bool": lambda number: changed(number, dtype=torch.bool),
    "empty": lambda number: torch.zeros(0, number),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_batch_holds_in_lists_and_dicts_counts(name):
    def run(ends):
        for number in (0, 1):
            check_same_batch({"ids": torch.arange(3), "x": HELD[name](number)}, ends)
        with pytest.raises(ValueError, match="arguments on different ranks: x is "):
            check_same_batch({"x": HELD[name](ends.rank)}, ends)

    run_loopback(2, run)


def test_a_worker_of_a_data_loader_is_told_to_leave_it_to_the_training_loop(monkeypatch):
    layout, ids = SequenceLayout.zigzag(15, 2), {"input_ids": torch.arange(15)[None]}
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")

    def run(ends):
        message = "was called in a worker process of a DataLoader.*training loop"
        with pytest.raises(RuntimeError, match=message):
            shard_batch(ids, layout, ends)

    run_loopback(2, run)
    whole = SequenceLayout.contiguous(15, 1)
    assert torch.equal(shard_batch(ids, whole)["input_ids"], ids["input_ids"])


# --- calls beside DDP, on two ranks


def takes(model):
    assert labels_per_rank(5, model, world()) == 5


def with_a_hook():
    wrapped, builtin = (DistributedDataParallel(nn.Linear(3, 2)) for _ in range(2))
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    message = "communication hook, allreduce_hook, .* pass the ProcessGroup or DeviceMesh"
    with pytest.raises(ValueError, match=message):
        labels_per_rank(5, wrapped, world())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    takes(builtin)


LAYOUT = SequenceLayout([[(0, 9), (20, 23)], [(9, 20)]])


class Outer(nn.Module):
    """A user's model, which computes the loss of the one in it."""

    def __init__(self, inner):
        super().__init__()
        self.lm = inner

    def forward(self, tokens, labels, **options):
        return self.lm.loss(tokens, labels, **options)


class Checkpointed(Outer):
    """Backward calls the model again, when DDP's forward has ended."""

    def forward(self, tokens, labels, **options):
        return checkpoint(self.lm, tokens, labels, use_reentrant=False, **options)


def compiled(model):
    return torch.compile(model, backend="eager")


WAYS = {
    "LongNet": make_model,
    "in another": lambda: Outer(make_model()),
    "checkpoint": lambda: Checkpointed(make_model()),
}
COMPILED = {
    "LongNet": lambda: compiled(make_model()),
    "inner": lambda: Outer(compiled(make_model())),
    "outer": lambda: compiled(Outer(make_model())),
    "checkpoint": lambda: compiled(Checkpointed(make_model())),
}


def own_text(rank):
    return [LAYOUT.shard(x, rank, 1) for x in make_text()]


def one_step(rank, model, wrap):
    """The error of a step in DDP."""
    tokens, labels = own_text(rank)
    wrapped = wrap(DistributedDataParallel(model))
    divisor = labels_per_rank(labels, wrapped, world())
    (wrapped(tokens, labels, group=world(), layout=LAYOUT) / divisor).backward()
    alone, (tokens, labels) = make_model(), make_text()
    loss = alone.loss(tokens, labels) / labels.numel()
    return error(model, [loss, *torch.autograd.grad(loss, list(alone.parameters()))])


def steps(rank, world_size, are_compiled):
    found = {
        name: one_step(rank, make(), lambda ddp: ddp)
        for name, make in (COMPILED if are_compiled else WAYS).items()
    }
    if are_compiled:
        found["DDP"] = one_step(rank, make_model(), compiled)
    return found


@pytest.mark.parametrize("are_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ddp_may_call_a_model_in_any_module_and_backward_again(are_compiled):
    for errors in run_ranks(steps, 2, are_compiled):
        assert max(errors.values()) < EXACT, errors


def refused(rank, world_size):
    with_a_hook()
    text, where = own_text(rank), {"group": world(), "layout": LAYOUT}
    message = "LongNet is in DistributedDataParallel, .*: call the wrapped model with its labels"
    known, unknown = Outer(make_model()), make_model()
    direct, inner = DistributedDataParallel(make_model()), DistributedDataParallel(known)
    late = DistributedDataParallel(compiled(make_model()))
    other = DistributedDataParallel(Outer(known.lm))  # of which labels_per_rank does not know
    for wrapped in (direct, inner, late):
        takes(wrapped)
    calls = [direct.module, direct.module.loss, known, known.lm.loss, late.module.loss]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call(*text, **where)
        with torch.no_grad():
            call(*text, **where)
    assert direct.module(text[0], **where).requires_grad  # logits are no loss
    unknown.loss(*text, **where).backward()
    other(*text, **where)
    known.lm.requires_grad_(False)
    known.lm.loss(*text, **where)


def test_labels_per_rank_refuses_a_communication_hook_and_models_a_loss_beside_ddp():
    run_ranks(refused, 2)
