"""Raises an error in the thread that calls, while it does something else."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

_AGAIN_S = 0.005
"""After an error came in a finalizer, which drops it, the thread may take so long to leave that."""


class Caller:
    """The thread that calls a group, and what it is told by others.

    Args:
        thread: the first one that calls.

    Attributes:
        thread: the last one that has called, threads of autograd's left aside.
        telling: held by whoever tells it something, or has something to say in its place.
        may_have_left: a thread that was told something, and with that may have left a call without
            ending it; None: no thread.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.telling = threading.RLock()
        self.may_have_left: threading.Thread | None = None
        self._has_said = False

    def tell(self, kind: type[Exception], text: str, heard: Callable[[], None]) -> None:
        """Raise an error as soon as the thread runs Python again, unless it has said all.

        Args:
            kind: of the error.
            text: of the error.
            heard: called as the error is raised.
        """
        caller, thread = self, self.thread

        class ToldError(kind):  # type: ignore[valid-type, misc]
            def __init__(self, *args: Any) -> None:
                super().__init__(*(args or (text,)))
                caller.may_have_left = thread
                heard()

        ToldError.__name__ = ToldError.__qualname__ = kind.__name__
        ToldError.__module__ = kind.__module__
        _tell_again_what_finalizers_drop()
        _told[ToldError] = self, thread
        self.tell_again(ToldError, thread)

    def tell_again(self, error: type[Exception], thread: threading.Thread) -> None:
        """Raise the error of a `tell` in its thread, unless that has said all."""
        with self.telling:
            if not self._has_said:
                _raise_in(thread, error)

    def has_said(self) -> None:
        """The thread that calls raises now what has ended the group: it is told nothing more."""
        with self.telling:
            self._has_said = True
            self.forget()

    def forget(self) -> None:
        """The thread is not to be told what it has yet to hear: it finds that by itself."""
        _raise_in(self.thread, None)


_told: WeakKeyDictionary[type[Exception], tuple[Caller, threading.Thread]] = WeakKeyDictionary()
"""Errors of `Caller.tell`, of which caller, and in which thread."""


def _raise_in(thread: threading.Thread, error: type[BaseException] | None) -> None:
    """Raise an error in a thread; None: not the one that it has yet to see."""
    what = None if error is None else ctypes.py_object(error)
    if thread.is_alive() and thread.ident is not None:  # else another one may have its number
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), what)


def _tell_again_what_finalizers_drop() -> None:
    """Python drops errors that are raised in a finalizer or a callback of a weak reference."""
    given = sys.unraisablehook
    if getattr(given, "tells_again", False):
        return

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_type
        if error not in _told:
            given(unraisable)
            return
        caller, thread = _told[error]
        again = threading.Timer(_AGAIN_S, caller.tell_again, (error, thread))
        again.daemon = True
        with suppress(RuntimeError):  # Python is ending
            again.start()

    hook.tells_again = True  # type: ignore[attr-defined]
    sys.unraisablehook = hook
