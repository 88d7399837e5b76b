"""Models in DistributedDataParallel: what it averages, and calls beside it, on two ranks."""

import pytest
import torch
import torch.distributed as dist
from support.bounds import EXACT
from support.grid_steps import error
from support.small_models import make_model, make_text
from support.worlds import world
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_dilated_attention import SequenceLayout, labels_per_rank
from ring_dilated_attention.checks import run_ranks


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


# --- calls beside DDP

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
