"""The layer norm of a GELU in one kernel, and encoders by it; interpreted without a GPU."""

import os

import pytest
import torch
import torch.nn.functional as F
from support.tolerances import assert_close_to

pytest.importorskip("triton")

from ring_dilated_attention import kernels
from ring_dilated_attention.nn import SlideEncoder, SlideEncoderConfig, modules
from ring_dilated_attention.nn.modules import LayerNorm
from ring_dilated_attention.torch_op import gelu_norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs CUDA or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # by torch
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16, *([] if INTERPRETED else [torch.bfloat16])]


def case(*shape, dtype=torch.float32, seed=0):
    """Rows, weight, bias and dout."""
    torch.manual_seed(seed)
    rows, dout = (0.5 + 2 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    weight, bias = 1 + torch.randn(shape[-1]), torch.randn(shape[-1])
    return [x.to(DEVICE) for x in (rows, weight, bias, dout)]


def plainly(dtype, *inputs):
    """Out and the gradients of rows, weight and bias, computed by torch in a dtype."""
    *leaves, dout = (x.detach().to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    gelu = F.gelu(leaves[0])
    out = F.layer_norm(gelu, gelu.shape[-1:], leaves[1], leaves[2], 1e-5)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def by_kernel(rows, weight, bias, dout, *, function=gelu_norm):
    leaves = [x.detach().requires_grad_() for x in (rows, weight, bias)]
    out = function(*leaves, 1e-5)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def check(inputs, *, function=gelu_norm):
    """The kernel errs as torch does in the dtype of the rows; the results of the kernel."""
    found = by_kernel(*inputs, function=function)
    exact, rough = plainly(torch.float64, *inputs), plainly(inputs[0].dtype, *inputs)
    count = inputs[0].numel() // inputs[0].shape[-1]
    for got, want, plain in zip(found, exact, rough, strict=True):
        # Gradients of weight and bias are sums over all rows, of results in the rows' dtype.
        options = {"terms": count, "dtype": inputs[0].dtype}
        assert_close_to(got, want, plain=plain, factor=4.0, **options)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 5, 24), (2, 3, 100), (700, 7), (3, 1025), (1, 1, 4097)])
def test_out_and_gradients(shape, dtype):
    inputs = case(*shape, dtype=dtype)
    found = check(inputs)
    assert [x.dtype for x in found] == [dtype, dtype, torch.float32, torch.float32]


def test_rows_far_from_zero_and_weights_of_half_precision():
    rows, weight, bias, dout = case(4, 64)
    check([rows + 1000, weight, bias, dout])
    rows, weight, bias, dout = case(3, 50, dtype=torch.float16)
    found = check((rows, weight.half(), bias.half(), dout))
    assert found[2].dtype == found[3].dtype == torch.float16
    assert by_kernel(*case(1, 0, 24))[2].tolist() == [0.0] * 24  # of no rows at all


def test_views_of_other_tensors():
    rows, weight, bias, dout = case(2, 6, 40)
    views = rows[:, ::2, 3:36], weight[::1][3:36], bias.flip(0)[4:37], dout.mT[:, 3:36].mT[:, 1::2]
    check(views)
    narrow = rows.mT[:, :, :3], weight[:3], bias[1:4], dout.mT[:, :, 2:5]
    check(narrow)


def test_a_gradient_of_a_gradient_is_refused():
    rows, weight, bias, dout = case(3, 50)
    rows.requires_grad_()
    out = gelu_norm(rows, weight, bias, 1e-5)
    (drows,) = torch.autograd.grad(out, rows, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="a GELU and its norm cannot be differentiated again"):
        torch.autograd.grad(drows.sum(), rows)


def test_the_operator_compiles_in_one_graph():
    inputs = case(2, 30, 50)
    compiled = torch.compile(
        lambda *x: gelu_norm(*x) * 1, fullgraph=True, backend="aot_eager", dynamic=True
    )
    check(inputs, function=compiled)


