"""Standard output and standard error that are closed, full or read by nobody."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import IO

_ERROR = 2  # file descriptor


class BestEffort(io.TextIOWrapper):
    """Standard error that drops what cannot be written: progress, or why a command fails.

    Neither is a reason to stop; the exit code says how the command ended.
    """

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        try:
            return super().write(text)
        except OSError:
            to_nowhere(self)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        try:
            super().flush()
        except OSError:
            to_nowhere(self)


def mend_standard_streams() -> None:
    """Let a command run to its end whatever its standard streams are.

    Characters that standard output has no code for are printed as question marks. Standard error
    is never a reason to fail, closed or full.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")
    if sys.stderr is None:  # Python's own, where the file descriptor is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != _ERROR:
            os.dup2(nowhere, _ERROR)
        os.set_inheritable(_ERROR, True)  # for libraries of C++ and ranks
        sys.stderr = os.fdopen(_ERROR, "w", 1, errors="backslashreplace", closefd=False)
    elif type(sys.stderr) is io.TextIOWrapper and sys.stderr is sys.__stderr__:
        sys.stderr = BestEffort(
            sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True
        )


def to_nowhere(stream: IO[str]) -> None:
    """Drop what is still to be written to a stream, now and as Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def is_unread() -> bool:
    """Whether nobody reads standard output any more; what is left of it is then dropped."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups are reported in any case
    if not poll.poll(0):
        return False
    to_nowhere(sys.stdout)
    return True


def flush() -> None:
    """Write what is buffered, where there is a standard output."""
    if sys.stdout is not None:
        sys.stdout.flush()
