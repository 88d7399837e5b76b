"""`rda doctor`."""

from __future__ import annotations

from .common import Json, RunError, app, make_console, write_json


@app.command()
def doctor(json: Json = None) -> None:
    """Print what a bug report needs: versions, GPUs and links, kernels, small checked calls.

    What fails is a line of the report. Exit code 1 if a checked call or copy is wrong.
    """
    from ..checks import doctor as checks

    report = checks.examine()
    failures = checks.failures(report)
    make_console(json).print(checks.as_text(report), end="")
    write_json(json, {"failures": failures, **report})
    if failures:
        raise RunError(f"checks that failed: {len(failures)}; the first is {failures[0]}")
