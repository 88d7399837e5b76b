"""The error of a training run that failed, and errors as one line."""

from __future__ import annotations

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
