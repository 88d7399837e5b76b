"""The log of a run: ``log.jsonl``, one JSON object a line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self

NAME = "log.jsonl"


class RunLog:
    """Appends to the log of a run; a context manager.

    Every line has a ``kind``: ``config`` (the options, at every start), ``step`` and ``eval``; the
    last two have a ``step``, the number of steps done.

    Args:
        run: folder of the run.
        start: number of steps done; lines of later steps, of a run that went on past its last
            checkpoint, are dropped.

    Raises:
        ValueError: the existing log is damaged.
        OSError: the log cannot be written.
    """

    def __init__(self, run: Path, *, start: int) -> None:
        run.mkdir(parents=True, exist_ok=True)
        path = run / NAME
        kept = [line for line in read(run) if line.get("step", 0) <= start] if start else []
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, path)
        self._file = path.open("a")

    def write(self, kind: str, **values: Any) -> None:
        """Append a line, and hand it to the system at once."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line that a crash cut short is left out.

    Raises:
        ValueError: it is not UTF-8, or another line is not a JSON object.
    """
    path = run / NAME
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    parsed = []
    for number, line in enumerate(lines[:-1], start=1):  # a whole line ends in a newline
        try:
            parsed.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(parsed[-1], dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
    return parsed
