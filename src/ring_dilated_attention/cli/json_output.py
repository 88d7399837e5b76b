"""``--json FILE``: what a command found, as one JSON document, beside its tables."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

from ..checks import check_output
from ..terminal import json_text, make_console, show_text

STANDARD_OUTPUT = Path("-")
"""The name of a file that stands for standard output."""

Write: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Writes a document."""

_OUT, _ERROR = 1, 2  # file descriptors


@contextmanager
def json_output(path: Path | None) -> Iterator[Write]:
    """Look, before the work, whether a document can be written; yield what writes it.

    Whatever is printed within the block goes to standard error if the document goes to standard
    output: tables, progress, and what libraries and started processes print.

    Args:
        path: the file; `STANDARD_OUTPUT`; or None: the document is dropped.

    Raises:
        OSError: the file, or standard output, cannot be written.
        ValueError: there is something else that has the file's name.
    """
    if path == STANDARD_OUTPUT:
        with _to_standard_output() as write:
            yield write
        return
    if path is not None:
        check_output(path)

    def write_file(document: Mapping[str, Any]) -> None:
        if path is not None:
            path.write_text(json_text(document))
            show_text(make_console(), f"wrote {path}")

    yield write_file


@contextmanager
def _to_standard_output() -> Iterator[Write]:
    """`json_output` for standard output, which is written when the block ends, errors or not."""
    if sys.stdout is None:  # Python's own, where the file descriptor is closed
        raise OSError("--json -: standard output is closed")
    texts: list[str] = []
    try:
        with _printed_to_standard_error(), redirect_stdout(sys.stderr):
            yield lambda document: texts.append(json_text(document))
    finally:
        try:
            sys.stdout.write("".join(texts))
            sys.stdout.flush()
        except OSError as error:  # a full disk, or a reader that has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), _OUT)  # or Python fails again as it ends
            raise OSError(f"--json -: cannot write standard output: {error.strerror}") from None


@contextmanager
def _printed_to_standard_error() -> Iterator[None]:
    """Let the file descriptor of standard output be that of standard error.

    Libraries of C++ (gloo says who is connected) and processes started meanwhile print there.
    """
    sys.stdout.flush()
    kept = os.dup(_OUT)
    os.dup2(_ERROR, _OUT)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C has buffered must not follow the document
        os.dup2(kept, _OUT)
        os.close(kept)
