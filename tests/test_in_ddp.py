"""Models in DistributedDataParallel: what it averages, and calls beside it, on two ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import world

from ring_dilated_attention import labels_per_rank
from ring_dilated_attention.checks import run_ranks


def small():
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def takes(model):
    assert labels_per_rank(5, model, world()) == 5


def refuses(model, message):
    with pytest.raises(ValueError, match=message):
        labels_per_rank(5, model, world())


# --- parameters


def unfrozen():
    model = small()
    model[0].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    takes(wrapped)
    model[0].requires_grad_(True)
    return wrapped


def frozen_and_unfrozen():
    """As many as before, but others."""
    model = small()
    model[0].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    model[1].requires_grad_(False)
    return wrapped


def added():
    wrapped = DistributedDataParallel(small())
    wrapped.module[0] = nn.Linear(3, 2)
    return wrapped


def ignored():
    model, names = small(), ["0.weight", "0.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def parameters(rank, world_size):
    for make in (unfrozen, frozen_and_unfrozen, added, ignored):
        refuses(make(), r"does not know 2 parameters, '0\.weight, 0\.bias'.* Wrap the model again")
    wrapped = DistributedDataParallel(small(), bucket_cap_mb=0)
    for _ in range(3):  # buckets are made anew
        takes(wrapped)
        wrapped(torch.ones(1, 3)).sum().backward()
    takes(torch.compile(wrapped))
    wrapped.module[0].requires_grad_(False)
    takes(wrapped)  # nothing to average is lost
    model = small()
    late = [("1.bias", model[1].bias)]
    takes(
        DistributedDataParallel(
            model, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model[0].weight
        )
    )


def test_a_parameter_that_ddp_does_not_average_is_named():
    run_ranks(parameters, 2)


# --- communication hooks


def summed(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda x: x.value()[0])


def hooked(state, hook):
    wrapped = DistributedDataParallel(small())
    wrapped.register_comm_hook(state, hook)
    return wrapped


def hooks(rank, world_size):
    own, _ = dist.new_subgroups(group_size=1)
    power: Any = PowerSGDState(None, matrix_approximation_rank=1)
    local: Any = PostLocalSGDState(world(), own, 0)
    for state, hook in (
        (None, default_hooks.allreduce_hook),
        (world(), default_hooks.fp16_compress_hook),
        (power, powerSGD_hook),
        (power, default_hooks.fp16_compress_wrapper(powerSGD_hook)),
    ):
        takes(hooked(state, hook))
    fused = DistributedDataParallel(small())
    fused._register_fused_optim(torch.optim.SGD, 0.1)
    takes(fused)
    builtin = DistributedDataParallel(small())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    takes(builtin)
    for state, hook, name in (
        (None, debugging_hooks.noop_hook, "noop_hook"),
        (None, default_hooks.fp16_compress_wrapper(summed), "summed"),
        (None, summed, "summed"),
        (local, post_localSGD_hook, "post_localSGD_hook"),
    ):
        refuses(
            hooked(state, hook),
            f"hook {name}, of which it is not known .* pass the ProcessGroup or DeviceMesh",
        )
    refuses(
        hooked(own, default_hooks.allreduce_hook),
        rf"over ranks \[0, 1\] and its .* allreduce_hook over ranks \[{rank}\]: give both the same",
    )


def test_a_communication_hook_that_may_not_average_over_all_ranks_is_refused():
    run_ranks(hooks, 2)
