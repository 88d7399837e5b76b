"""Stopping a run from outside: signals, the launcher's stop file, or the launcher's death."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

# SIGHUP, a closed terminal, does not exist on Windows.
SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class OnFirstSignal:
    """While entered, the first of `SIGNALS` calls `function`; a second one acts as ever.

    SIGTERM and SIGHUP stay ignored where they are, as under nohup.
    Handlers can only be set in the main thread; entered in another one, this does nothing.

    Args:
        function: called from the signal handler.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._handle)
                for number in SIGNALS
                if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self._function()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


class StopRequest:
    """Whether this rank has been asked to stop.

    Args:
        stop_file: a file whose appearance asks for it; None if there is no launcher.
        parent: process id of the launcher, whose death asks for it; None if there is none.
    """

    def __init__(self, *, stop_file: Path | None = None, parent: int | None = None) -> None:
        self._stop_file = stop_file
        self._parent = parent
        self._asked = False

    def ask(self) -> None:
        """Ask this rank to stop."""
        self._asked = True

    @property
    def asked(self) -> bool:
        """Whether a stop has been asked for."""
        return (
            self._asked
            or (self._stop_file is not None and self._stop_file.exists())
            or (self._parent is not None and os.getppid() != self._parent)
        )
