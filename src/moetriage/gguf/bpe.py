"""Turn a ``tokenizer.json`` (Hugging Face tokenizers) into the ``tokenizer.*`` keys of a GGUF file.

In: the parsed JSON of a byte-level BPE tokenizer that splits text as GPT-2 does. Out: keys that make llama.cpp tokenise as it does.
Anything llama.cpp would do otherwise (another splitting, a normaliser, a prefix space) is refused: a model that reads other tokens than
it was trained on looks merely bad, and nobody finds out why.
"""

from __future__ import annotations

from typing import Any

from moetriage.errors import UsageError
from moetriage.gguf.ggml_api import GgufType
from moetriage.gguf.writer import Typed, Value

#: llama.cpp's name for GPT-2's splitting; its regular expression is the one of tokenizers' ByteLevel.
PRE_TOKENIZER = "gpt-2"
#: llama_token_type: NORMAL, CONTROL (special), USER_DEFINED (added but plain text), UNUSED.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def tokenizer_keys(tokenizer: dict[str, Any], *, vocab_size: int, eos_token: str | None) -> dict[str, Value]:
    """Return the tokenizer's metadata for a model of ``vocab_size`` rows.

    eos_token: text of the token that ends a text; it is also named as the first one, but never added by itself. None: none is named.
    Rows without a token get one of type UNUSED. Raises UsageError for a tokenizer that llama.cpp would not reproduce.
    """
    try:
        return _keys(tokenizer, vocab_size, eos_token)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"the tokenizer is damaged ({type(error).__name__}: {error}); is it a tokenizer.json?") from error


def _keys(tokenizer: dict[str, Any], vocab_size: int, eos_token: str | None) -> dict[str, Value]:
    _check(tokenizer)
    added = {int(token["id"]): token for token in tokenizer.get("added_tokens") or ()}
    texts = {int(number): text for text, number in tokenizer["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    if max(texts) >= vocab_size:
        raise UsageError(f"the tokenizer has token {max(texts)} and the model's vocabulary {vocab_size} rows: they do not belong together")
    tokens = [texts.get(number, f"[unused {number}]") for number in range(vocab_size)]
    kinds = tuple(_kind(number, texts, added) for number in range(vocab_size))
    keys: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZER,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": Typed(GgufType.INT32, kinds),
        "tokenizer.ggml.merges": [_merge(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }
    if eos_token is not None:
        if eos_token not in tokens:
            raise UsageError(f"the tokenizer has no token {eos_token!r}, which should end a text")
        for key in ("bos", "eos", "padding"):
            keys[f"tokenizer.ggml.{key}_token_id"] = tokens.index(eos_token)
    return keys


def _kind(number: int, texts: dict[int, str], added: dict[int, Any]) -> int:
    if number in added:
        return _CONTROL if added[number]["special"] else _USER_DEFINED
    return _NORMAL if number in texts else _UNUSED


def _merge(merge: str | list[str]) -> str:
    # Up to tokenizers 0.19 a merge was one text.
    return merge if isinstance(merge, str) else " ".join(merge)


def _check(tokenizer: dict[str, Any]) -> None:
    model, splitting = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    wanted = {
        "model.type": (model.get("type"), "BPE"),
        "model.ignore_merges": (bool(model.get("ignore_merges")), False),
        "model.byte_fallback": (bool(model.get("byte_fallback")), False),
        "model.dropout": (model.get("dropout") or None, None),
        "model.continuing_subword_prefix": (model.get("continuing_subword_prefix") or None, None),
        "model.end_of_word_suffix": (model.get("end_of_word_suffix") or None, None),
        "normalizer": (tokenizer.get("normalizer"), None),
        "pre_tokenizer.type": (splitting.get("type"), "ByteLevel"),
        "pre_tokenizer.add_prefix_space": (bool(splitting.get("add_prefix_space")), False),
        "pre_tokenizer.use_regex": (bool(splitting.get("use_regex", True)), True),
    }
    for name, (found, needed) in wanted.items():
        if found != needed:
            raise UsageError(f"the tokenizer's {name} is {found!r}, and llama.cpp's {PRE_TOKENIZER} tokenizer does only {needed!r}")
    for token in tokenizer.get("added_tokens") or ():
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise UsageError(f"the added token {token['content']!r} takes spaces in or must stand alone, which llama.cpp does not do")
    if not model.get("vocab"):
        raise UsageError("the tokenizer has no vocabulary")
