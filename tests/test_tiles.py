import pytest
import torch

from ring_dilated_attention.testing import relative_error
from ring_dilated_attention.tiles import BACKENDS, TileGradients, TileInputs, select_backend
from ring_dilated_attention.tiles.eager import EAGER

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [1, 5, 16, 80, 256])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_fused_tiles_on_overlapping_views_equal_eager(rows, head_dim, is_causal):
    """Backward is given an out and lse merged with other keys', as the ring does."""
    torch.manual_seed(0)
    backend = select_backend("cpu_flash", CPU, torch.float64, head_dim).backend
    assert backend is not None
    n, heads = 2 * rows + 3, 3
    q, k, v, dout, other = torch.randn(5, 1, n, heads, head_dim, dtype=torch.float64)
    # Heads at their own offsets, every second row: strides overlap.
    q, k, v, dout = (
        x.as_strided(
            (1, heads, rows, head_dim), (0, heads * head_dim + head_dim, 2 * heads * head_dim, 1)
        )
        for x in (q, k, v, dout)
    )
    inputs = TileInputs(q, k, v, is_causal, 0.3)
    out, lse = EAGER.forward(inputs)
    got_out, got_lse = backend.forward(inputs)
    assert relative_error(got_out, out) < 1e-12
    assert relative_error(got_lse, lse) < 1e-12
    merged = 0.75 * out + 0.25 * other[:, :rows].transpose(1, 2)
    lse = lse - torch.tensor(0.75).log()
    want = EAGER.backward(inputs, TileGradients(dout, merged, lse))
    strided_lse = torch.stack([lse, lse], -1)[..., 0]
    got = backend.backward(inputs, TileGradients(dout, merged, strided_lse))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def _name(*arguments):
    backend = select_backend(*arguments).backend
    return backend and backend.name


def test_auto_prefers_a_fused_kernel():
    assert _name("auto", CPU, torch.float32, 64) == "cpu_flash"
    assert _name("sdpa", CPU, torch.bfloat16, 64) == "cpu_flash"


def test_a_named_backend_is_used_or_refused():
    assert _name("eager", CPU, torch.float32, 64) == "eager"
    with pytest.raises(ValueError, match="cudnn: it runs on cuda, the inputs are on cpu"):
        select_backend("cudnn", CPU, torch.float32, 64)
    cuda = torch.device("cuda")
    with pytest.raises(ValueError, match="multiple of 8 up to 256, not 12"):
        select_backend("flash", cuda, torch.bfloat16, 12)
    with pytest.raises(ValueError, match="it takes float16, bfloat16, the inputs are float64"):
        select_backend("cudnn", cuda, torch.float64, 64)
    with pytest.raises(ValueError, match=r"cpu_flash.*cudnn.*flash.*efficient"):
        select_backend("sdpa", cuda, torch.float64, 64)
    assert _name("auto", cuda, torch.float64, 64) == "eager"
    for head_dim in (12, 264):  # eager would take memory of rows^2: only when asked for
        with pytest.raises(ValueError, match=f"a multiple of 8 up to 256, not {head_dim}"):
            select_backend("auto", cuda, torch.bfloat16, head_dim)
    with pytest.raises(ValueError, match="backend must be one of 'auto', 'sdpa'"):
        select_backend("fast", CPU, torch.float32, 64)
    assert BACKENDS[0] == "auto"