def test_what_the_operator_says_of_its_results():
    rows, weight, bias, _ = case(2, 3, 50, dtype=torch.float16)
    inputs = (rows.mT.contiguous().mT.requires_grad_(), weight.requires_grad_(), bias, 1e-5)
    tests = (
        "test_schema",
        "test_autograd_registration",
        "test_faketensor",
        "test_aot_dispatch_static",
    )
    torch.library.opcheck(
        torch.ops.ring_dilated_attention.gelu_norm.default, inputs, test_utils=tests
    )


def encoder_and_slide():
    config = SlideEncoderConfig(
        in_dim=12, num_layers=2, embed_dim=32, num_heads=4, ffn_dim=72, segment_lengths=(16, None),
        dilation_rates=(1, 2),
    )  # fmt: skip
    torch.manual_seed(0)
    encoder = SlideEncoder(config).to(DEVICE)
    features = torch.randn(1, 37, 12, device=DEVICE)
    return encoder, features, torch.randint(0, 9, (1, 37, 2), device=DEVICE) * 256


def count_calls(monkeypatch):
    """A list that grows with each forward launch of the kernel."""
    one, calls = kernels.gelu_norm.gelu_norm_forward, []

    def counted(*inputs):
        calls.append(inputs)
        return one(*inputs)

    monkeypatch.setattr(kernels.gelu_norm, "gelu_norm_forward", counted)
    return calls


def step(encoder, features, coordinates, *, autocast=True):
    """The loss, and all gradients side by side: some are 0 but for rounding."""
    with torch.autocast(DEVICE.type, torch.float16, enabled=autocast):
        loss = encoder(features, coordinates).tiles.float().sin().sum()
    loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in encoder.parameters()])
    encoder.zero_grad()
    return [loss.detach(), gradients]


def test_an_encoder_is_the_same_by_it(monkeypatch):
    encoder, *slide = encoder_and_slide()
    if INTERPRETED:  # on a CPU it never takes the kernel
        monkeypatch.setattr(modules, "fits_one_kernel", lambda *_: True)
    calls = count_calls(monkeypatch)
    taken = step(encoder, *slide)
    assert len(calls) == 2 * encoder.config.num_layers  # forward, and again in backward
    monkeypatch.setattr(modules, "fits_one_kernel", lambda *_: False)
    check_steps(encoder, slide, taken)
    assert len(calls) == 2 * encoder.config.num_layers


def check_steps(encoder, slide, taken):
    """A step by the kernel errs as one without it does."""
    exact, plain = (step(encoder, *slide, autocast=autocast) for autocast in (False, True))
    for got, want, rough in zip(taken, exact, plain, strict=True):
        assert_close_to(got, want, plain=rough, factor=4.0, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_modules_that_do_more_than_a_norm_are_called():
    rows = case(3, 24, dtype=torch.float16)[0]
    plain, seen = LayerNorm(24).to(DEVICE), []
    assert modules.fits_one_kernel(plain, rows)
    assert not modules.fits_one_kernel(plain, rows.float())
    assert not modules.fits_one_kernel(torch.nn.LayerNorm(24).to(DEVICE), rows)
    assert not modules.fits_one_kernel(LayerNorm(24, bias=False).to(DEVICE), rows)
    assert not modules.fits_one_kernel(LayerNorm(24, elementwise_affine=False), rows)
    plain.register_forward_hook(lambda *_: seen.append(1))
    assert not modules.fits_one_kernel(plain, rows)
    modules.normalize_gelu(plain, rows)
    assert seen == [1]


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_compiled_encoder_takes_it_too(monkeypatch):
    encoder, *slide = encoder_and_slide()
    calls = count_calls(monkeypatch)
    compiled, _ = encoder_and_slide()[:2]
    compiled.compile(fullgraph=True)
    taken = step(compiled, *slide)
    assert len(calls) == 2 * encoder.config.num_layers
    monkeypatch.setattr(modules, "fits_one_kernel", lambda *_: False)
    check_steps(encoder, slide, taken)
