"""G5: reading ahead changes nothing, when it guesses right, when it guesses wrong, and when there is no room for the guess."""

from __future__ import annotations

import pytest
from gates.harness import FAMILIES, assert_same, counters, say, streamed


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize(("depth", "share", "lanes"), [(1, 0.7, 4), (2, 0.7, 1), (8, 0.5, 2)])
def test_prefetching_equals_resident(tiny, reference, shape, depth, share, lanes):
    with streamed(tiny(shape), share=share, prefetch=depth, io_threads=lanes) as llm:
        said, stats = say(llm), counters(llm)
    assert_same(said, reference(shape))
    assert stats["prefetch_hits"] > 0, "without read-ahead a cache below T hits never: these are its own"
    assert stats["prefetch_issued"] > stats["prefetch_hits"], "some guesses were wrong"
    assert stats["evictions"] > 0
    assert stats["peak_bytes"] > 0


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("share", [0.05, 0.15, 0.3])
def test_prefetching_into_no_room_equals_resident(tiny, reference, shape, share):
    """Here the guesses evict each other, and are evicted while they are under way."""
    with streamed(tiny(shape), share=share, prefetch=3, io_threads=1) as llm:
        said, stats = say(llm), counters(llm)
    assert_same(said, reference(shape))
    assert stats["evictions"] > 0
    assert stats["resident_bytes"] <= stats["budget_bytes"] + max(map(llm.session.layer_expert_bytes, llm.session.layers)) * 8
