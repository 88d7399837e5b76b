"""The error of a training run that failed."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """A run failed; the message is what the user needs to know.

    Args:
        message: one line.
        bad_input: whether input that the user gave was at fault.
    """

    def __init__(self, message: str, *, bad_input: bool = False) -> None:
        super().__init__(message)
        self.bad_input = bad_input
