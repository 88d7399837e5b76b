"""`FlopCounterMode` counts what the plan counts: useful operations of this rank."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ring_dilated_attention import DilatedPattern, SequenceLayout, dilated_attention, plan_attention
from ring_dilated_attention.exchange import run_loopback
from ring_dilated_attention.plan import costs

PATTERN = DilatedPattern([5, 16, None], [1, 2, 3])
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
OPERATORS = [torch.ops.ring_dilated_attention.forward, torch.ops.ring_dilated_attention.backward]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "documents": {"documents": [0, 7, 30, 42], "is_causal": True},
    "lengths": {"lengths": [42, 17, 0]},
    "both": {"lengths": [17, 40, 17], "documents": [0, 20, 42], "is_causal": True},
    "zigzag": {"layout": SequenceLayout.zigzag(42, 1)},
}


def attend(query, key, value, **options):
    return dilated_attention(query, key, value, PATTERN, **options)


def leaves(batch, length):
    shapes = [(batch, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def counted(function, inputs):
    """Operations of forward and of backward."""
    with FlopCounterMode(display=False) as mode:
        function(*inputs).sum().backward()
    of_all = mode.get_flop_counts()["Global"]
    assert set(of_all) <= set(OPERATORS)  # what runs inside of them is not counted twice
    return [of_all.get(operator, 0) for operator in OPERATORS]


def planned(layout, rank, batch, lengths=None, **options):
    size, forward = costs.TensorSize(batch=1, head_dim=HEAD_DIM, element_size=4), 0
    options = {"is_causal": False, "num_heads": HEADS, "num_kv_heads": KV_HEADS, **options}
    for length in lengths or [layout.length] * batch:
        plan = plan_attention(PATTERN, layout, length=length, **options)
        forward += costs.flops(plan.rank(rank), size)
    return [forward, forward * 5 // 2]


@pytest.mark.parametrize("name", CASES)
def test_one_rank(name):
    options = CASES[name]
    found = counted(partial(attend, **options), leaves(3, 42))
    layout = SequenceLayout.contiguous(42, 1)
    rest = {key: value for key, value in options.items() if key != "layout"}
    assert found == planned(layout, 0, 3, **rest)
    assert min(found) > 0


@pytest.mark.parametrize("first", ["ring_dilated_attention.torch_op", "torch.utils.flop_counter"])
def test_whichever_is_imported_first(first):
    """Importing what registers the operators imports neither the counter nor Triton."""
    code = f"""
import sys, {first}
if {first!r} == "ring_dilated_attention.torch_op":
    assert not {{"triton", "torch.utils.flop_counter"}} & set(sys.modules)
import torch, ring_dilated_attention.torch_op
from torch.utils.flop_counter import flop_registry
operators = torch.ops.ring_dilated_attention
assert operators.forward in flop_registry and operators.backward in flop_registry
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_several_ranks_count_their_own():
    layout = SequenceLayout.contiguous(48, 3)

    def rank(ends):
        options = {"is_causal": True, "group": ends, "layout": layout}
        return counted(partial(attend, **options), leaves(2, 16))

    found = run_loopback(3, rank)
    assert found == [planned(layout, rank, 2, is_causal=True) for rank in range(3)]
    assert found[0][0] < found[2][0]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    torch._dynamo.reset()
    causal = partial(attend, is_causal=True)
    compiled = torch.compile(causal, backend="aot_eager", dynamic=dynamic)
    layout = SequenceLayout.contiguous(42, 1)
    compiled(*leaves(2, 42))
    assert counted(compiled, leaves(2, 42)) == planned(layout, 0, 2, is_causal=True)


def test_modes_without_gradients_and_meta_tensors():
    """Tools that estimate a model's operations run it on tensors without data."""
    layout = SequenceLayout.contiguous(42, 1)
    with torch.no_grad(), FlopCounterMode(display=False) as mode:
        attend(*leaves(1, 42))
    assert mode.get_total_flops() == planned(layout, 0, 1)[0]
    with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as mode:
        attend(*leaves(1, 42)).sum().backward()
    assert mode.get_total_flops() == sum(planned(layout, 0, 1))
