"""Tokenizers that llama.cpp reproduces become metadata; others are refused. That it does reproduce them is tested in tests/train."""

from __future__ import annotations

from typing import Any

import pytest

from moetriage.errors import UsageError
from moetriage.gguf.bpe import tokenizer_keys
from moetriage.gguf.ggml_api import GgufType
from moetriage.gguf.writer import Typed


def tokenizer(**changes: Any) -> dict[str, Any]:
    """A byte-level BPE tokenizer of two letters, one merge and two added tokens; ``model__type="x"`` changes a nested value."""
    parts: dict[str, Any] = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "normalizer": None,
        "added_tokens": [{"id": 3, "content": "<end>", "special": True}, {"id": 4, "content": "plain", "special": False}],
    }
    for name, value in changes.items():
        outer, _, inner = name.partition("__")
        parts[outer] = parts[outer] | {inner: value} if inner else value
    return parts


def test_tokens_types_and_merges_are_named() -> None:
    keys = tokenizer_keys(tokenizer(), vocab_size=6, eos_token="<end>")
    assert keys["tokenizer.ggml.tokens"] == ["a", "b", "ab", "<end>", "plain", "[unused 5]"]
    assert keys["tokenizer.ggml.token_type"] == Typed(GgufType.INT32, (1, 1, 1, 3, 4, 5))
    assert keys["tokenizer.ggml.merges"] == ["a b"]
    assert keys["tokenizer.ggml.eos_token_id"] == keys["tokenizer.ggml.bos_token_id"] == 3
    assert keys["tokenizer.ggml.add_bos_token"] is False


def test_merges_of_older_files_are_read_too() -> None:
    keys = tokenizer_keys(tokenizer(model__merges=["a b"]), vocab_size=5, eos_token=None)
    assert keys["tokenizer.ggml.merges"] == ["a b"]
    assert "tokenizer.ggml.eos_token_id" not in keys


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__type": "WordPiece"}, "model.type is 'WordPiece'"),
        ({"model__ignore_merges": True}, "model.ignore_merges is True"),
        ({"model__dropout": 0.1}, "model.dropout is 0.1"),
        ({"normalizer": {"type": "NFC"}}, "normalizer is {'type': 'NFC'}"),
        ({"pre_tokenizer": None}, "pre_tokenizer.type is None"),
        ({"pre_tokenizer__add_prefix_space": True}, "pre_tokenizer.add_prefix_space is True"),
        ({"pre_tokenizer__use_regex": False}, "pre_tokenizer.use_regex is False"),
        ({"model__vocab": {}}, "no vocabulary"),
        ({"added_tokens": [{"id": 3, "content": "<end>", "special": True, "lstrip": True}]}, "'<end>' takes spaces in"),
    ],
)
def test_what_llama_cpp_would_tokenise_otherwise_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        tokenizer_keys(tokenizer(**changes), vocab_size=6, eos_token="<end>")
    assert said in str(caught.value)


def test_a_model_with_fewer_rows_than_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="has token 4 and the model's vocabulary 4 rows"):
        tokenizer_keys(tokenizer(), vocab_size=4, eos_token="<end>")


def test_a_missing_last_token_is_refused() -> None:
    with pytest.raises(UsageError, match="no token '<eos>'"):
        tokenizer_keys(tokenizer(), vocab_size=5, eos_token="<eos>")
