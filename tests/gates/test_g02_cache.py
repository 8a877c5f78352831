"""G2: an LRU cache, evicting or not, changes nothing."""

from __future__ import annotations

import pytest
from gates.harness import FAMILIES, N_TOKENS, assert_same, counters, say, streamed


@pytest.mark.parametrize("shape", FAMILIES)
def test_evicting_cache_equals_resident(tiny, reference, shape):
    with streamed(tiny(shape), share=1.3) as llm:
        said, stats = say(llm, N_TOKENS), counters(llm)
        assert_same(said, reference(shape))
        assert stats["evictions"] > 0
        assert said.decode_sum("hits") > 0
        one_layer = max(map(llm.session.layer_expert_bytes, llm.session.layers)) * llm.session.layout.n_expert
        assert stats["peak_bytes"] <= stats["budget_bytes"] + one_layer


@pytest.mark.parametrize("shape", FAMILIES)
def test_cache_below_the_working_set_equals_resident(tiny, reference, shape):
    with streamed(tiny(shape), share=0.5) as llm:
        said = say(llm, N_TOKENS)
    assert_same(said, reference(shape))
    assert said.decode_sum("evictions") > 0
    assert said.decode_sum("hits") == 0, "below T nothing can hit"


@pytest.mark.parametrize("shape", FAMILIES)
def test_cache_that_holds_everything_equals_resident(tiny, reference, shape):
    with streamed(tiny(shape), cache_mb=64) as llm:
        said = say(llm)
        warm = say(llm)
        stats = counters(llm)
    assert_same(said, reference(shape))
    assert_same(warm, reference(shape))
    assert stats["evictions"] == 0
    assert sum(step.misses for step in warm.steps) == 0
    assert sum(step.read_bytes for step in warm.steps) == 0
