"""Text as bytes: files or folders in, windows of tokens out, the same for any number of ranks."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layout import SequenceLayout

HELDOUT_FRACTION = 0.05
HEAD_BYTES = 8192  # the start of a file, which tells most binary ones apart
SHOWN_SKIPPED = 3
"""Files skipped for one reason that are named; of more, only the number is given."""
BINARY = "binary file"
# Installed packages are not the standard library, and caches are not text.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


class SourceFile(NamedTuple):
    """A file of a corpus: its path, and the name that decides its place and its split."""

    path: Path
    name: str


class SkippedFile(NamedTuple):
    """A file or a folder that is not read, and why, as a noun: ``"binary file"``.

    Its name is relative to the folder that was given.
    """

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Corpus(ABC):
    """Training and held-out text as tokens, and the windows of it.

    Attributes:
        train: training tokens, an integer dtype, shape (number of tokens,).
        heldout: held-out tokens, the same dtype, shape (number of tokens,).
        fingerprint: a short text that corpora with equal text and an equal split share, whatever
            their tokens.
        description: what was read, for messages.
    """

    unit: ClassVar[str]
    """What a token is called: ``"bytes"`` or ``"tokens"``."""

    train: Tensor
    heldout: Tensor
    fingerprint: str
    description: str

    @abstractmethod
    def count_bytes(self, windows: Sequence[Tensor]) -> int:
        """Bytes of text that the labels of these windows spell: of all but each first token."""

    def check_window(self, seq_len: int) -> None:
        """Raise a `ValueError` unless both splits hold a window of this many inputs and labels."""
        for name, text in (("training", self.train), ("held-out", self.heldout)):
            if len(text) <= seq_len:
                raise ValueError(
                    f"a sequence of {seq_len} {self.unit} and its labels need "
                    f"{seq_len + 1} {self.unit} of {name} text; {self.description} has "
                    f"{len(text)}"
                )

    def train_windows(
        self, seq_len: int, *, seed: int, step: int, rows: Sequence[int]
    ) -> list[Tensor]:
        """Training windows: a pure function of (seed, step, row), on any number of ranks.

        Args:
            seq_len: number of inputs in a window, which is one token longer.
            seed: of the run.
            step: number of the step.
            rows: which rows of the step's batch.

        Returns:
            For every row a view of `train`: shape (seq_len + 1,).
        """
        count = len(self.train) - seq_len
        starts = [_draw(f"{seed}/{step}/{row}", count) for row in rows]
        return [self.train[s : s + seq_len + 1] for s in starts]

    def heldout_starts(self, seq_len: int, count: int) -> list[int]:
        """Where up to `count` disjoint held-out windows start, evenly spaced; always the same."""
        available = (len(self.heldout) - 1) // seq_len
        count = min(count, available)
        return [i * available // count * seq_len for i in range(count)]

    def heldout_windows(self, seq_len: int, starts: Sequence[int]) -> list[Tensor]:
        """Held-out windows that start there: views of `heldout`, shape (seq_len + 1,)."""
        return [self.heldout[s : s + seq_len + 1] for s in starts]


@dataclass(frozen=True, kw_only=True)
class ByteCorpus(Corpus):
    """The bytes of a set of files, split by whole files into training and held-out text.

    Its tokens are bytes, uint8.

    Attributes:
        num_files: number of files read.
        skipped: what is not read of the folders given.
    """

    unit: ClassVar[str] = "bytes"

    num_files: int
    skipped: tuple[SkippedFile, ...] = ()

    def count_bytes(self, windows: Sequence[Tensor]) -> int:
        """Bytes of text that the labels of these windows spell: one each."""
        return sum(len(window) - 1 for window in windows)

    @classmethod
    def load(
        cls,
        paths: Sequence[str | Path] = (),
        *,
        heldout_fraction: float = HELDOUT_FRACTION,
        check_size: Callable[[int, str], None] | None = None,
    ) -> ByteCorpus:
        """Read files and folders into memory, in an order that depends only on their names.

        A file is taken as it is. A folder gives every regular file below it (behind links to
        files, too, but not behind links to folders), sorted by path,
        except hidden ones, those in `SKIPPED_FOLDERS`, and binary ones (with a zero byte). A file
        reached twice counts once.

        Files are held out in the order of a hash of their path (relative to the folder given) until
        they hold `heldout_fraction` of all bytes; one that would overshoot twice that is passed
        over. Where that leaves nothing, as with a single file, every file's end is held out.

        Args:
            paths: files and folders; none means the Python sources of the running interpreter's
                standard library.
            heldout_fraction: of all bytes, above 0.
            check_size: called with the size of all files in bytes and a description of them, before
                any is read; to refuse what does not fit into memory. None takes all sizes.

        Raises:
            ValueError: a path does not exist, cannot be read or is a pipe or a device, or there are
                no bytes to train on; the message names the path.
        """
        skipped: list[SkippedFile] = []
        if paths:
            files = [file for path in paths for file in _files(Path(path), skipped)]
            description = ", ".join(map(str, paths))
        else:
            files = list(stdlib_sources())
            description = f"the standard library's sources in {sysconfig.get_path('stdlib')}"
        sizes = [(_size(path), os.path.realpath(path)) for path, _ in files]
        if check_size is not None:
            check_size(sum(size for size, _ in set(sizes)), description)
        # Bytes of a file named on the command line are text whatever they are.
        named = {os.path.realpath(path) for path in paths}
        texts: dict[str, tuple[str, bytes]] = {}
        for path, name in files:
            resolved = os.path.realpath(path)
            if resolved not in texts:
                text = _read(path) if resolved in named else _read_text(path)
                texts[resolved] = (name, text)
                if not text:
                    skipped.append(SkippedFile(name, BINARY if _size(path) else "empty file"))
        parts = [(name, text) for name, text in texts.values() if text]
        if not parts:
            raise ValueError(f"there is no text to train on in {description}{_why(skipped)}")
        train, heldout = _split(parts, heldout_fraction)
        digest = hashlib.blake2b(digest_size=16)
        for text in (train, heldout):
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
        return cls(
            train=_tensor(train),
            heldout=_tensor(heldout),
            num_files=len(parts),
            fingerprint=digest.hexdigest(),
            description=description,
            skipped=tuple(skipped),
        )


def shard_windows(
    windows: Sequence[Tensor], layout: SequenceLayout, rank: int
) -> tuple[Tensor, Tensor]:
    """A rank's inputs and labels; labels are shifted on the whole window, before sharding.

    Args:
        windows: at least one, each of shape (layout.length + 1,) and any integer dtype. Only the
            rank's positions are copied.
        layout: which positions each rank holds.
        rank: whose shard.

    Returns:
        (inputs, labels), both int64, shape (len(windows), layout.local_length(rank)): the label of
        an input is the token after it in the window, whichever rank holds that one as an input.
    """
    inputs = [layout.shard(window[:-1], rank, dim=0) for window in windows]
    labels = [layout.shard(window[1:], rank, dim=0) for window in windows]
    return torch.stack(inputs).to(torch.int64), torch.stack(labels).to(torch.int64)


def stdlib_sources() -> Iterator[SourceFile]:
    """The ``.py`` files of the running interpreter's standard library, without site-packages."""
    for file in _files(Path(sysconfig.get_path("stdlib"))):
        if file.path.suffix == ".py":
            yield file


