"""What `rda doctor` finds."""

import os
import subprocess
import sys

import pytest
import torch

from ring_dilated_attention.checks import doctor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without GPU says")


class BrokenFlashAttention:
    """An importer, as of an installation whose library does not load."""

    def find_spec(self, name, *_):
        if name.startswith("flash_attn"):
            raise OSError("libcute.so: no such\n file")


def test_examine_without_a_gpu_has_every_section_and_a_line_for_what_fails(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [BrokenFlashAttention(), *sys.meta_path])
    report = doctor.examine()
    versions, gpus, copies, kernels, calls = report.values()
    assert versions["torch"] == torch.__version__
    assert versions["python"] == sys.version.split()[0]
    assert versions["flash-attn-4"] == "OSError: libcute.so: no such file"
    assert {"ring-dilated-attention", "triton", "driver", "CPUs"} <= versions.keys()
    assert len(gpus) == 1
    report[doctor.COPIES]["cuda:0 and cuda:1"] = "wrong: other numbers"
    assert doctor.failures(report) == ["cuda:0 and cuda:1: wrong: other numbers"]
    del report[doctor.COPIES]["cuda:0 and cuda:1"]
    assert copies == {"not tried": "fewer than two GPUs"}
    sizes = " ".join(map(str, doctor.HEAD_DIMS))
    assert kernels == {f"cpu {dtype}": f"cpu_flash {sizes}" for dtype in doctor.DTYPES}
    assert {"cpu auto float32", "cpu cpu_flash float32", "cpu eager float32"} <= calls.keys()
    assert not any(name.startswith(("cpu fa4", "cpu cudnn")) for name in calls)
    assert all(text.startswith("ok: out ") for text in calls.values())
    assert doctor.failures(report) == []
    for title, section in report.items():
        assert title in doctor.as_text(report)
        assert all("\n" not in text and len(text) <= 200 for text in section.values())


BROKEN = """
import runpy
from dataclasses import replace
from ring_dilated_attention.tiles import backend_named, select

right, working = backend_named("eager"), backend_named("cpu_flash")

def wrong(t, g):
    dq, dk, dv = right.backward(t, g)
    return dq, dk * 1.01, dv

def raises(t):
    raise RuntimeError("no such\\nkernel")

select._NAMED["eager"] = replace(right, backward=wrong)
select._NAMED["cpu_flash"] = broken = replace(working, forward=raises)
select.AUTO = tuple(broken if x is working else x for x in select.AUTO)
runpy.run_module("ring_dilated_attention.checks.doctor", run_name="__main__")
"""


@pytest.mark.slow
def test_doctor_ends_with_exit_code_1_if_a_back_end_is_wrong_or_raises():
    # A process of its own, since calls keep the back end that was chosen for their like.
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"}  # slow
    done = subprocess.run(
        [sys.executable, "-c", BROKEN], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 1, done.stderr
    assert not done.stderr
    lines = {line.partition("float32")[0].strip(): line for line in done.stdout.splitlines()}
    assert "wrong: out " in lines["cpu eager"]
    for name in ("cpu auto", "cpu cpu_flash"):
        assert lines[name].endswith("RuntimeError: no such kernel")
