"""What a run says before its first step: what is read, skipped, held out and trained."""

from __future__ import annotations

from ..terminal import count_of
from .config import TrainConfig
from .data import SHOWN_SKIPPED, ByteCorpus, Corpus
from .ranks import World
from .tokens import TokenCorpus


def what_is_read(text: ByteCorpus, config: TrainConfig) -> list[str]:
    """Lines on the files of a text: how many, what was skipped and why, what is held out."""
    train, heldout = len(text.train), len(text.heldout)
    size = train + heldout
    lines = [f"read {count_of(text.num_files, 'file')} ({size:,} bytes): {text.description}"]
    by_reason: dict[str, list[str]] = {}
    for name, reason in text.skipped:
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        shown = ", ".join(names[:SHOWN_SKIPPED])
        more = len(names) - SHOWN_SKIPPED
        lines.append(
            f"skipped {count_of(len(names), reason)}: {shown}{f' and {more:,} more' * (more > 0)}"
        )
    every = "every step" if config.eval_every == 1 else f"every {config.eval_every:,} steps"
    return [
        *lines,
        f"training on {train:,} bytes; {heldout:,} bytes ({heldout / size:.1%}) are held out, and "
        f"evaluated {every}",
    ]


def what_is_trained(num_parameters: int, corpus: Corpus, config: TrainConfig, world: World) -> str:
    """A line on the model, the ranks and the sequences."""
    groups = "" if world.data_size == 1 else f" in {world.data_size} sequence groups"
    tokens = ""
    if isinstance(corpus, TokenCorpus):
        tokens = f" from {len(corpus.train):,} tokens of a vocabulary of {len(corpus.lengths):,}"
    return (
        f"{num_parameters:,} parameters; {count_of(world.size, 'rank')}{groups} on "
        f"{world.device.type}; sequences of {config.seq_len:,} {corpus.unit}{tokens}, "
        f"{config.batch_size:,} per step"
    )
