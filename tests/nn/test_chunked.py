"""Row-wise functions in chunks: the same results and gradients, and one chunk's intermediates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.nn import map_rows

WIDTH = 6


class TwoInputs(nn.Module):
    """Rows of two inputs, one of them not differentiable, to two results of unlike shapes."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype)
        self.contract = nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, x, index, table):
        y = x + self.contract(F.gelu(self.expand(self.norm(x)))) * table
        return y, y.gather(2, index[..., None])[..., 0]


def inputs(length, dtype=torch.float64, batch=2):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, length, WIDTH, dtype=dtype, generator=generator, requires_grad=True)
    index = torch.randint(WIDTH, (batch, length), generator=generator)
    table = torch.randn(1, length, WIDTH, dtype=dtype, generator=generator)  # of all sequences
    return x, index, table


def results_and_gradients(module, arguments, rows, *, use=(0, 1)):
    results = map_rows(module, *arguments, rows=rows, modules=(module,))
    loss = sum(results[i].float().square().sum() for i in use)
    wanted = [arguments[0], *(p for p in module.parameters() if p.requires_grad)]
    return [*results, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("length", [0, 1, 13])
@pytest.mark.parametrize("rows", [1, 4, 13, 50])
def test_chunks_change_nothing(rows, length):
    torch.manual_seed(0)
    module, arguments = TwoInputs(), inputs(length)
    want = results_and_gradients(module, arguments, None)
    have = results_and_gradients(module, arguments, rows)
    for a, b in zip(have, want, strict=True):
        assert a.shape == b.shape
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("use", [(0,), (1,)])
def test_a_result_may_stay_unused(use):
    module, arguments = TwoInputs(), inputs(9)
    want = results_and_gradients(module, arguments, None, use=use)
    for a, b in zip(results_and_gradients(module, arguments, 4, use=use), want, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("inside", [False, True])  # backward, of autocast: it caches cast weights
def test_backward_runs_under_the_autocast_of_forward(inside):
    torch.manual_seed(0)
    module, arguments = TwoInputs(torch.float32), inputs(40, torch.float32)
    exact = results_and_gradients(module, arguments, None)

    def run(rows):
        with torch.autocast("cpu", torch.bfloat16):
            results = map_rows(module, *arguments, rows=rows, modules=(module,))
            loss = sum(y.float().square().sum() for y in results)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            gradients = torch.autograd.grad(loss, [arguments[0], *module.parameters()])
        return [*results, *gradients]

    for chunked, whole, want in zip(run(7), run(None), exact, strict=True):
        assert chunked.dtype == whole.dtype
        assert 0 < relative_error(whole, want) < 0.02
        assert 0 < relative_error(chunked, want) < 1.3 * relative_error(whole, want)


class Widest(TorchDispatchMode):
    """The most elements of a tensor that an operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def test_no_intermediate_has_all_rows():
    module, arguments = TwoInputs(), inputs(64)
    for rows, most in ((8, 2 * 64 * WIDTH), (None, 2 * 64 * 4 * WIDTH)):
        with Widest() as widest:
            results_and_gradients(module, arguments, rows)
        assert widest.numel == most


def test_only_inputs_are_kept():
    module, arguments = TwoInputs(), inputs(64)
    kept = []

    def keep(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        map_rows(module, *arguments, rows=8, modules=(module,))
    held = {x.data_ptr() for x in (*arguments, *module.parameters())}
    assert {x.data_ptr() for x in kept} == held


@pytest.mark.parametrize("rows", [4, 50])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_numbers_of_forward_come_back(device, rows):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()).double().to(device)
    x = inputs(13)[0].detach().to(device).requires_grad_()
    of = [x, *module.parameters()]

    def gradients(function):
        torch.manual_seed(5)
        results = function(x)
        after = torch.rand(3, device=device)  # backward takes none of the numbers that come next
        found = torch.autograd.grad(results.square().sum(), of)
        return [results, after, *found, torch.rand(3), torch.rand(3, device=device)]

    def chunked(x):
        return map_rows(module, x, rows=rows, modules=(module,))

    def one_by_one(x):
        return torch.cat([module(chunk) for chunk in x.split(rows, 1)], 1)

    for a, b in zip(gradients(chunked), gradients(one_by_one), strict=True):
        assert relative_error(a, b) < 1e-12


def test_random_numbers_of_a_function_without_modules():
    x = inputs(13)[0]
    dropped = map_rows(F.dropout, x, rows=4)
    (dx,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(dx * x, dropped)


@pytest.mark.parametrize("rows", [4, 50])
def test_results_of_frozen_parts(rows):
    """Of adapters on one of two projections the other gets no gradient."""
    one, other = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
    x, of = inputs(13)[0].detach(), list(one.parameters())
    other.requires_grad_(False)

    def mapped(rows):
        return map_rows(lambda x: (one(x), other(x)), x, rows=rows, modules=(one, other))

    found, wanted = (torch.autograd.grad(torch.mul(*mapped(n)).sum(), of) for n in (rows, None))
    for a, b in zip(found, wanted, strict=True):
        assert relative_error(a, b) < 1e-12
    unused = torch.autograd.grad(mapped(rows)[1].sum(), of, allow_unused=True)
    assert all(x is None for x in unused)


def test_many_chunks_in_half_precision_add_up_in_float32():
    torch.manual_seed(0)
    module, x = nn.Linear(WIDTH, WIDTH), torch.randn(1, 3_000, WIDTH, dtype=torch.bfloat16)
    module.bfloat16()
    results = map_rows(module, x, rows=2, modules=(module,))
    weight, bias = torch.autograd.grad(results.sum(), list(module.parameters()))
    assert relative_error(weight, x.double().sum(1).expand(WIDTH, -1)) < 0.01
    assert bias.tolist() == [3_008] * WIDTH  # 3,000 in bfloat16


def test_views_of_a_flat_parameter_are_refused():
    """As FullyShardedDataParallel makes them: their gradients would be lost."""
    module, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(1, 13, WIDTH)
    flat = nn.Parameter(module.weight.detach().flatten())
    del module.weight
    module.weight = flat.view(WIDTH, WIDTH)
    with pytest.raises(ValueError, match="weight of a Linear into a flat one: use fully_shard"):
        map_rows(module, x, rows=4, modules=(module,))


def test_refusals():
    with pytest.raises(ValueError, match="rows must be >= 1, got 0"):
        map_rows(torch.relu, torch.zeros(1, 3), rows=0)
    with pytest.raises(ValueError, match=r"same number of rows; got shapes \(1, 3\), \(1, 4\)"):
        map_rows(torch.add, torch.zeros(1, 3), torch.zeros(1, 4), rows=2)


@pytest.mark.parametrize("rows", [4, 20])
def test_parameters_that_were_frozen_since_forward_get_no_gradient(rows):
    module, arguments = TwoInputs(), inputs(9)
    found = sum(x.sum() for x in map_rows(module, *arguments, rows=rows, modules=(module,)))
    wanted = sum(x.sum() for x in module(*arguments))
    module.expand.requires_grad_(False)
    gradients = []
    for total in (found, wanted):
        total.backward()
        assert module.expand.weight.grad is None
        gradients.append([arguments[0].grad, module.contract.weight.grad, module.norm.weight.grad])
        for x in (*module.parameters(), arguments[0]):
            x.grad = None
    for a, b in zip(*gradients, strict=True):
        assert relative_error(a, b) < 1e-12


def test_parameters_changed_before_backward_are_an_error():
    module, arguments = TwoInputs(), inputs(9)
    loss = map_rows(module, *arguments, rows=4, modules=(module,))[0].sum()
    with torch.no_grad():
        module.expand.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_that_take_no_part_are_an_error():
    module, arguments = TwoInputs(), inputs(9)
    loss = map_rows(module, *arguments, rows=4, modules=(module, nn.Linear(2, 2)))[0].sum()
    with pytest.raises(RuntimeError, match="not have been used"):
        loss.backward()
