"""The bundled model writes: in a cache that does not hold it, losslessly and with dropped experts, and what it writes is Python."""

from __future__ import annotations

import keyword
import re

import pytest
from gates.harness import resident

from moetriage.demo.text import PROMPT, Written, bundled_model, text_cache_mb, write_text
from moetriage.gguf.layout import ModelLayout, read_layout
from moetriage.types import MIB

TOKENS = 48


@pytest.fixture(scope="module")
def layout() -> ModelLayout:
    return read_layout(bundled_model())


@pytest.fixture(scope="module")
def written() -> list[Written]:
    return list(write_text(bundled_model(), tokens=TOKENS, n_threads=1))


def test_the_bundled_model_is_what_was_promised(layout: ModelLayout) -> None:
    assert len(layout.moe_layers) >= 8
    assert layout.n_expert >= 32
    assert layout.top_k >= 6
    assert bundled_model().stat().st_size <= 25_000_000


def test_the_cache_holds_a_token_and_not_the_model(layout: ModelLayout) -> None:
    assert layout.working_set_bytes() <= text_cache_mb(layout) * MIB < layout.expert_total_bytes


def test_streamed_text_is_the_resident_models(written: list[Written]) -> None:
    with resident(bundled_model()) as llm:
        said = llm.create_completion(PROMPT, max_tokens=TOKENS, temperature=0.0, repeat_penalty=1.1)["choices"][0]["text"]
    assert written[0].text == said
    assert written[0].report.cache.misses > 0
    assert written[0].report.cache.evictions > 0


def test_dropping_really_drops_and_still_writes(written: list[Written]) -> None:
    lossless, dropped = written
    assert (lossless.threshold, dropped.threshold) == (None, 0.75)
    assert lossless.report.drop.dropped == 0
    assert dropped.report.drop.dropped > 0
    assert dropped.report.decode.read_bytes < lossless.report.decode.read_bytes
    assert dropped.text


def test_the_text_is_recognisably_python(written: list[Written]) -> None:
    words = set(re.findall(r"[a-zA-Z_]+", written[0].text))
    assert len(words & set(keyword.kwlist)) >= 2
    assert re.search(r"^ {4,}\S", written[0].text, re.MULTILINE), "its lines are indented"


def test_pieces_come_as_they_are_written() -> None:
    pieces: list[str] = []
    cells: list[str] = []
    texts = [cell.text for cell in write_text(bundled_model(), pieces.append, on_cell=cells.append, tokens=4, n_threads=1)]
    assert "".join(pieces) == "".join(texts)
    assert cells == ["streamed", "streamed, F=0.75"]
