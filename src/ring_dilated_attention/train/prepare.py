"""What a run needs before its first step, and all that can fail early: text, tokenizer, tokens."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..terminal import BYTES, Progress
from . import checkpoint, tokens
from .checked_files import TOKENIZER
from .checkpoint import Checkpoint
from .config import TrainConfig
from .curve import CURVE
from .data import ByteCorpus, Corpus
from .memory import check_memory, check_text
from .ranks import World
from .run_folder import LOG, check_free
from .run_toml import FILE
from .scalars import FOLDER as SCALARS
from .scalars import check_installed
from .tokenizer import BYTES as OF_BYTES
from .tokenizer import NUM_BYTES, SubwordTokenizer
from .tokens import TokenCorpus

_LEFT = (
    LOG,
    f"{LOG.split('.')[0]}.partial",
    FILE,
    CURVE,
    SCALARS,
    checkpoint.FOLDER,
    tokens.FOLDER,
)
"""What a run may leave in its folder before its first checkpoint."""


def with_vocabulary(config: TrainConfig) -> TrainConfig:
    """A copy for a new run whose model has the vocabulary of the tokenizer.

    Raises:
        ValueError: the tokenizer cannot be read.
    """
    if config.of_bytes:
        size = NUM_BYTES
    elif config.train_tokenizer is not None:
        size = config.train_tokenizer
    else:
        assert config.tokenizer is not None
        size = SubwordTokenizer.read(config.tokenizer).vocab_size
    return replace(config, model=replace(config.model, vocab_size=size))


def check_run(
    config: TrainConfig,
    world_size: int,
    local_ranks: int,
    *,
    resume: bool,
    start: Checkpoint | None = None,
    restartable: bool = False,
) -> tuple[ByteCorpus, Checkpoint | None]:
    """Read the data, and find and check the checkpoint on `resume`: all that can fail early.

    Args:
        config: the options.
        world_size: number of ranks.
        local_ranks: number of ranks on this machine.
        resume: whether to go on from the newest checkpoint of ``config.out``.
        start: that checkpoint where it is known already.
        restartable: whether a run may begin in a folder with what another one has left there that
            ended before its first checkpoint.

    Returns:
        The text, and the checkpoint to go on from.

    Raises:
        ValueError: data, tokenizer, checkpoint, memory, ranks and options do not fit together, or
            `resume` is False and the folder holds a run.
    """
    if config.tensorboard:
        check_installed()
    check_memory(config, world_size, local_ranks)
    config.sequence_layout(config.group_size(world_size))
    if not resume:
        check_free(config.out, _LEFT if restartable else ())
    elif start is None:
        start = checkpoint.newest(config.out)
    _check_vocabulary(config, known_tokenizer(config, start))
    if start is not None:
        start.check_model(config.model)
        if start.step >= config.steps:
            raise ValueError(
                f"{start.path} has done {start.step} of {config.steps} steps; raise --steps to "
                "continue"
            )
    corpus = ByteCorpus.load(
        config.data,
        heldout_fraction=config.heldout_fraction,
        check_size=lambda size, description: check_text(size, local_ranks, description),
    )
    corpus.check_window(config.seq_len)  # tokens are bytes, or fewer
    if start is not None and start.fingerprint != corpus.fingerprint:
        raise ValueError(
            f"{start.path} was trained on other data than {corpus.description} holds now"
        )
    return corpus, start


def _check_vocabulary(config: TrainConfig, tokenizer: SubwordTokenizer | None) -> None:
    trained = config.train_tokenizer or NUM_BYTES
    size = trained if tokenizer is None else tokenizer.vocab_size
    if config.model.vocab_size != size:
        raise ValueError(
            f"vocab_size must be {size}, the number of tokens of the tokenizer; got "
            f"{config.model.vocab_size}"
        )


def known_tokenizer(config: TrainConfig, start: Checkpoint | None) -> SubwordTokenizer | None:
    """The tokenizer of a run before its text is read: given, or on resuming the checkpoint's.

    Returns:
        The tokenizer; None if tokens are bytes, or a tokenizer is to be trained.

    Raises:
        ValueError: it cannot be read, or is not that of the checkpoint.
    """
    if start is None:
        given = config.tokenizer
        return None if config.of_bytes or given is None else SubwordTokenizer.read(given)
    kept = start.config
    if config.train_tokenizer is not None:
        _check_trained(start, config.train_tokenizer)
    elif (kept.tokenizer, kept.train_tokenizer) != (config.tokenizer, None):
        _check_given(start, config.tokenizer)
    return start.tokenizer()


def without_tokenizer(start: Checkpoint, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for a run that is resumed, which keeps its own tokenizer.

    Args:
        start: the checkpoint to go on from.
        options: those the user gave.

    Returns:
        The options without those of the tokenizer.

    Raises:
        ValueError: one of these is for another tokenizer. A file that has the name of the run's
            own, but has been changed, is another one; one that is the same may lie anywhere.
    """
    if "train_tokenizer" in options:
        _check_trained(start, options["train_tokenizer"])
    if "tokenizer" in options:
        _check_given(start, options["tokenizer"])
    return {k: v for k, v in options.items() if k not in ("tokenizer", "train_tokenizer")}


