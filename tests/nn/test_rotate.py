"""The rotation of query and key in one kernel, and LongNet by it; interpreted without a GPU."""

import os
from copy import deepcopy
from typing import Any

import pytest
import torch
from support.tolerances import assert_close_to

pytest.importorskip("triton")

from ring_dilated_attention import kernels
from ring_dilated_attention.nn import LongNet, LongNetConfig, RotaryEmbedding, Rotation, positions
from ring_dilated_attention.torch_op import rotate

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # by torch
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def case(batch, rows, heads, kv_heads, head_dim, *, tables=(), dtype=torch.float32):
    """Query, key, and their gradients; tables of shape (*tables, rows, head_dim), of no rotation:
    all their numbers are different."""
    torch.manual_seed(0)
    shapes = [(batch, rows, n, head_dim) for n in (heads, kv_heads)] * 2
    tensors = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    return *tensors, *torch.randn(2, *tables, rows, head_dim, device=DEVICE).unbind(0)


def by(function, query, key, dquery, dkey, cos, sin):
    """Both rotated, and the gradients of query and key."""
    leaves = [x.detach().requires_grad_() for x in (query, key)]
    outs = function(*leaves, cos, sin)
    return [*outs, *torch.autograd.grad(outs, leaves, (dquery, dkey))]


def plainly(query, key, cos, sin):
    rotation = Rotation(cos, sin)
    return rotation(query), rotation(key)


def check(inputs, function=rotate):
    """The kernel errs as torch's operations do; tables that are exact in float64."""
    found = by(function, *inputs)
    exact = by(plainly, *(x.double() for x in inputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "takes_kernels", lambda *_: False)
        rough = by(plainly, *inputs)
    for got, want, plain in zip(found, exact, rough, strict=True):
        assert got.dtype == inputs[0].dtype
        assert got.is_contiguous()
        if got.numel():
            assert_close_to(got, want, plain=plain, factor=1.5, terms=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(2, 37, 6, 2, 24), (1, 1, 12, 12, 64), (3, 70, 3, 1, 2), (1, 5, 2, 2, 258)]
)
def test_both_and_their_gradients(shape, dtype):
    check(case(*shape, dtype=dtype))
    check(case(*shape, dtype=dtype, tables=(shape[0],)))


def test_views_of_other_tensors_no_rows_and_no_heads():
    query, key, dquery, dkey, cos, sin = case(2, 40, 6, 2, 32, tables=(1,))
    joint = torch.cat((query, key), 2)[:, ::2]  # as of one product, and every other row
    views = *joint.split((6, 2), 2), dquery[:, 1::2], dkey.mT.contiguous().mT[:, ::2]
    check((*views, cos[:, ::2], sin[:, ::2].clone()))
    check((query[..., 3:11], key[..., 1:9], dquery[..., :8], dkey[..., :8], cos[..., :8],
           sin[..., 4:12]))  # fmt: skip
    check((query, key, dquery[:1, :1, :1, :1].expand_as(query), dkey, cos, sin))
    check([x[:, :0] for x in (query, key, dquery, dkey, cos, sin)])
    check((query, key[:, :, :0], dquery, dkey[:, :, :0], cos, sin))


def test_a_gradient_of_a_gradient_is_the_rotation():
    query, key, dquery, dkey, cos, sin = case(1, 5, 2, 1, 8)
    dquery.requires_grad_()
    outs = rotate(query.requires_grad_(), key, cos, sin)
    (found,) = torch.autograd.grad(outs, query, (dquery, dkey), create_graph=True)
    (back,) = torch.autograd.grad(found, dquery, query.detach())
    torch.testing.assert_close(back, outs[0].detach())


def test_the_operator_compiles_and_says_what_it_returns():
    inputs = case(2, 30, 4, 2, 16)
    compiled = torch.compile(
        lambda *x: [y * 1 for y in rotate(*x)], fullgraph=True, backend="aot_eager", dynamic=True
    )
    check(inputs, compiled)
    query, key, _, _, cos, sin = inputs
    operator = torch.ops.ring_dilated_attention.rotate.default
    given = query.mT.contiguous().mT.requires_grad_(), key.requires_grad_(), cos, sin, False
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    torch.library.opcheck(operator, given, test_utils=(*tests, "test_aot_dispatch_static"))


def model_and_tokens(**options):
    torch.manual_seed(0)
    config = LongNetConfig(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, ffn_dim=40,
                           segment_lengths=[16, None], dilation_rates=[1, 2])  # fmt: skip
    return LongNet(config, **options).to(DEVICE), torch.randint(0, 256, (2, 33), device=DEVICE)


def by_kernel(patch, takes=True):
    """A list that grows with each launch; on a CPU the kernel is taken where `takes` says so."""
    one, calls = kernels.rows.rotate_rows, []

    def counted(*inputs):
        calls.append(inputs)
        return one(*inputs)

    patch.setattr(kernels.rows, "rotate_rows", counted)
    if INTERPRETED or not takes:
        patch.setattr(positions, "takes_kernels", lambda *_: takes)
    return calls


@pytest.mark.parametrize("way", ["at once", "chunks", "compiled", "generated"])
def test_longnet_is_the_same_by_it(way, monkeypatch):
    model, tokens = model_and_tokens(chunk_rows=50 if way == "chunks" else None)
    exact_model = deepcopy(model).double()
    if way == "compiled":
        model.compile(fullgraph=True, backend="aot_eager")

    def step(model):
        if way == "generated":
            caches = model.make_caches(2, max_length=40)
            return [model.prefill(tokens, caches), model.step(tokens[:, :1], caches)]
        logits = model(tokens)
        found = torch.autograd.grad(logits.sin().sum(), tuple(model.parameters()))
        return [logits, torch.cat([x.flatten() for x in found])]

    calls = by_kernel(monkeypatch)
    taken = step(model)
    assert len(calls) == {"chunks": 6}.get(way, 4)  # forward, backward, and again in backward
    calls.clear()
    torch._dynamo.reset()
    by_kernel(monkeypatch, takes=False)
    for got, want, plain in zip(taken, step(exact_model), step(model), strict=True):
        assert_close_to(got, want, plain=plain)
    assert not calls


def test_what_the_kernel_is_not_for(monkeypatch):
    calls = by_kernel(monkeypatch)
    rotation = RotaryEmbedding(8)(torch.arange(5, device=DEVICE))
    query, key = torch.randn(2, 1, 5, 2, 8, device=DEVICE).unbind(0)
    rotation(query)
    positions.rotate_both(rotation.__call__, query, key)
    assert len(calls) == 2
    learned = Rotation(rotation.cos.clone().requires_grad_(), rotation.sin)
    turn: Any
    for turn, first, second in (
        (learned, query, key),
        (Rotation(*(t.double() for t in rotation)), query, key),
        (rotation, query.double(), key.double()),
        (rotation.__call__, query, key.double()),
        (torch.neg, query, key),
    ):
        found = positions.rotate_both(turn, first, second)
        assert len(calls) == 2 + (second.dtype != first.dtype)  # of the query alone
        torch.testing.assert_close(found, (turn(first), turn(second)))
        calls[2:] = []
    assert learned(query).requires_grad
    with pytest.raises(ValueError, match=r"needs shape \(batch, 5, heads, 8\)"):
        positions.rotate_both(rotation, query, key[:, :4])
