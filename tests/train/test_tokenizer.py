"""The tokenizer: bytes in, the same bytes out, cut as GPT-2 cuts, the same every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetriage.errors import UsageError
from moetriage.train.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, MIN_VOCAB, Tokenizer, load_tokenizer, train_tokenizer

TEXTS = ["def double(value):\n    return 2 * value\n\n" * 20, "class Cup:\n    def __init__(self, tea):\n        self.tea = tea\n" * 20]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_occurs_often_is_one_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode(TEXTS[0])) < 0.4 * len(TEXTS[0])
    assert tokenizer.vocab_size == 300


def test_words_are_cut_as_gpt2_cuts_them(tokenizer: Tokenizer) -> None:
    """A token never reaches from one piece into the next: the last blank belongs to the word, the others are a piece of their own."""
    pieces = ["    ", " return", " 2", " *", " value", "\n"]
    assert tokenizer.encode("".join(pieces)) == [token for piece in pieces for token in tokenizer.encode(piece)]


def test_files_are_divided_by_the_end_of_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_files(["tea", "", "cup"])
    expected = [*tokenizer.encode("tea"), END_OF_TEXT_ID, END_OF_TEXT_ID, *tokenizer.encode("cup"), END_OF_TEXT_ID]
    assert ids.tolist() == expected
    assert ids.dtype == np.uint16
    assert tokenizer.decode([END_OF_TEXT_ID]) == END_OF_TEXT


def test_a_text_that_spells_the_end_of_text_does_not_end(tokenizer: Tokenizer) -> None:
    text = f"the token {END_OF_TEXT} ends a text"
    assert END_OF_TEXT_ID not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_same_texts_give_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(TEXTS, 300).as_json() == tokenizer.as_json()


def test_it_survives_its_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.as_json(), encoding="utf-8")
    text = f"return {END_OF_TEXT}"
    assert load_tokenizer(path).encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("vocab_size", [0, MIN_VOCAB - 1, 65_537])
def test_a_vocabulary_outside_of_its_limits_is_refused(vocab_size: int) -> None:
    with pytest.raises(UsageError, match=rf"--vocab-size {vocab_size}: must be 257 .* to 65536"):
        train_tokenizer(TEXTS, vocab_size)


def test_texts_that_do_not_fill_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match=r"corpus too small: its texts give a vocabulary of \d+, below --vocab-size 4096"):
        train_tokenizer(TEXTS, 4096)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "is no tokenizer"), ("other", f"{END_OF_TEXT!r}")],
    ids=["none", "cut", "other"],
)
def test_a_file_that_is_no_tokenizer_of_ours_is_refused(content: str | None, message: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content == "other":
        content, message = tokenizer.as_json().replace(END_OF_TEXT, "<|eos|>"), "was not written by moetriage data build"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
