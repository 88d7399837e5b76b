"""A LayerNorm by our kernels, beside torch's in float64; interpreted where there is no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from ring_dilated_attention.checks import relative_error
from ring_dilated_attention.kernels import norm_gradients, norm_rows
from ring_dilated_attention.nn import LayerNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
MANY = 40_001
"""Rows, on which layers take these kernels."""


@pytest.mark.parametrize(
    ("count", "width", "dtype"),
    [
        *[
            (count, width, dtype)
            for count, width in ((0, 24), (1, 16), (37, 24), (300, 768), (53, 1000))
            for dtype in TOLERANCE
        ],
        (600, 3072, torch.float16),  # more blocks than programs
    ],
)
def test_kernels(count, width, dtype):
    torch.manual_seed(0)
    rows, dout = (3 * torch.randn(count, width, device=DEVICE).to(dtype) + 1 for _ in range(2))
    weight, bias = torch.randn(2, width, device=DEVICE)
    wide = [x.to(dtype).double().requires_grad_() for x in (rows, weight, bias)]
    want = torch.nn.functional.layer_norm(wide[0], (width,), wide[1], wide[2], 1e-5)
    wanted = torch.autograd.grad(want, wide, dout.double())
    out, numbers = norm_rows(rows, weight, bias, 1e-5)
    found = norm_gradients(dout, rows, numbers, weight)
    assert out.dtype == found[0].dtype == dtype
    assert found[1].dtype == found[2].dtype == torch.float32
    for x, y in zip((out, *found), (want, *wanted), strict=True):
        assert x.shape == y.shape
        assert count == 0 or relative_error(x, y) < TOLERANCE[dtype]
    if dtype == torch.float16:  # the interpreter cuts off what bfloat16 cannot hold
        assert torch.equal(norm_rows(rows, weight.half(), bias.half(), 1e-5)[0], out)


def layers(width, dtype):
    """A layer, and the same in float64, of what rounding leaves of its parameters."""
    norm = LayerNorm(width, device="cuda")
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    wide = torch.nn.LayerNorm(width, device="cuda", dtype=torch.float64)
    wide.load_state_dict({name: x.to(dtype) for name, x in norm.state_dict().items()})
    return norm, wide


def takes_ours(out):
    return type(out.grad_fn).__name__ == "_OnePassBackward"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [192, 768])
def test_layers_take_them(dtype, width):
    """Rows that are a view, under autocast, and gradients of gradients."""
    torch.manual_seed(0)
    norm, wide = layers(width, dtype)
    half = MANY // 2
    rows = torch.randn(2, width, half, device="cuda", dtype=dtype).transpose(1, 2)
    rows.requires_grad_()
    dout = torch.randn(2, half, width, device="cuda", dtype=dtype)
    with torch.autocast("cuda", dtype=dtype):
        out = norm(rows)
    assert takes_ours(out)
    assert out.dtype == dtype
    wide_rows = rows.detach().double().requires_grad_()
    want = wide(wide_rows)
    assert relative_error(out, want) < 1e-2
    inputs, wide_inputs = [rows, *norm.parameters()], [wide_rows, *wide.parameters()]
    again = torch.autograd.grad(norm(rows), inputs, dout)
    found = torch.autograd.grad(out, inputs, dout, create_graph=True)
    wanted = torch.autograd.grad(want, wide_inputs, dout.double(), create_graph=True)
    for x, y, z in zip(found, again, wanted, strict=True):
        assert x.dtype == y.dtype
        assert relative_error(x, z) < 1e-2
        assert relative_error(y, z) < 1e-2
    (second,) = torch.autograd.grad(found[0].float().square().sum(), [rows])
    (wanted_second,) = torch.autograd.grad(wanted[0].square().sum(), [wide_rows])
    assert relative_error(second, wanted_second) < 5e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch.func's own
def test_layers_leave_to_torch_what_the_kernels_do_not_take():
    norm, _ = layers(64, torch.float16)
    rows = torch.randn(MANY, 64, device="cuda", dtype=torch.float16)
    assert takes_ours(norm(rows))
    assert not takes_ours(norm(rows[:100]))  # few
    assert not takes_ours(norm(rows.float()))
    wide = LayerNorm(8192, device="cuda")
    assert not takes_ours(wide(rows.new_ones(MANY, 8192)))
    without = LayerNorm(64, bias=False, device="cuda")
    assert not takes_ours(without(rows))
    of_two = LayerNorm((2, 32), device="cuda")
    assert not takes_ours(of_two(rows.view(MANY, 2, 32)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(rows, torch.ones_like(rows))
        assert torch.autograd.forward_ad.unpack_dual(norm(dual)).tangent is not None
    mapped = torch.func.vmap(norm)(rows.unsqueeze(0))
    assert relative_error(mapped[0], norm(rows)) < 2e-3
