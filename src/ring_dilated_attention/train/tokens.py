"""A corpus as the tokens of a subword tokenizer: encoded once a run, then mapped from its files.

They lie in the folder of the run, ``tokens/``:

- ``train.bin`` and ``heldout.bin``: the tokens, int32 little-endian.
- ``lengths.bin``: how many bytes of text each token of the vocabulary spells, int32 little-endian.
- ``index.json``: which text and which tokenizer they are of, and a checksum of each file.

All ranks map the same files, so they agree, and the tokens take no memory of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from .data import ByteCorpus, Corpus
from .tokenizer import SubwordTokenizer, cut

FOLDER = "tokens"
PIECE_BYTES = 1 << 16  # of text that is encoded as one; many of them keep all cores busy
SECTION_PIECES = 64  # encoded between two signs of life: about a second on two cores
_INDEX = "index.json"
_FILES = ("train", "heldout", "lengths")
_DTYPE = np.dtype("<i4")


@dataclass(frozen=True, kw_only=True)
class TokenCorpus(Corpus):
    """The tokens of a text, int32, mapped from files.

    Attributes:
        lengths: how many bytes of text each token spells, int32, shape (vocabulary,).
        digest: a checksum of all tokens and lengths, which ranks compare.
        num_bytes: bytes of training text that `train` spells.
    """

    unit: ClassVar[str] = "tokens"

    lengths: Tensor
    digest: str
    num_bytes: int

    @classmethod
    def open(cls, run: Path, text: ByteCorpus, tokenizer_digest: str | None = None) -> TokenCorpus:
        """Map the tokens that `write_tokens` has left in a run, after a look at every byte.

        Args:
            run: folder of the run.
            text: the text that they must be of.
            tokenizer_digest: of the tokenizer that they must be of; None takes any.

        Raises:
            ValueError: there are none, they are of something else, or a file is damaged.
        """
        folder = run / FOLDER
        try:
            written = (folder / _INDEX).read_bytes()
            index = json.loads(written)
            arrays = [_mapped(folder / f"{name}.bin", index["files"][name]) for name in _FILES]
            same = index["text"] == text.fingerprint and tokenizer_digest in (
                None,
                index["tokenizer"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the tokens in {folder} are not whole: {error}") from error
        if not same:
            raise ValueError(f"the tokens in {folder} are of another text or tokenizer")
        train, heldout, lengths = map(torch.from_numpy, arrays)
        return cls(
            train=train,
            heldout=heldout,
            lengths=lengths,
            num_bytes=len(text.train),
            digest=hashlib.blake2b(written, digest_size=16).hexdigest(),
            fingerprint=text.fingerprint,
            description=text.description,
        )

    def count_bytes(self, windows: Sequence[Tensor]) -> int:
        """Bytes of text that the labels of these windows spell: of all but each first token."""
        lengths = self.lengths.numpy()
        return sum(int(lengths[w[1:].numpy()].sum(dtype=np.int64)) for w in windows)


def write_tokens(run: Path, text: ByteCorpus, tokenizer: SubwordTokenizer) -> Iterator[int]:
    """Encode a text into files in the folder of a run; replaces those that are there.

    Nothing is seen at its place before all is written, so that a crash leaves no half of it.

    Args:
        run: folder of the run.
        text: the text.
        tokenizer: what encodes it.

    Yields:
        How many bytes of training and held-out text are encoded so far, after every section of at
        most ``SECTION_PIECES * PIECE_BYTES``.

    Raises:
        ValueError: the tokenizer changes the text.
        OSError: the files cannot be written.
    """
    partial, folder = run / f".partial_{FOLDER}", run / FOLDER
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        entries, done = {}, 0
        for name, split in (("train", text.train), ("heldout", text.heldout)):
            digest, count = hashlib.blake2b(digest_size=16), 0
            with (partial / f"{name}.bin").open("wb") as file:
                for pieces in _sections(split):
                    for ids in tokenizer.encode(pieces):
                        data = np.array(ids, dtype=_DTYPE).tobytes()
                        digest.update(data)
                        file.write(data)
                        count += len(ids)
                    done += sum(map(len, pieces))
                    yield done
            entries[name] = {"count": count, "blake2b": digest.hexdigest()}
        lengths = np.array([len(part or b"") for part in tokenizer.spelled], dtype=_DTYPE).tobytes()
        (partial / "lengths.bin").write_bytes(lengths)
        entries["lengths"] = {
            "count": tokenizer.vocab_size,
            "blake2b": hashlib.blake2b(lengths, digest_size=16).hexdigest(),
        }
        index = {"text": text.fingerprint, "tokenizer": tokenizer.digest, "files": entries}
        (partial / _INDEX).write_text(json.dumps(index, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def pieces_of(text: Tensor) -> Iterator[bytes]:
    """The pieces of a text, uint8, that are encoded as one each."""
    return cut(memoryview(text.numpy().data), PIECE_BYTES)


def _sections(text: Tensor) -> Iterator[list[bytes]]:
    section: list[bytes] = []
    for piece in pieces_of(text):
        section.append(piece)
        if len(section) == SECTION_PIECES:
            yield section
            section = []
    if section:
        yield section


def _mapped(path: Path, entry: dict[str, Any]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """A file of int32 that has the length and the checksum of its entry in the index."""
    if path.stat().st_size != entry["count"] * _DTYPE.itemsize:
        raise ValueError(f"{path.name} has another length than was written")
    with path.open("rb") as file:
        digest = hashlib.blake2b(digest_size=16)
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != entry["blake2b"]:
        raise ValueError(f"{path.name} does not have its checksum")
    # Copy-on-write, because torch wants memory that it may write to; nothing does.
    return np.memmap(path, dtype=_DTYPE, mode="c") if entry["count"] else np.zeros(0, dtype=_DTYPE)
