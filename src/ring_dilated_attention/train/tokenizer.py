"""Subword tokenizers that spell every text exactly: given as a `tokenizer.json`, or trained."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = "bytes"
"""The tokenizer of a model of bytes: the 256 tokens are the bytes."""

NUM_BYTES = 256
MOST_FILE_BYTES = 256 << 20  # of a tokenizer.json: several times the largest that are published
LEAST_REPEATS = 2  # a pair of tokens that occurs once in the training text is not worth a token
MOST_TOKENS = 1 << 24  # as of any dimension of the model
_SHOWN = 20  # bytes of a text in a message
_RAW = re.compile("([\udc80-\udcff]+)")  # bytes that are not UTF-8, as `surrogateescape` has them


@dataclass(frozen=True, eq=False, repr=False)
class SubwordTokenizer:
    """A byte-level tokenizer: the bytes of its tokens, put together, are the text.

    Loss in bits per byte is exact with such a tokenizer alone: of one that lowers case or drops
    spaces nobody can say how many bytes of the text a token stands for. Text that is not UTF-8 is
    encoded too, its stray bytes one by one.

    Attributes:
        json: the bytes of its `tokenizer.json`.
        spelled: what each token stands for, by number; None where a number has no token.
    """

    json: bytes
    spelled: tuple[bytes | None, ...]
    _tokenizer: Tokenizer
    _byte_ids: dict[int, int]

    @classmethod
    def read(cls, path: str | Path) -> SubwordTokenizer:
        """Read a `tokenizer.json` of Hugging Face `tokenizers`.

        Raises:
            ValueError: there is no such file, it is not a tokenizer or not a byte-level one, or the
                `tokenizers` package is not installed; the message names the file.
        """
        try:
            size = Path(path).stat().st_size
            if size > MOST_FILE_BYTES:
                raise ValueError(f"{path} has {size} bytes: that is not a tokenizer.json")
            data = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, name: str) -> SubwordTokenizer:
        """Make a tokenizer of the bytes of a `tokenizer.json`; `name` is for messages.

        Raises:
            ValueError: see `read`.
        """
        check_installed()
        from tokenizers import Tokenizer

        with _refused(f"{name} is not a tokenizer.json"):
            values = json.loads(data)
            decoder = _types(values.get("decoder"))
            tokenizer = Tokenizer.from_str(data.decode())
            vocabulary = tokenizer.get_vocab(with_added_tokens=True)
            added = tokenizer.get_added_tokens_decoder()
        largest = max(vocabulary.values(), default=-1)
        if largest >= MOST_TOKENS:
            raise ValueError(
                f"{name} has a token of number {largest}; numbers must be below {MOST_TOKENS}"
            )
        if "ByteLevel" not in decoder:
            raise ValueError(
                f"{name} is not a byte-level tokenizer (its decoder is "
                f"{' and '.join(decoder) or 'missing'}), so bits per byte cannot be counted; give "
                "one like those of GPT-2, Llama 3 or Qwen, or train one with --train-tokenizer"
            )
        # A tokenizer.json may ask to cut and to fill up what it encodes.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        spelled: list[bytes | None] = [None] * (largest + 1)
        for token, number in vocabulary.items():
            spelled[number] = (
                added[number].content.encode() if number in added else _bytes_of(token)
            )
        byte_ids = {
            text[0]: number
            for number, text in enumerate(spelled)
            if text is not None and len(text) == 1 and number not in added
        }
        return cls(json=data, spelled=tuple(spelled), _tokenizer=tokenizer, _byte_ids=byte_ids)

    @classmethod
    def train(cls, pieces: Iterable[bytes], vocab_size: int) -> SubwordTokenizer:
        """Train byte-level BPE (GPT-2's pattern of words) on a text; equal texts give equal bytes.

        Args:
            pieces: the text, as `cut` gives it.
            vocab_size: number of tokens, above 256: the bytes, and merges.

        Raises:
            ValueError: the text has too few repeated pairs for `vocab_size` tokens, or the
                `tokenizers` package is not installed.
        """
        check_installed()
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=LEAST_REPEATS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[],
            show_progress=False,
        )
        tokenizer.train_from_iterator(
            (part for piece in pieces for part in _parts(piece) if isinstance(part, str)), trainer
        )
        size = tokenizer.get_vocab_size()
        if size < vocab_size:
            raise ValueError(
                f"the training text has repeated pairs for {size} tokens only; got "
                f"--train-tokenizer {vocab_size}: ask for at most {size}, or give more --data"
            )
        return cls.parse(tokenizer.to_str().encode(), "the trained tokenizer")

    @property
    def vocab_size(self) -> int:
        """Number of tokens: one more than the largest number of a token."""
        return len(self.spelled)

    @property
    def digest(self) -> str:
        """The SHA-256 checksum of `json`, in hexadecimal."""
        return hashlib.sha256(self.json).hexdigest()

    def encode(self, pieces: Sequence[bytes]) -> list[list[int]]:
        """The tokens of each piece of text, by number; pieces are encoded in parallel.

        Raises:
            ValueError: the tokens do not spell the text: the tokenizer changes it, or it lacks a
                byte.
        """
        parts = [list(_parts(piece)) for piece in pieces]
        texts = [part for of_piece in parts for part in of_piece if isinstance(part, str)]
        with _refused("the tokenizer cannot encode the text"):
            encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        result = []
        for piece, of_piece in zip(pieces, parts, strict=True):
            ids: list[int] = []
            for part in of_piece:
                ids += next(encoded).ids if isinstance(part, str) else self._of_bytes(part)
            spelled = b"".join(self.spelled[number] or b"" for number in ids)
            if spelled != piece:
                raise ValueError(_difference(spelled, piece))
            result.append(ids)
        return result

    def _of_bytes(self, raw: bytes) -> list[int]:
        missing = [byte for byte in raw if byte not in self._byte_ids]
        if missing:
            raise ValueError(
                f"the text is not UTF-8, and the tokenizer has no token for its byte "
                f"{missing[0]:#04x}; give UTF-8 text, or a tokenizer with all 256 bytes"
            )
        return [self._byte_ids[byte] for byte in raw]

    def same_as(self, other: SubwordTokenizer) -> bool:
        """Whether two tokenizers are equal, but for the spacing of their JSON."""
        return self.json == other.json or json.loads(self.json) == json.loads(other.json)


def check_installed() -> None:
    """Raise a `ValueError` that says what to install, unless `tokenizers` is there."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError(
            "a tokenizer needs the tokenizers package: "
            "pip install 'ring-dilated-attention[tokenizers]'"
        )


