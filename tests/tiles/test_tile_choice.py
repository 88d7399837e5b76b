"""Which back end computes tiles, by the device."""

from itertools import pairwise

import pytest
import torch
from support.simulated_devices import DEVICES, simulated

from ring_dilated_attention.kernels import profile_of
from ring_dilated_attention.tiles import (
    Limits,
    Selection,
    backend_named,
    limits_on,
    select,
    select_backend,
)

ON_H200 = torch.device("cpu")  # what is no GPU has an H200's profile


@pytest.mark.parametrize("head_dim", [48, 64, 256])
@pytest.mark.parametrize("name", ["P100", "T4"])
def test_gpus_that_flash_attention_refuses(name, head_dim, monkeypatch):
    """GigaPath's heads of 48, too: by torch's memory-efficient kernels, but for bfloat16."""
    device = simulated(monkeypatch, name)
    for dtype in (torch.float16, torch.float32):
        for backend in ("auto", "sdpa", "efficient"):
            chosen = select_backend(backend, device, dtype, head_dim).backend
            assert chosen is not None
            assert chosen.name == "efficient"
    for backend in ("cudnn", "flash"):
        with pytest.raises(ValueError, match=r"compute capability 8\.0 and above, the device has"):
            select_backend(backend, device, torch.float16, min(head_dim, 128))
    with pytest.raises(ValueError, match=r"efficient: it takes bfloat16 from compute capability"):
        select_backend("auto", device, torch.bfloat16, head_dim)


def test_what_half_precision_has_from_ampere_on(monkeypatch):
    device = simulated(monkeypatch, "A100")
    for backend in ("cudnn", "flash", "efficient"):
        for dtype in (torch.float16, torch.bfloat16):
            chosen = select_backend(backend, device, dtype, 64).backend
            assert chosen is not None
            assert chosen.name == backend


@pytest.mark.parametrize("name", DEVICES)
def test_what_computes_small_tiles(name, monkeypatch):
    """A device that Triton's kernels are not for has torch's, and no error."""
    device = simulated(monkeypatch, name)
    found = profile_of(device)
    monkeypatch.setattr(select, "AUTO", (backend_named("efficient"),))
    monkeypatch.setattr(select, "has_triton", lambda: True)
    chosen = select_backend("auto", device, torch.float16, 64)
    assert chosen.backend is backend_named("efficient")
    if found.capability < (8, 0):
        assert chosen.limits == (Limits(),)
        with pytest.raises(ValueError, match=r"compute capability 8\.0 and above, the device has"):
            select_backend("triton", device, torch.float16, 64)
    else:
        on_h200 = limits_on(ON_H200, 2, 64, keeps_calls=False)
        for limits, there in zip(chosen.limits, on_h200, strict=True):
            assert limits == tuple(map(found.flops, there))
            assert chosen.limits_of(limits.least) is limits


def test_limits_of_calls():
    """Shorter calls share more; narrow heads share more in forward."""
    for keeps in (False, True):
        narrow, wide = (limits_on(ON_H200, 2, size, keeps_calls=keeps) for size in (64, 65))
        for limits, of_wide in zip(narrow, wide, strict=True):
            assert limits._replace(forward=of_wide.forward) == of_wide
            assert of_wide.forward <= limits.forward <= limits.own
        for shorter, longer in pairwise(narrow):
            assert shorter.least < longer.least
            assert all(a >= b for a, b in zip(shorter[:3], longer[:3], strict=True))
        selection = Selection(None, narrow)
        assert selection.limits_of(0.0) is narrow[0]
        assert selection.limits_of(narrow[1].least - 1) is narrow[0]
        assert selection.limits_of(narrow[1].least) is narrow[1]
        assert selection.limits_of(1e20) is narrow[-1]


def test_the_interpreter_takes_no_bfloat16(monkeypatch):
    """Triton's keeps it as integers, and multiplies those."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(select, "has_triton", lambda: True)
    cpu = torch.device("cpu")
    assert select_backend("triton", cpu, torch.float16, 64).backend is None
    with pytest.raises(ValueError, match="it takes float32, float16, the inputs are bfloat16"):
        select_backend("triton", cpu, torch.bfloat16, 64)