def _files(path: Path, skipped: list[SkippedFile] | None = None) -> Iterator[SourceFile]:
    """`path` itself, or the files below it sorted by path, each named relative to it.

    What is left out is added to `skipped`.
    """
    left_out = [] if skipped is None else skipped
    try:
        if not path.is_dir():
            yield SourceFile(path, path.name)
            return
        found = []
        for folder, folders, names in os.walk(path, onerror=_raise):
            for name in sorted(folders):
                if name in SKIPPED_FOLDERS or name[0] == ".":
                    reason = "hidden folder" if name[0] == "." else "cache or package folder"
                elif Path(folder, name).is_symlink():
                    reason = "link to a folder"
                else:
                    continue
                left_out.append(SkippedFile(_below(path, Path(folder, name)), reason))
            folders[:] = [n for n in folders if n not in SKIPPED_FOLDERS and n[0] != "."]
            for name in sorted(names):
                file = Path(folder, name)
                # Broken links pass, so that reading them gives an error; sockets and such do not.
                if name[0] == ".":
                    left_out.append(SkippedFile(_below(path, file), "hidden file"))
                elif file.is_file() or not file.exists():
                    found.append(SourceFile(file, _below(path, file)))
                else:
                    left_out.append(SkippedFile(_below(path, file), "special file"))
    except OSError as error:
        raise ValueError(f"cannot read {error.filename or path}: {error.strerror}") from error
    yield from sorted(found, key=lambda file: file.name)


def _below(folder: Path, path: Path) -> str:
    """The name of a path of a folder, relative to it."""
    return path.relative_to(folder).as_posix()


def _raise(error: OSError) -> None:
    raise error


def _size(path: Path) -> int:
    """Bytes of a regular file; others, such as pipes, may have no end."""
    try:
        status = path.stat()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a null byte
        raise ValueError(f"cannot read {str(path)!r}: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"cannot read {path}: it is neither a regular file nor a folder")
    return status.st_size


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error


def _read_text(path: Path) -> bytes:
    """The bytes of a file; none if it is binary, most of which is seen without reading it all."""
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(HEAD_BYTES):
                return b""
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    text = _read(path)
    return b"" if b"\0" in text else text


def _why(skipped: Sequence[SkippedFile]) -> str:
    """What was left out where nothing is left, for an error."""
    if not skipped:
        return ": it has no files"
    few = ", ".join(f"{file.name[:60]} ({file.reason})" for file in skipped[:SHOWN_SKIPPED])
    more = len(skipped) - SHOWN_SKIPPED
    binary = any(file.reason == BINARY for file in skipped)
    hint = "; a file with null bytes, as UTF-16 has, is binary: convert it to UTF-8" * binary
    return f": skipped {few}{f' and {more:,} more' * (more > 0)}{hint}"


def _split(parts: Sequence[tuple[str, bytes]], heldout_fraction: float) -> tuple[bytes, bytes]:
    """Cut named texts into (training, held-out) bytes, by whole files where there are enough."""
    wanted = heldout_fraction * sum(len(text) for _, text in parts)
    chosen: set[int] = set()
    taken = 0
    for index in sorted(range(len(parts)), key=lambda i: (_hash(parts[i][0]), i)):
        if taken >= wanted:
            break
        size = len(parts[index][1])
        if taken + size <= 2 * wanted:
            chosen.add(index)
            taken += size
    if chosen:
        return (
            b"".join(text for i, (_, text) in enumerate(parts) if i not in chosen),
            b"".join(text for i, (_, text) in enumerate(parts) if i in chosen),
        )
    ends = [len(text) - round(heldout_fraction * len(text)) for _, text in parts]
    return (
        b"".join(text[:end] for (_, text), end in zip(parts, ends, strict=True)),
        b"".join(text[end:] for (_, text), end in zip(parts, ends, strict=True)),
    )


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).digest()


def _draw(key: str, count: int) -> int:
    """A number in range(count) that only `key` decides."""
    return int.from_bytes(_hash(key), "little") % count


def _tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(text), dtype=np.uint8))
