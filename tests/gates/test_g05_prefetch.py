"""G5: reading ahead changes nothing, when it guesses right, when it guesses wrong, and when there is no room for the guess."""

from __future__ import annotations

import pytest
from gates.harness import FAMILIES, assert_same, counters, say, streamed


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize(("depth", "share", "lanes"), [(1, 0.7, 4), (8, 0.6, 2)])
def test_prefetching_equals_resident(tiny, reference, shape, depth, share, lanes):
    with streamed(tiny(shape), share=share, prefetch=depth, io_threads=lanes) as llm:
        said, stats = say(llm), counters(llm)
    assert_same(said, reference(shape))
    assert stats["prefetch_hits"] > 0, "without read-ahead a cache below T hits never: these are its own"
    assert stats["prefetch_issued"] > stats["prefetch_hits"], "some guesses were wrong"
    assert stats["evictions"] > 0
    assert stats["peak_bytes"] > 0


@pytest.mark.parametrize("shape", FAMILIES)
def test_prefetching_into_hardly_any_room_equals_resident(tiny, reference, shape):
    """One lane and room for a guess or two beside the layer that is computed: guesses are evicted, and taken back before they are read."""
    for attempt in range(5):
        with streamed(tiny(shape), share=0.5, prefetch=3, io_threads=1) as llm:
            said, stats = say(llm), counters(llm)
        assert_same(said, reference(shape))
        assert stats["prefetch_issued"] > 0
        # On a busy machine the lane may not get to read any guess before all are taken back; then nothing could be evicted.
        if attempt == 4 or stats["prefetch_cancelled"] < stats["prefetch_issued"]:
            break
    assert stats["prefetch_hits"] + stats["prefetch_cancelled"] < stats["prefetch_issued"], "the others were evicted"


@pytest.mark.parametrize("shape", FAMILIES)
def test_prefetching_into_no_room_reads_nothing_ahead(tiny, reference, shape):
    with streamed(tiny(shape), share=0.1, prefetch=3) as llm:
        said, stats = say(llm), counters(llm)
    assert_same(said, reference(shape))
    assert stats["evictions"] > 0
    assert stats["prefetch_issued"] == 0


def test_a_depth_beyond_all_layers_is_all_layers(tiny, reference):
    shape = "tiny-qwen3moe"
    with streamed(tiny(shape), share=1.3, prefetch=10**12) as llm:
        said, stats = say(llm, 8), counters(llm)
    assert_same(said, reference(shape))
    assert stats["prefetch_issued"] > 0


def test_a_guess_never_exceeds_the_budget_and_one_layer(tiny):
    """A batch of all of a layer's experts is all there may be beyond the budget."""
    with streamed(tiny("tiny-qwen3moe"), share=0.01, prefetch=1, n_expert_used=16) as llm:
        say(llm, 6)
        stats, session = counters(llm), llm.session
    layer_bytes = 16 * session.layer_expert_bytes(session.layers[0])
    assert stats["peak_bytes"] == layer_bytes > stats["budget_bytes"]
