"""What the user sees of a run: a progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


class Report:
    """Shows progress on rank 0 and nothing elsewhere; a context manager.

    Args:
        steps: number of steps of the whole run.
        start: number of steps done.
        every: steps between lines where there is no terminal.
        show: whether this is the rank that shows anything.
    """

    def __init__(self, *, steps: int, start: int, every: int, show: bool) -> None:
        self._console = Console(quiet=not show, highlight=False)
        self._every = every
        self._steps = steps
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (show and self._console.is_terminal),
        )
        self._task = self._progress.add_task("", total=steps, completed=start)

    def step(self, step: int, found: Mapping[str, float]) -> None:
        """Show a finished step.

        Args:
            step: number of steps done.
            found: its `bits_per_byte` in training, `tokens_per_second` over all ranks, and
                `peak_memory_bytes` of the rank with the most.
        """
        text = (
            f"{found['bits_per_byte']:.3f} bits/byte, {found['tokens_per_second']:,.0f} tokens/s, "
            f"{found['peak_memory_bytes'] / 2**20:,.0f} MiB per rank"
        )
        if not self._progress.disable:
            self._progress.update(self._task, completed=step, description=text)
        elif step % self._every == 0 or step == self._steps:
            self.line(f"step {step}/{self._steps}: {text}")

    def line(self, text: str) -> None:
        """Show a line of text, above the bar if there is one."""
        self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