@contextmanager
def _refused(what: str) -> Iterator[None]:
    """Errors of the `tokenizers` package as a `ValueError` that begins with `what`.

    It raises no class narrower than `Exception`, and where its Rust code panics, a `BaseException`.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from error


def cut(text: bytes | memoryview, size: int) -> Iterator[bytes]:
    """Cut text into pieces of at most `size` bytes, at ends of lines where there are any.

    Where a line is longer, a piece ends between two characters of UTF-8. What is encoded depends on
    the pieces, so `size` is the same for all text of a run.
    """
    start = 0
    while start < len(text):
        piece = bytes(text[start : start + size])
        if start + size < len(text):
            end = piece.rfind(b"\n") + 1
            if not end:
                end = len(piece)
                # The byte that follows starts a character unless its two highest bits are 10.
                while end > len(piece) - 3 and end > 1 and text[start + end] & 0xC0 == 0x80:
                    end -= 1
            piece = piece[:end]
        yield piece
        start += len(piece)


def _parts(piece: bytes) -> Iterator[str | bytes]:
    """The UTF-8 text of a piece as `str`, and what is not UTF-8 as `bytes`."""
    for part in _RAW.split(piece.decode(errors="surrogateescape")):
        if part:
            raw = "\udc80" <= part[0] <= "\udcff"
            yield part.encode(errors="surrogateescape") if raw else part


def _difference(spelled: bytes, text: bytes) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(spelled, text, strict=False)) if a != b),
        min(len(spelled), len(text)),
    )
    # From the start of a character, where there is one.
    while same and same < len(text) and text[same] & 0xC0 == 0x80:
        same -= 1
    there, here = (part[same : same + _SHOWN].decode(errors="replace") for part in (spelled, text))
    return (
        f"the tokenizer changes the text: its tokens spell {there!r} where the text has {here!r}; "
        "remove its normalizer, prefix space or unknown token, or train one with --train-tokenizer"
    )


def _types(part: Any) -> list[str]:
    """The types of a decoder in a tokenizer.json, which may be a sequence of several."""
    if not isinstance(part, dict):
        return []
    if part.get("type") == "Sequence":
        return [name for inner in part.get("decoders", ()) for name in _types(inner)]
    return [str(part.get("type"))]


def _alphabet() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable ones stand for themselves, others for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, NUM_BYTES)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(NUM_BYTES + index): byte for index, byte in enumerate(others)
    }


ALPHABET = _alphabet()
"""The byte of each character of a byte-level tokenizer's vocabulary."""


def _bytes_of(token: str) -> bytes | None:
    """What a token of the vocabulary spells; None if it is not in the alphabet of bytes."""
    try:
        return bytes(ALPHABET[character] for character in token)
    except KeyError:
        return None
