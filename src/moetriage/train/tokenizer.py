"""The byte-level BPE tokenizer: training texts in; ids and ``tokenizer.json`` (Hugging Face's format) out.

Texts are cut before merging as GPT-2 does (Radford et al. 2019), because llama.cpp knows that rule by name: an exported model reads a text
as it did in training. Nothing is normalised, so ids decode to the very bytes. Needs the ``tokenizers`` package, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from moetriage.errors import UsageError
from moetriage.train.model_config import MAX_VOCAB

#: Stands between files and ends what is generated; always id 0.
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
#: Every byte, and the end of a text.
MIN_VOCAB = 257
FILE_NAME = "tokenizer.json"
#: Learning merges takes time with the square of a word's length: 2 s at this one, minutes at ten times as much.
MAX_WORD = 20_000
_LONG_RUN = re.compile(rf"\s{{{MAX_WORD + 1}}}")


class Tokenizer:
    """Ids of texts and back. ``vocab_size`` is at most 65,536; a text that spells <|endoftext|> gets the ids of those characters."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        # A text about tokenizers is no command to end.
        self._inner.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without <|endoftext|>."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_files(self, texts: Sequence[str]) -> NDArray[np.uint16]:
        """Return the ids of all texts in one row, with <|endoftext|> after each."""
        parts: list[NDArray[np.uint16]] = []
        for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False):
            parts += [np.array(encoding.ids, dtype=np.uint16), np.array([END_OF_TEXT_ID], dtype=np.uint16)]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text; bytes that form no character yet are shown as U+FFFD."""
        return str(self._inner.decode(list(ids), skip_special_tokens=False))

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """Return the bytes that ids stand for, nothing for <|endoftext|>."""
        table = self._table
        return b"".join([table[token] for token in ids])

    @cached_property
    def _table(self) -> list[bytes]:
        """The bytes of each token. In the file they are spelt with a printable character for each byte (GPT-2's alphabet)."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
        spelt = (self._inner.id_to_token(token) for token in range(self.vocab_size))
        return [b"" if text == END_OF_TEXT else bytes(byte_of[char] for char in text) for text in spelt]

    def as_json(self) -> str:
        """Return what ``tokenizer.json`` holds."""
        return str(self._inner.to_str(pretty=True))


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn merges from texts; the same texts in the same order give the same tokenizer.

    vocab_size: 257 to 65,536. Raises UsageError outside of that, and if the texts hold too few different words to reach it.
    """
    if not MIN_VOCAB <= vocab_size <= MAX_VOCAB:
        raise UsageError(f"--vocab-size {vocab_size}: must be {MIN_VOCAB} (bytes and {END_OF_TEXT} alone) to {MAX_VOCAB} (ids of 16 bits)")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = _splitting()
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    found = inner.get_vocab_size()
    if found < vocab_size:
        raise UsageError(
            f"corpus too small: its texts give a vocabulary of {found}, below --vocab-size {vocab_size}; add text, or ask for {found}"
        )
    return Tokenizer(inner)


def has_endless_word(text: str) -> bool:
    """Say whether a text holds a word of more than ``MAX_WORD`` characters, as texts are cut before merging (one letter repeated, say)."""
    # Most texts need only the cheap look: every word lies within a run of blanks or of anything else.
    if _LONG_RUN.search(text) is None and all(len(run) < MAX_WORD for run in text.split()):
        return False
    return any(end - start > MAX_WORD for _, (start, end) in _splitting().pre_tokenize_str(text))


def _splitting() -> Any:
    return tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json``. Raises UsageError, with the path, if it is missing, unreadable or of another kind."""
    try:
        inner = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the package raises bare Exception for what it cannot parse
        raise UsageError(f"{path}: is no tokenizer: {error}") from error
    if inner.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise UsageError(f"{path}: {END_OF_TEXT} is not its id {END_OF_TEXT_ID}, so it was not written by moetriage data build")
    tokenizer = Tokenizer(inner)
    try:
        tokenizer.bytes_of(())
    except (TypeError, KeyError) as error:  # an id without a token, a character that is no byte's
        raise UsageError(f"{path}: not every token is bytes, so it was not written by moetriage data build") from error
    return tokenizer
