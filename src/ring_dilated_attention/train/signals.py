"""Stopping a run from outside: signals, or the launcher's pipe, which its death closes too."""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Callable
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
        pipe: descriptor of the read end of a pipe that asks for it when its other end is closed,
            by the launcher or by the launcher's death; None if there is no launcher.
    """

    def __init__(self, pipe: int | None = None) -> None:
        self._pipe = pipe
        self._asked = False

    def ask(self) -> None:
        """Ask this rank to stop."""
        self._asked = True

    @property
    def asked(self) -> bool:
        """Whether a stop has been asked for."""
        if self._pipe is not None and select.select([self._pipe], [], [], 0)[0]:
            self._asked = True
        return self._asked
