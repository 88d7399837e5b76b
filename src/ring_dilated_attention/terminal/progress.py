"""How far something is: a bar in a terminal, a line now and then in a pipe; on standard error."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from .console import make_console
from .numbers import Units, common_scale, in_seconds

FIRST_LINE_S, NEXT_LINE_S = 3.0, 10.0
"""Where there is no bar: seconds until the first line, and between lines. What takes less is not
worth a line, and a log of an hour has 360."""

SPEED_S = 30.0
"""The speed is that of this many last seconds, once two steps are done without the first one,
which is slow in most things: it starts processes, or compiles."""

LEAST_BAR, MOST_BAR = 10, 40
"""Characters of the bar; where there is no room for LEAST_BAR, there is none."""

ECHO = 3
"""Characters at the end of a line that stay free: a terminal may wrap a line that fills it, and the
``^C`` that it writes there must not start another line, or the bar would stay."""

REFRESHES_PER_S = 4


class Progress:
    """Shows how much of something is done, how fast it goes and when it ends; a context manager.

    Where standard output and standard error are both a terminal, it is a bar below everything else,
    which goes away at the end. Otherwise (a pipe, a file, a log) it is a line on standard error
    after `FIRST_LINE_S` seconds and then every `NEXT_LINE_S`, once something is done, and no line
    for what takes less: standard output never has any of it.

    Args:
        what: is done, as a short title: ``"verify"``.
        total: how much there is to do.
        unit: of `total`, in the plural; or units of one quantity, the best of which is taken.
        start: how much is done already.
        bar_only: whether to show nothing where there is no terminal; for what has a log of its own.
        show: whether to show anything: False on all ranks but one.
        speed_s: the speed is that of this many last seconds; more where steps are slow and differ.
    """

    def __init__(
        self,
        what: str,
        *,
        total: float,
        unit: str | Units,
        start: float = 0,
        bar_only: bool = False,
        show: bool = True,
        speed_s: float = SPEED_S,
    ) -> None:
        self.console = make_console(stderr=True)
        self.is_bar = show and self.console.is_terminal and _is_terminal(sys.stdout)
        self.above = ""
        """A line of text to show above the bar."""
        self._has_lines = show and not self.is_bar and not bar_only
        self._what, self._total, self._unit = what, total, unit
        self._done, self._note = start, ""
        self._start, self._speed_s = start, speed_s
        self._next_line = time.monotonic() + FIRST_LINE_S
        self._seen = deque([(time.monotonic(), start)])
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Show the bar, if there is one."""
        if self.is_bar:  # a new one each time: an old one would erase what was printed since
            self._live = Live(
                Bar(self),
                console=self.console,
                transient=True,
                refresh_per_second=REFRESHES_PER_S,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def stop(self) -> None:
        """Take the bar away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, done: float, note: str = "") -> None:
        """Show how much is done by now.

        Args:
            done: how much, in the unit of the total.
            note: what else there is to say, such as what is being done now.
        """
        now = time.monotonic()
        self._done, self._note = done, note
        self._seen.append((now, done))
        while len(self._seen) > 2:
            began, first = self._seen[0]
            moved = self._seen[1][1] == self._start or self._seen[-2][1] > self._start
            if now - began <= self._speed_s and not (first == self._start and moved):
                break
            self._seen.popleft()
        if self._has_lines and now >= self._next_line and done > self._start:
            self._next_line = now + NEXT_LINE_S
            text = ", ".join(part for part in self.texts() if part)
            self.console.print(text, soft_wrap=True, markup=False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while something else is printed."""
        was_live = self._live is not None
        self.stop()
        try:
            yield
        finally:
            if was_live:
                self.start()

    @property
    def share(self) -> float:
        """How much is done, of 1."""
        return min(self._done / self._total, 1.0) if self._total else 1.0

    def texts(self) -> tuple[str, str, str]:
        """What is shown before the bar, after it, and as a note."""
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        speed = (last - first) / (ended - began) if ended > began else 0.0
        tail = [f"{self.share:.0%}"]
        if isinstance(self._unit, str):
            head = f"{self._what} {int(self._done):,}/{self._total:,.0f} {self._unit}"
            rate = _rate(speed, self._unit) if speed > 0 else ""
        else:
            scale = common_scale([self._total], self._unit)
            done, total = scale.write(self._done), scale.write(self._total)
            head = f"{self._what} {done}/{total} {scale.unit.name}"
            one = common_scale([speed], self._unit)
            rate = f"{one.write(speed)} {one.unit.name}/s"
        if speed > 0:
            left = (self._total - self._done) / speed
            tail += [rate, *([f"{in_seconds(round(left))} left"] if left > 0 else [])]
        return head, ", ".join(tail), self._note


def _rate(speed: float, unit: str) -> str:
    if speed >= 1:
        return f"{speed:,.1f} {unit}/s" if speed < 100 else f"{speed:,.0f} {unit}/s"
    return f"{in_seconds(1 / speed)} each"


class Bar:
    """Head, bar and tail on a line, and the note beside them, or below where there is no room."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._progress.above:
            yield Text(self._progress.above)
        head, tail, note = self._progress.texts()
        note = note and f"  {note}"
        width = options.max_width - ECHO
        used = len(head) + len(tail) + 4
        beside = note if used + len(note) + LEAST_BAR <= width else ""
        room = min(width - used - len(beside), MOST_BAR)
        line = Text(head)
        if room >= LEAST_BAR:
            bar = ProgressBar(total=1.0, completed=self._progress.share, width=room)
            line.append("  ")
            for segment in console.render(bar, options.update(width=room)):
                line.append(segment.text, style=segment.style)
            line.append("  ")
        else:
            line.append(", ")
        line.append(tail)
        line.append(beside, style="dim")
        yield line
        if note and not beside:
            yield Text(note, style="dim")


def streamed(
    texts: Iterable[tuple[int, str]], *, shown: str, total: int, unit: str, what: str
) -> None:
    """Print a text on standard output as it comes, and how far it is.

    In a terminal the line that is being written stands above the bar, and is printed when it ends.
    Where both streams are one file or pipe, nothing but the text is written. Else standard error
    says at the end how fast it came, from the first piece to the last.

    Args:
        texts: pieces of the text, each with how much of `total` is done with it.
        shown: what the text begins with.
        total: how much there is to come.
        unit: of `total`, in the plural.
        what: is done, as a short title.

    Raises:
        OSError: standard output is closed, or cannot be written.
    """
    if sys.stdout is None:  # Python's own, where the file descriptor is closed
        raise OSError("standard output is closed, and the text would be lost")
    if _in_one_file(sys.stdout, sys.stderr):  # the text itself says how far it is
        for _, text in itertools.chain([(0, shown)], texts):
            _write(text)
        _write("\n")
        return
    line = ""
    pace = _Pace(unit)
    try:
        with Progress(what, total=total, unit=unit) as progress:
            for done, text in itertools.chain([(0, shown)], texts):
                if progress.is_bar:
                    *whole, line = _screen_lines(line + text, progress.console.width)
                    if whole:
                        with progress.paused():
                            _write("".join(whole))
                    progress.above = line
                else:
                    _write(text)
                progress.update(done)
                pace.update(done)
    finally:
        _write(f"{line}\n")
    pace.show()


class _Pace:
    """How fast something was, from when the first of it was done to the last."""

    def __init__(self, unit: str) -> None:
        self._unit, self._first, self._done = unit, 0, 0
        self._began = self._ended = 0.0

    def update(self, done: int) -> None:
        """So much is done now; 0 before anything is."""
        if done:
            self._done, self._ended = done, time.perf_counter()
            if not self._first:
                self._first, self._began = done, self._ended

    def show(self) -> None:
        """Say it on standard error, where more than one was done."""
        if self._ended > self._began:
            speed = _rate((self._done - self._first) / (self._ended - self._began), self._unit)
            make_console(stderr=True).print(f"{self._done:,} {self._unit}, {speed}", markup=False)


def _is_terminal(stream: IO[str] | None) -> bool:
    return stream is not None and stream.isatty()


def _in_one_file(out: IO[str], err: IO[str]) -> bool:
    """Whether both go to one file or pipe, as under ``2>&1``, where their lines would mix."""
    try:
        if out.isatty() or err.isatty():
            return False
        return os.path.sameopenfile(out.fileno(), err.fileno())
    except (OSError, ValueError):  # a stream of Python's own has no file
        return False


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _screen_lines(text: str, width: int) -> list[str]:
    """Lines with their ends, those that fill the width too; the last one may be empty."""
    lines = []
    for line in text.splitlines(keepends=True):
        while len(line.rstrip("\r\n")) > width:
            lines.append(line[:width])
            line = line[width:]
        lines.append(line)
    if not lines or lines[-1].endswith(("\n", "\r")):
        lines.append("")
    return lines
