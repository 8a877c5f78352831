"""A small byte-level BPE vocabulary for synthetic models.

In: a size. Out: the ``tokenizer.*`` keys of a GGUF file. Any UTF-8 text can be tokenised and comes back unchanged, since all 256 bytes
are tokens, in the spelling of GPT-2 (Radford et al. 2019, ``bytes_to_unicode``). What a model with random weights writes should be
readable and should not stop by chance, so tokens that it must not choose come last, where ``n_silent`` rows of its output matrix
are zero: control tokens and bytes that are no printable ASCII.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from moetriage.gguf.ggml_api import GgufType
from moetriage.gguf.writer import Typed, Value

#: ChatML, with the generation prompt that llama-cpp-python asks for.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NORMAL, _CONTROL_TYPE = 1, 3
_TEXT = (
    "the of and to in is that it for was on are with as at be this have from or had by not but what all were when we there can an your "
    "which their said if do will each how many then them these some her would make like him into time has look two more write see number "
    "user assistant system model expert memory disk read cache token"
)
_SYLLABLES = [c + v + e for c in "bdfgklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s")]


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in order, the merges that build the longer ones, and how many at the end a model should never choose."""

    tokens: list[str]
    merges: list[str]
    n_silent: int

    def keys(self, pre: str) -> dict[str, Value]:
        """Return the tokenizer's metadata; ``pre`` names llama.cpp's pre-tokenizer."""
        n = len(self.tokens)
        end = n - len(_CONTROL)
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": Typed(GgufType.INT32, (_NORMAL,) * end + (_CONTROL_TYPE,) * len(_CONTROL)),
            "tokenizer.ggml.merges": self.merges,
            "tokenizer.ggml.bos_token_id": end,
            "tokenizer.ggml.eos_token_id": n - 1,
            "tokenizer.ggml.padding_token_id": end,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": CHAT_TEMPLATE,
        }


def build_vocabulary(size: int) -> Vocabulary:
    """Return a vocabulary of exactly ``size`` tokens; what bytes and common words leave is filled with made-up words."""
    spelling = _byte_spelling()
    spoken = [spelling[b] for b in range(256) if 32 <= b < 127 or b == 10]
    silent = [spelling[b] for b in range(256) if not (32 <= b < 127 or b == 10)] + list(_CONTROL)
    merges, words = _word_merges(spelling[32])
    room = size - len(spoken) - len(silent)
    if room < len(words):
        raise ValueError(f"a vocabulary of {size} tokens is too small: bytes, words and control tokens take {size - room + len(words)}")
    fill = list(itertools.islice(_made_up_words(spelling[32], set(words)), room - len(words)))
    return Vocabulary(spoken + words + fill + silent, merges, len(silent))


def _made_up_words(space: str, taken: set[str]) -> Iterator[str]:
    """Yield words of two and three syllables behind a space, each once ("ba" + "na" and "ban" + "a" are the same one)."""
    for parts in itertools.chain(itertools.product(_SYLLABLES, repeat=2), itertools.product(_SYLLABLES, repeat=3)):
        word = space + "".join(parts)
        if word not in taken:
            taken.add(word)
            yield word


def _byte_spelling() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    extra = itertools.count(256)
    return [chr(b) if b in printable else chr(next(extra)) for b in range(256)]


def _word_merges(space: str) -> tuple[list[str], list[str]]:
    """Return the merges that build each word letter by letter behind a space, and the tokens they make."""
    merges: dict[str, str] = {}
    for word in _TEXT.split():
        left = space
        for letter in word:
            merges[f"{left} {letter}"] = left + letter
            left += letter
    return list(merges), list(merges.values())
