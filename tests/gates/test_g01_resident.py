"""G1: streaming with the cache off says what plain llama.cpp says with the whole model in memory."""

from __future__ import annotations

import pytest
from gates.harness import FAMILIES, N_TOKENS, PROMPT, assert_same, counters, resident, say, streamed


@pytest.mark.parametrize("shape", FAMILIES)
def test_streamed_without_cache_equals_resident(tiny, reference, shape):
    with streamed(tiny(shape), cache_mb=0) as llm:
        assert counters(llm)["read_bytes"] == 0, "loading reads no expert"
        said = say(llm, N_TOKENS)
        layers, stats = llm.session.layers, counters(llm)
    assert_same(said, reference(shape))
    assert len(set(said.tokens)) > N_TOKENS // 2, "the text must wander for the routing to wander"
    assert stats["hits"] == 0
    assert said.decode_sum("misses") == (N_TOKENS - 1) * sum(layer.top_k for layer in layers)
    assert stats["read_bytes"] == stats["misses"] * llm.session.layer_expert_bytes(layers[0]) or shape == "tiny-mixed"
    assert all(layer.droppable for layer in layers), "the router's weights were found in every family"
    assert said.steps[0].n_tokens == len(PROMPT)


def test_two_compute_threads_change_nothing(tiny, reference):
    shape = "tiny-qwen3moe"
    threads = {"n_threads": 2, "n_threads_batch": 2}
    with resident(tiny(shape), **threads) as plain, streamed(tiny(shape), cache_mb=0, llama=threads) as llm:
        said = say(llm, 4, PROMPT[:6])
        assert_same(said, say(plain, 4, PROMPT[:6]))
    assert counters(llm)["reads"] > 0
