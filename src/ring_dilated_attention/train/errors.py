"""Errors of a run as one line; and which rank is missing.

Ranks write what they begin into the store that they met in (`Watch`).
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..exchange import Presence, make_presence

MAX_MESSAGE = 280  # characters: with "error: " and a rank, a message stays below 300


class TrainingError(RuntimeError):
    """A run failed; the message is what the user needs to know.

    Args:
        message: one line.
        bad_input: whether input that the user gave was at fault.
    """

    def __init__(self, message: str, *, bad_input: bool = False) -> None:
        super().__init__(message)
        self.bad_input = bad_input


def one_line(error: object) -> str:
    """A message as one line of at most `MAX_MESSAGE` characters; the middle is left out first."""
    text = os_error_text(error) if isinstance(error, OSError) else str(error)
    text = " ".join(text.split())
    if len(text) > MAX_MESSAGE:
        half = (MAX_MESSAGE - 5) // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return text


def os_error_text(error: OSError) -> str:
    """An `OSError` without its number: what went wrong, and with which file."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


_PACKAGE = __name__.partition(".")[0]
_PREFIX = "ring_dilated_attention/train"
_GRACE = 1.5  # seconds that ranks which have given up wait for each other's word
_POLL = 0.02
START = 300.0  # seconds that ranks may start apart: they read Python's files, perhaps from afar
# What errors of torch's transports say; their class is RuntimeError, as that of much else is.
_TRANSPORT = re.compile(r"gloo|NCCL|closed by peer|reset by peer|[Tt]imed out|timeout|Broken pipe")


class LostRankError(TrainingError):
    """Another rank of the run is gone, does not answer, or has failed."""


class Watch:
    """What this rank tells the others of its progress, and what they have told.

    Writing takes microseconds: nobody waits for an answer.

    Args:
        store: in which the ranks meet.
        rank: this rank.
        size: number of ranks.
        timeout: seconds that the process group waits.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._presence: Presence | None = None
        self._shared = 0
        self._doing = "starting"
        # A clone has a timeout of its own. torch's type hints leave it out.
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]
        # torchrun may start the ranks again on the same store.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"{_PREFIX}/{attempt}", clone)
        self._store.set_timeout(timedelta(seconds=_GRACE))

    def meet(self) -> None:
        """Wait until all ranks have started, for at least `START` seconds.

        Ranks may start many seconds apart, which says nothing of how long they may wait later. From
        then on each can tell whether the process of another has ended.

        Raises:
            LostRankError: some have not; the message names them.
        """
        limit = max(START, self._timeout)
        self._store.set(f"met/{self._rank}", "")
        names = [f"met/{rank}" for rank in range(self._size)]
        try:
            self._store.wait(names, timedelta(seconds=limit))
        except RuntimeError as error:
            late = [str(r) for r, name in enumerate(names) if not self._store.check([name])]
            raise LostRankError(
                f"rank{'s'[: len(late) > 1]} {', '.join(late)} did not start within {limit:g} s of "
                f"rank {self._rank}"
            ) from error
        self._presence = make_presence(self._rank, self._size, self._store, self._share)

    def _share(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        self._shared += 1
        names = [f"shared/{self._shared}/{rank}" for rank in range(self._size)]
        self._store.set(names[self._rank], json.dumps(value))
        self._store.wait(names, timedelta(seconds=START))
        return [json.loads(self._store.get(name)) for name in names]

    def begin(self, what: str) -> None:
        """Say what this rank begins, such as ``step 12: the metrics``."""
        self._doing = what
        # Without the store, as when the launcher is gone, the ranks still end their step and save.
        with suppress(RuntimeError):
            self._store.set(f"doing/{self._rank}", what)

    def explained(self, error: BaseException) -> BaseException:
        """Tell the others why this rank gives up, and find out who is missing where it waited.

        Args:
            error: what ended this rank's run.

        Returns:
            `error`, or where it says that another rank is gone a `LostRankError`, which names the
            rank, what this rank was doing, and where the exchange has not said so the last that
            the missing one began.
        """
        waited = _is_transport(error)
        text = one_line(f"{type(error).__name__}: {error}")
        try:
            self._store.set(f"end/{self._rank}", "waited" if waited else f"failed: {text}")
            if not waited:
                return error
            if _names_a_rank(error):
                return LostRankError(f"{one_line(error)} ({self._doing})")
            return self._explained_wait(error)
        except (
            RuntimeError,
            ValueError,
        ) as other:  # the store went with its rank
            return LostRankError(
                f"rank {self._rank} lost another rank in {self._doing}, and the store of the ranks "
                f"does not answer: {one_line(other)[:80]}"
            )

    def _explained_wait(self, error: BaseException) -> BaseException:
        others = [rank for rank in range(self._size) if rank != self._rank]
        deadline = time.monotonic() + _GRACE
        while True:
            # A rank may say why before it ends, so who has gone is asked first.
            gone = [rank for rank in others if self._has_gone(rank)]
            silent = [rank for rank in others if not self._store.check([f"end/{rank}"])]
            gone = [rank for rank in gone if rank in silent]
            if gone or not silent or time.monotonic() > deadline:
                break
            time.sleep(_POLL)
        for rank in others:
            if rank not in silent:
                end = self._store.get(f"end/{rank}").decode()
                if end.startswith("failed: "):
                    return LostRankError(f"rank {rank} {end}")
        if not silent:
            return LostRankError(
                f"the ranks lost their connections in {self._doing}: {one_line(error)[:120]}"
            )
        silent = gone or silent  # others may still wait for this rank
        began = "nothing"
        if self._store.check([f"doing/{silent[0]}"]):
            began = self._store.get(f"doing/{silent[0]}").decode()
        names = f"rank{'s'[: len(silent) > 1]} {', '.join(map(str, silent))}"
        timed_out = re.search(r"[Tt]imed out|timeout", str(error)) is not None
        kind = f"no answer within {self._timeout:g} s" if timed_out and not gone else "gone"
        return LostRankError(
            f"{names}: {kind}; rank {self._rank} waited in {self._doing}; the last that rank "
            f"{silent[0]} began: {began}"
        )

    def _has_gone(self, rank: int) -> bool:
        return self._presence is not None and self._presence.gone_since(rank) is not None


def _is_transport(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or does not answer."""
    if not isinstance(error, RuntimeError) or isinstance(error, TrainingError):
        return False
    return _names_a_rank(error) or _TRANSPORT.search(str(error)) is not None


def _names_a_rank(error: BaseException) -> bool:
    """Whether this package's exchange raised it: such a message says which rank is missing."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return raised_in.startswith(_PACKAGE) and re.search(r"\branks? \d", str(error)) is not None