def _check_trained(start: Checkpoint, size: int) -> None:
    if start.config.train_tokenizer != size:
        raise ValueError(
            f"{start.path} was trained with another tokenizer, {_named(start)}, which a run that "
            f"is resumed keeps; got --train-tokenizer {size}: leave it out, or begin a new run"
        )


def _check_given(start: Checkpoint, given: str | None) -> None:
    kept = start.tokenizer()
    if given in (None, OF_BYTES):
        same = kept is None
    else:
        assert given is not None
        same = kept is not None and kept.same_as(SubwordTokenizer.read(given))
    if not same:
        raise ValueError(
            f"{start.path} was trained with another tokenizer, {_named(start)}, which a run that "
            f"is resumed keeps; got --tokenizer {given or OF_BYTES}: leave it out, or begin a new "
            "run"
        )


def _named(start: Checkpoint) -> str:
    if start.config.of_bytes:
        return OF_BYTES
    if start.config.tokenizer is not None:
        return f"that of {start.config.tokenizer}"
    return f"one of {start.config.train_tokenizer} tokens that was trained for it"


def as_tokens(
    config: TrainConfig, text: ByteCorpus, start: Checkpoint | None, world: World
) -> tuple[Corpus, bytes | None]:
    """The text in the tokens of the run. Every rank calls this.

    Rank 0 trains the tokenizer if need be, on training text alone, keeps it as ``tokenizer.json``
    in the folder of the run, and encodes the text there, unless the tokens of this text and
    tokenizer are there already. Where that fails, a new run's folder is left without them.

    Args:
        config: the options.
        text: the text, equal on all ranks.
        start: the checkpoint to go on from.
        world: the ranks.

    Returns:
        The text itself if tokens are bytes. Otherwise its tokens, mapped from the files of the run,
        and on rank 0 the tokenizer's JSON.

    Raises:
        ValueError: the tokenizer does not fit the text, or the text has too few tokens.
    """
    if config.of_bytes:
        return text, None
    leader = world.rank == 0
    with _removed_on_failure(config, enabled=leader and start is None):
        world.begin("the tokenizer")
        tokenizer = world.everywhere(lambda: _tokenizer(config, text, start) if leader else None)
        digest = world.gather(tokenizer.digest if tokenizer else None)[0]
        world.begin("encoding the text")
        work = None
        if tokenizer is not None and not _are_there(config, text, tokenizer):
            work = tokens.write_tokens(config.out, text, tokenizer)
        # Ranks meet after every section, so that waiting for the whole is no timeout.
        total = len(text.train) + len(text.heldout)
        with Progress("encode", total=total, unit=BYTES, show=work is not None) as progress:

            def section() -> bool:
                done = 0 if work is None else next(work, 0)
                progress.update(done or total)
                return done > 0

            while any(world.gather(world.everywhere(section))):
                pass
        world.begin("reading the tokens")
        corpus = world.everywhere(lambda: _checked(config, text, digest))
        seen = world.gather(corpus.digest)
        if len(set(seen)) > 1:
            other = next(rank for rank, found in enumerate(seen) if found != seen[0])
            raise ValueError(f"rank {other} reads other tokens than rank 0 in {config.out}")
    return corpus, tokenizer.json if tokenizer else None


def _tokenizer(config: TrainConfig, text: ByteCorpus, start: Checkpoint | None) -> SubwordTokenizer:
    tokenizer = known_tokenizer(config, start)
    if tokenizer is None:
        assert config.train_tokenizer is not None
        with Progress("train a tokenizer", total=len(text.train), unit=BYTES) as progress:
            pieces = _told(tokens.pieces_of(text.train), progress)
            tokenizer = SubwordTokenizer.train(pieces, config.train_tokenizer)
    kept = config.out / TOKENIZER
    if not kept.exists() or kept.read_bytes() != tokenizer.json:
        kept.write_bytes(tokenizer.json)
    return tokenizer


def _told(pieces: Iterable[bytes], progress: Progress) -> Iterator[bytes]:
    """The pieces, while it is shown how many bytes of them have been taken."""
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        progress.update(done)


def _are_there(config: TrainConfig, text: ByteCorpus, tokenizer: SubwordTokenizer) -> bool:
    """Whether the folder of the run has these tokens, whole; what else is there is written anew."""
    try:
        TokenCorpus.open(config.out, text, tokenizer.digest)
    except ValueError:
        return False
    return True


def _checked(config: TrainConfig, text: ByteCorpus, digest: str | None) -> TokenCorpus:
    corpus = TokenCorpus.open(config.out, text, digest)
    corpus.check_window(config.seq_len)
    return corpus


@contextmanager
def _removed_on_failure(config: TrainConfig, *, enabled: bool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if enabled:
            (config.out / TOKENIZER).unlink(missing_ok=True)
            shutil.rmtree(config.out / tokens.FOLDER, ignore_errors=True)
        raise
