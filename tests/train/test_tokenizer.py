"""Subword tokenizers: every text is spelled exactly, or the tokenizer is refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from ring_dilated_attention.train import tokenizer as tokenizer_module
from ring_dilated_attention.train.tokenizer import ALPHABET, SubwordTokenizer, cut

TEXT = "".join(f"line {i} of a text, {i * i % 97} café\n" for i in range(600)).encode()
SIZE = 300


@pytest.fixture(scope="module")
def trained() -> SubwordTokenizer:
    return SubwordTokenizer.train(cut(TEXT, 1000), SIZE)


def changed(trained: SubwordTokenizer, **values: Any) -> bytes:
    """Its JSON with other entries."""
    return json.dumps({**json.loads(trained.json), **values}).encode()


# --- cutting


@given(st.lists(st.sampled_from(["a", "é", "€", "😀", "\n", " "])), st.integers(4, 9))
def test_pieces_are_the_text_and_whole_characters(characters: list[str], size: int) -> None:
    text = "".join(characters).encode()
    pieces = list(cut(text, size))
    assert b"".join(pieces) == text
    for piece in pieces:
        assert 0 < len(piece) <= size
        piece.decode()  # no character is cut
    assert all(piece.endswith(b"\n") for piece in pieces[:-1] if b"\n" in piece)


@given(st.binary(max_size=99), st.integers(1, 9))
def test_any_bytes_are_cut(text: bytes, size: int) -> None:
    pieces = list(cut(memoryview(text), size))
    assert b"".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_pieces_end_with_lines() -> None:
    pieces = list(cut(TEXT, 1000))
    assert len(pieces) == pytest.approx(len(TEXT) / 1000, rel=0.1)
    assert all(piece.endswith(b"\n") for piece in pieces)


# --- training and encoding


def test_equal_texts_give_equal_tokenizers_of_the_size_asked_for(trained: SubwordTokenizer) -> None:
    assert trained.vocab_size == SIZE
    assert SubwordTokenizer.train(cut(TEXT, 1000), SIZE).json == trained.json
    assert b"line" in trained.spelled
    assert {bytes([byte]) for byte in range(256)} <= set(trained.spelled)


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=40) | st.text(max_size=40).map(lambda t: t.encode()), max_size=4)
)
def test_tokens_spell_any_bytes(trained: SubwordTokenizer, pieces: list[bytes]) -> None:
    encoded = trained.encode(pieces)
    assert len(encoded) == len(pieces)
    for ids, piece in zip(encoded, pieces, strict=True):
        assert b"".join(trained.spelled[number] or b"?" for number in ids) == piece


def test_tokens_are_those_of_the_tokenizers_package(trained: SubwordTokenizer) -> None:
    plain = Tokenizer.from_str(trained.json.decode())
    ids = plain.encode(TEXT.decode()).ids
    assert trained.encode([TEXT]) == [ids]
    assert len(ids) < len(TEXT) / 2
    assert plain.decode(ids).encode() == TEXT


def test_the_alphabet_is_that_of_the_tokenizers_package() -> None:
    assert set(ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(ALPHABET.values()) == list(range(256))


def test_a_tokenizer_that_cuts_and_fills_up_does_neither_here(trained: SubwordTokenizer) -> None:
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        **{"strategy": {"Fixed": 10000}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
    }
    other = SubwordTokenizer.parse(changed(trained, truncation=truncation, padding=padding), "x")
    assert other.encode([TEXT]) == trained.encode([TEXT])


def test_added_tokens_spell_themselves(trained: SubwordTokenizer) -> None:
    added = {
        **{"id": SIZE, "content": "<é>", "special": True, "single_word": False},
        **{"lstrip": False, "rstrip": False, "normalized": False},
    }
    other = SubwordTokenizer.parse(changed(trained, added_tokens=[added]), "x")
    assert other.vocab_size == SIZE + 1
    assert other.spelled[SIZE] == "<é>".encode()
    (ids,) = other.encode(["a<é>b".encode()])
    assert ids[1] == SIZE


def test_numbers_without_a_token_spell_nothing(trained: SubwordTokenizer) -> None:
    model = json.loads(trained.json)["model"]
    data = changed(trained, model={**model, "vocab": {"a": 0, "漢": 1, "Ġ": 3}, "merges": []})
    other = SubwordTokenizer.parse(data, "x")
    assert other.spelled == (b"a", None, None, b" ")  # 漢 is not in the alphabet of bytes


# --- refusals


def word_piece(trained: SubwordTokenizer) -> bytes:
    model = {
        **{"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"},
        **{"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    return changed(trained, model=model, decoder=decoder)


def with_number(trained: SubwordTokenizer, number: int) -> bytes:
    model = json.loads(trained.json)["model"]
    return changed(trained, model={**model, "vocab": {**model["vocab"], "row": number}})


def that_panics(trained: SubwordTokenizer) -> bytes:
    """Its merges are shorter than the prefix that is to be cut from them."""
    model = json.loads(trained.json)["model"]
    return changed(trained, model={**model, "continuing_subword_prefix": "ByteLevel"})


def with_prefix_space(trained: SubwordTokenizer) -> bytes:
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    return changed(trained, pre_tokenizer={**byte_level, "use_regex": True})


def without_bytes(trained: SubwordTokenizer) -> bytes:
    model = json.loads(trained.json)["model"]
    return changed(trained, model={**model, "vocab": {"a": 0}, "merges": []})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: b"[1", "x is not a tokenizer.json: Expecting ',' delimiter"),
        (lambda _: b"\xff", "x is not a tokenizer.json: 'utf-8' codec can't decode"),
        (lambda _: b"[]", "x is not a tokenizer.json: 'list' object has no attribute"),
        (lambda _: b"{}", "x is not a tokenizer.json: Model missing"),
        (lambda t: with_number(t, 1 << 24), "a token of number 16777216; numbers must be below"),
        (that_panics, "x is not a tokenizer.json: range end index"),
        (word_piece, r"x is not a byte-level tokenizer \(its decoder is WordPiece\)"),
        (lambda t: changed(t, decoder=None), r"byte-level tokenizer \(its decoder is missing\)"),
        (
            lambda t: changed(t, normalizer={"type": "Lowercase"}),
            "the tokenizer changes the text: its tokens spell 'aé' where the text has 'Aé'",
        ),
        (with_prefix_space, "its tokens spell ' Aé' where the text has 'Aé'"),
        (without_bytes, "its tokens spell '' where the text has 'Aé'"),
    ],
)
def test_what_does_not_spell_the_text_is_refused(
    trained: SubwordTokenizer, make: Callable[[SubwordTokenizer], bytes], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SubwordTokenizer.parse(make(trained), "x").encode(["Aé".encode()])


def test_bytes_without_a_token_are_named(trained: SubwordTokenizer) -> None:
    tokenizer = SubwordTokenizer.parse(without_bytes(trained), "x")
    assert tokenizer.encode([b"aa"]) == [[0, 0]]
    with pytest.raises(
        ValueError, match="not UTF-8, and the tokenizer has no token for its byte 0xff"
    ):
        tokenizer.encode([b"a\xff"])


def test_too_many_tokens_for_a_text() -> None:
    with pytest.raises(ValueError, match=r"for 25[67] tokens only; got --train-tokenizer 300: ask"):
        SubwordTokenizer.train([b"abab"], 300)


def test_files_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"cannot read the tokenizer {tmp_path}: Is a directory"):
        SubwordTokenizer.read(tmp_path)
    with pytest.raises(ValueError, match="cannot read the tokenizer nowhere: No such file"):
        SubwordTokenizer.read("nowhere")
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"{}")
    monkeypatch.setattr(tokenizer_module, "MOST_FILE_BYTES", 1)
    with pytest.raises(ValueError, match=rf"{file} has 2 bytes: that is not a tokenizer.json"):
        SubwordTokenizer.read(file)


def test_without_the_package_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"pip install 'ring-dilated-attention\[tokenizers\]'"):
        SubwordTokenizer.read(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"a tokenizer needs the tokenizers package"):
        SubwordTokenizer.train([TEXT], SIZE)
