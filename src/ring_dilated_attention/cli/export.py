"""`rda export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import train_options as own
from .command import Example, command
from .train import one_line_errors


@command(
    Example("The newest checkpoint of a run", "rda export runs/mine --to weights"),
    Example("A checkpoint of your choice", "rda export runs/mine/checkpoints/step_0000200 --to w"),
)
def export(run: Annotated[Path, own.RUN], to: Annotated[Path, own.TO]) -> None:
    """Write the weights of a run as config.json and model.safetensors, for other programs.

    The optimizer's state is left out. A tokenizer comes along as tokenizer.json, and SHA256SUMS has
    the checksums of all files. Nothing in the folder can execute code.
    """
    with one_line_errors():
        from ..train import export_newest

        path = export_newest(run, to, told=lambda line: typer.echo(line, err=True))
        typer.echo(f"wrote the weights of {path} to {to}")
