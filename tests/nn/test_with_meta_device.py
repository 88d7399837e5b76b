"""Modules made on the meta device, as torchtitan does it: the same weights from the same seed."""

from typing import Any

import pytest
import torch
from support.small_models import SHAPE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ring_dilated_attention.checks import relative_error, run_ranks
from ring_dilated_attention.nn import (
    LongNet,
    LongNetConfig,
    MultiheadDilatedAttention,
    SlideEncoder,
    SlideEncoderConfig,
)

PATTERN: dict[str, Any] = {"segment_lengths": (6, None), "dilation_rates": (1, 3)}


def language_model() -> Any:
    return LongNet(LongNetConfig(**SHAPE, **PATTERN))


def slide_encoder() -> Any:
    return SlideEncoder(SlideEncoderConfig(in_dim=8, **SHAPE, **PATTERN))


def layer() -> Any:
    return MultiheadDilatedAttention(
        32, 4, segment_lengths=(6, None), dilation_rates=(1, 3), layer_norm=True, gamma_init=0.5
    )


MODULES = [language_model, slide_encoder, layer]


@pytest.mark.parametrize("make", MODULES)
def test_the_same_weights_as_made_directly(make):
    """``torch.device("meta")``, ``to_empty``, ``reset_parameters``: no memory is left unwritten."""
    torch.manual_seed(3)
    direct = make()
    with torch.device("meta"):
        module = make()
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    want = direct.state_dict()
    assert module.state_dict().keys() == want.keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, want[name]), name
    assert not [name for name, _ in module.named_buffers()]  # of positions, nothing is kept


def _fully_sharded(rank, world_size):
    errors = {}
    mesh = init_device_mesh("cpu", (world_size,))
    for make in MODULES:
        with torch.device("meta"):
            module: nn.Module = make()
        for block in getattr(module, "blocks", []):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        module.to_empty(device="cpu")
        torch.manual_seed(3 + rank)  # ranks need not have one seed
        module.reset_parameters()  # type: ignore[operator]
        torch.manual_seed(3)
        want = dict(make().named_parameters())
        for name, parameter in module.named_parameters():
            assert isinstance(parameter, DTensor)
            errors[make.__name__, name] = relative_error(
                parameter.full_tensor().detach(), want[name].detach()
            )
    return errors


def test_under_fully_shard():
    """Made on the meta device, sharded, then filled: as torchtitan does it."""
    for errors in run_ranks(_fully_sharded, 2):
        assert max(errors.values()) == 0, errors
