"""`rda doctor`."""

import json

import pytest
from typer.testing import CliRunner

from ring_dilated_attention.checks import doctor
from ring_dilated_attention.cli import app

RIGHT, WRONG = "ok: out 2e-07", "wrong: out 1e-02"


@pytest.mark.parametrize(("call", "exit_code"), [(RIGHT, 0), (WRONG, 1)])
def test_doctor_prints_the_report_and_ends_with_1_if_a_call_is_wrong(
    monkeypatch, tmp_path, call, exit_code
):
    report = {
        "Versions": {"torch": "2.13.0", "triton": "[red]" + "x" * 190},  # longer than a terminal
        doctor.COPIES: {"not tried": "fewer than two GPUs"},
        doctor.CALLS: {"cpu eager float32": call},
    }
    monkeypatch.setattr(doctor, "examine", lambda: report)
    done = CliRunner().invoke(app, ["doctor", f"--json={tmp_path / 'found.json'}"])
    assert done.exit_code == exit_code, done.output
    assert done.stdout == doctor.as_text(report)
    failures = doctor.failures(report)
    assert json.loads((tmp_path / "found.json").read_text()) == {"failures": failures, **report}
    assert (f"the first is cpu eager float32: {WRONG}" in done.stderr) is bool(failures)
