"""Query, key and value share a product where that costs no memory, and only there."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.nn import MultiheadDilatedAttention, RotaryEmbedding, heads
from ring_dilated_attention.nn.heads import project_heads

SHAPE: dict[str, Any] = {"segment_lengths": [8, None], "dilation_rates": [1, 2]}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count["products"] += name in ("mm", "addmm", "linear", "_addmm_activation")
        return function(*args, **(kwargs or {}))


def layers_of(sizes=(24, 12, 12), bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Linear(24, size, bias, dtype=dtype) for size in sizes]


def projected(layers, rows, enabled=True, inputs=None):
    """Results, gradients, and how many products forward took."""
    rows = rows.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled), Products() as seen:
        results = project_heads(layers, inputs or [rows] * len(layers), 4)
    weights = [p for layer in layers for p in layer.parameters()]
    loss = torch.stack([x.double().square().mean() * i for i, x in enumerate(results, 1)]).sum()
    return results, torch.autograd.grad(loss, [rows, *weights]), seen.count["products"]


@pytest.mark.parametrize("bias", [True, False])
def test_one_product_is_what_several_are(bias):
    rows = torch.randn(2, 7, 24)
    layers = layers_of(bias=bias)
    results, gradients, products = projected(layers, rows)
    assert products == 1
    assert [x.shape for x in results] == [(2, 7, 6, 4), (2, 7, 3, 4), (2, 7, 3, 4)]
    for hooked in layers:
        hooked.register_forward_hook(lambda *_: None)
    apart, wanted, products = projected(layers, rows)
    assert products == 3
    for got, want in zip([*results, *gradients], [*apart, *wanted], strict=True):
        assert got.dtype == want.dtype
        assert relative_error(got, want) < 2e-2


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
        weight_norm,
        lambda layer: setattr(layer, "forward", layer.forward),
    ],
    ids=["hook", "pre-hook", "backward hook", "parametrized", "another forward"],
)
def test_a_layer_that_is_not_plain_is_called(change):
    layers = layers_of()
    rows = torch.randn(1, 5, 24)
    change(layers[1])
    assert projected(layers, rows)[2] == 3


def test_no_copy_is_made_where_autocast_makes_none():
    rows = torch.randn(1, 5, 24)
    assert projected(layers_of(), rows, enabled=False)[2] == 3
    halves = layers_of(dtype=torch.bfloat16)
    assert projected(halves, rows.bfloat16())[2] == 3
    with torch.autocast("cpu", torch.bfloat16), Products() as seen:
        project_heads(layers_of(), [rows, rows.clone(), rows], 4)
    assert seen.count["products"] == 3
    assert len(project_heads(layers_of(), [rows[:, :0]] * 3, 4)) == 3


def test_gradients_of_some_do_not_keep_the_memory_of_all():
    layers = layers_of()
    layers[1].requires_grad_(False)
    rows = torch.randn(1, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        torch.cat([x.flatten() for x in project_heads(layers, [rows] * 3, 4)]).sum().backward()
    gradient = layers[0].weight.grad
    assert gradient is not None
    assert gradient.untyped_storage().nbytes() == gradient.nbytes


def test_few_rows_of_a_wide_model_are_projected_layer_by_layer(monkeypatch):
    layers = layers_of()
    for width, count, want in ((24, 5, 1), (23, 5, 3), (23, 24, 1)):
        monkeypatch.setattr(heads, "NARROW", width)
        assert projected(layers, torch.randn(1, count, 24))[2] == want


def test_a_value_keeps_nothing_but_itself_beside_rotations():
    module = MultiheadDilatedAttention(24, 6, **SHAPE)
    rows = torch.randn(1, 5, 24)
    with torch.autocast("cpu", torch.bfloat16):
        *_, alone = module.project(rows, rows, rows, rope=RotaryEmbedding(4)(torch.arange(5)))
        *_, joint = module.project(rows, rows, rows)
    assert alone.untyped_storage().nbytes() == alone.nbytes
    assert joint.untyped_storage().nbytes() == 3 * joint.nbytes
