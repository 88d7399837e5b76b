"""torch.func, and what our derivatives do not offer."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from support.tolerances import FLOAT64
from torch.func import grad, hessian, jacfwd, jacrev, jvp

from ring_dilated_attention import (
    DilatedPattern,
    SequenceLayout,
    dilated_attention,
    replicated_query_attention,
)
from ring_dilated_attention.checks import reference_attention, relative_error
from ring_dilated_attention.exchange import run_loopback

PATTERN = DilatedPattern([4, None], [1, 2])


# What torch imports for forward mode uses it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def attend(query, key, value, **options):
    return dilated_attention(query, key, value, PATTERN, is_causal=True, **options)


def replicated(query, key, value):
    return replicated_query_attention(query, key, value, PATTERN, range(9))


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return torch.randn(3, 1, 9, 2, 8, dtype=torch.float64).unbind(0)


def expected(tensors, dout):
    query, key, value = leaves = [x.clone().requires_grad_() for x in tensors]
    out, _ = reference_attention(query, key, value, PATTERN, is_causal=True)
    return torch.autograd.grad(out, leaves, dout)


def test_grad_on_several_ranks(tensors):
    layout = SequenceLayout.zigzag(9, 3)
    dout = torch.randn_like(tensors[0])

    def rank(ends):
        own = [layout.shard(x, ends.rank, 1) for x in (*tensors, dout)]

        def loss(query, key, value):
            return (attend(query, key, value, group=ends, layout=layout) * own[3]).sum()

        return grad(loss, argnums=(0, 1, 2))(*own[:3])

    found = run_loopback(3, rank)
    for number, want in enumerate(expected(tensors, dout)):
        for ends, got in enumerate(found):
            assert relative_error(got[number], layout.shard(want, ends, 1)) < FLOAT64


@pytest.mark.filterwarnings("ignore:There is a performance drop because")  # jacrev vmaps backward
def test_jacrev(tensors):
    query, key, value = tensors
    found = jacrev(lambda x: attend(x, key, value)[0, :2, 0, 0])(query)
    for row in range(2):
        dout = torch.zeros_like(query)
        dout[0, row, 0, 0] = 1
        assert relative_error(found[row], expected(tensors, dout)[0]) < FLOAT64


@pytest.mark.filterwarnings("ignore:There is a performance drop because")
@pytest.mark.parametrize("function", [attend, replicated])
def test_second_derivatives_are_refused(tensors, function):
    query, key, value = tensors

    def loss(query):
        return function(query, key, value).sum()

    leaf = query.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    assert gradient.grad_fn.name() == "_OnceBackward"
    with pytest.raises(RuntimeError, match="attention cannot be differentiated again"):
        gradient.sum().backward()
    why = "attention cannot be differentiated again" if function is attend else "vmap support"
    with pytest.raises(RuntimeError, match=why):
        hessian(loss)(query)


@pytest.mark.parametrize("function", [attend, replicated])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("which", range(3))
def test_tangents_are_refused(tensors, function, requires_grad, which):
    with fwAD.dual_level():
        inputs = [x.clone().requires_grad_(requires_grad) for x in tensors]
        function(*inputs)  # without tangents all is well
        inputs[which] = fwAD.make_dual(inputs[which], torch.ones_like(inputs[which]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            function(*inputs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_one_call_after_the_other(tensors):
    """As for gradients of each example; torch has no such loop for results that are lists."""
    several = [torch.stack((x, 2 * x, x.flip(1))) for x in tensors]

    def loss(query, key, value):
        return attend(query, key, value).square().sum()

    found = torch.func.vmap(grad(loss))(*several)
    want = torch.stack([grad(loss)(*each) for each in zip(*several, strict=True)])
    assert relative_error(found, want) < FLOAT64


@pytest.mark.parametrize("function", [attend, replicated])
@pytest.mark.parametrize("transform", [jvp, jacfwd])
def test_forward_mode_is_refused(tensors, function, transform):
    query, key, value = tensors

    def loss(query):
        return function(query, key, value).sum()

    with pytest.raises(NotImplementedError, match="forward"):
        jvp(loss, (query,), (query,)) if transform is jvp else transform(loss)(query)
