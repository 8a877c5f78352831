"""A routing that is too wide for llama.cpp's graph is refused; it would end the process there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moetriage.config import StreamConfig
from moetriage.errors import ModelFileError, UsageError
from moetriage.gguf.graph_limit import widest_top_k
from moetriage.gguf.layout import read_layout
from moetriage.gguf.shapes import SHAPES
from moetriage.gguf.synth import write_model
from moetriage.stream.llama import Llama

WIDE = replace(SHAPES["tiny-qwen3moe"], n_layer=12, n_expert=64, n_embd=64, n_ff_exp=32, ggml_type="f16")


@pytest.fixture
def wide(tmp_path, monkeypatch):
    def make(**sizes):
        monkeypatch.setitem(SHAPES, "wide", replace(WIDE, **sizes))
        return write_model(tmp_path / "wide.gguf", "wide")[0]

    return make


def open_model(path, **config):
    return Llama(path, stream=StreamConfig(cache_mb=0, **config), n_ctx=32, n_threads=1, n_threads_batch=1, flash_attn=False)


def test_the_widest_routing_runs_and_the_next_is_refused(wide):
    path = wide()
    widest = widest_top_k(read_layout(path))
    assert WIDE.top_k < widest < WIDE.n_expert
    llm = open_model(path, n_expert_used=widest)
    llm.eval([1, 2, 3])
    assert llm.session.top_k == widest
    llm.close()
    with pytest.raises(UsageError, match=f"--n-expert-used {widest + 1}: .* room for {widest} "):
        open_model(path, n_expert_used=widest + 1)


def test_a_file_that_asks_for_more_is_refused(wide):
    with pytest.raises(ModelFileError, match="uses 60 experts per token"):
        open_model(wide(top_k=60))


def test_no_known_family_is_limited_below_its_own_width(tiny):
    for shape in SHAPES:
        if shape.startswith("tiny"):
            layout = read_layout(tiny(shape))
            assert widest_top_k(layout) >= layout.n_expert
