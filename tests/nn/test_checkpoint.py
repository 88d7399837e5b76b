"""Activation checkpointing: attention is kept, the rest recomputed, gradients are the same."""

import functools

import pytest
import torch
from support.small_models import Count, make_model
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ring_dilated_attention.engine import ring_forward
from ring_dilated_attention.nn import MultiheadDilatedAttention, attention_policy, keep_attention
from ring_dilated_attention.torch_op import FORWARD, operator

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning"
)  # the compiler's own

HOW = ("none", "full", "keep_attention")
LAYERS = 2  # of the model


def run_block(**options):
    """Gradients of a block, and how often its operators ran."""
    torch.manual_seed(0)
    block = MultiheadDilatedAttention(
        32, 4, segment_lengths=[6, None], dilation_rates=[1, 3], layer_norm=True
    )
    x = torch.randn(2, 20, 32, requires_grad=True)
    with Count() as count:
        if options:
            out, _ = checkpoint(block, x, x, x, use_reentrant=False, **options)
        else:
            out, _ = block(x, x, x)
        out.square().sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())], count.runs


def test_attention_is_kept_and_the_rest_recomputed():
    plain, runs = run_block()
    assert runs[FORWARD] == runs[operator.BACKWARD] == 1
    linears = runs[torch.ops.aten.addmm.default]
    everything, runs = run_block(preserve_rng_state=False)
    assert runs[FORWARD] == 2
    kept, runs = run_block(context_fn=keep_attention)
    assert runs[FORWARD] == runs[operator.BACKWARD] == 1
    assert runs[torch.ops.aten.addmm.default] > linears
    for gradients in (everything, kept):
        assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def test_the_policy_can_be_extended():
    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.aten.addmm.default:
            return CheckpointPolicy.MUST_SAVE
        return attention_policy(ctx, op, *args, **kwargs)

    plain, before = run_block()
    context_fn = functools.partial(create_selective_checkpoint_contexts, policy)
    kept, runs = run_block(context_fn=context_fn)
    for op in (FORWARD, torch.ops.aten.addmm.default):
        assert runs[op] == before[op]
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


def gradients_of(model, function, *arguments, **options):
    function(*arguments, **options).logsumexp(-1).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("chunk_rows", [None, 4])
@pytest.mark.parametrize("how", HOW)
def test_weights_that_change_in_place_before_backward_are_an_error(how, chunk_rows):
    """Backward would compute with others than forward."""
    model = make_model(how)
    model.chunk_rows = chunk_rows
    loss = model(torch.arange(24).view(1, 24)).sum()
    with torch.no_grad():
        model.blocks[1].attention.q_proj.weight.mul_(1.2)
    with pytest.raises(RuntimeError, match=r"in place between forward and|by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("chunk_rows", [None, 4])
@pytest.mark.parametrize("how", HOW)
def test_optimizers_may_step_in_backward(how, chunk_rows):
    """Each parameter as soon as its gradient is there, before what is in front of it."""
    plain, model = make_model(), make_model(how)
    model.chunk_rows = chunk_rows

    def step(parameter):
        parameter.detach().add_(parameter.grad, alpha=-0.1)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    tokens = torch.arange(24).view(1, 24)
    gradients = gradients_of(plain, plain, tokens)
    for got, want in zip(gradients_of(model, model, tokens), gradients, strict=True):
        torch.testing.assert_close(got, want)


def test_compiled_models_checkpoint(monkeypatch):
    runs = []

    def count(*arguments):
        runs.append(arguments)
        return ring_forward(*arguments)

    tokens = torch.arange(2 * 24).view(2, 24)
    whole = make_model()
    want = gradients_of(whole, whole, tokens)
    monkeypatch.setattr(operator, "ring_forward", count)
    for how in HOW:
        torch._dynamo.reset()
        runs.clear()
        model = make_model(how)
        function = torch.compile(model, backend="aot_eager", fullgraph=True)
        for a, b in zip(gradients_of(model, function, tokens), want, strict=True):
            torch.testing.assert_close(a, b)
        assert len(runs) == (2 * LAYERS if how == "full" else LAYERS)
    torch._dynamo.reset()
