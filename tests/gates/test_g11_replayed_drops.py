"""G11: the dropped set of a run, dropped again, gives the same bytes, whatever the cache does then."""

from __future__ import annotations

import numpy as np
import pytest
from gates.harness import FAMILIES, assert_same, counters, recording, say, streamed

from moetriage.config import DropConfig


@pytest.mark.parametrize(
    ("shape", "renorm", "in_prefill"),
    [*((shape, both, both) for shape in FAMILIES for both in (False, True)), ("tiny-qwen3moe", True, False)],
)
def test_replayed_drops_equal_the_run_that_made_them(tiny, reference, tmp_path, shape, renorm, in_prefill):
    trace = tmp_path / "dropped.parquet"
    drop = DropConfig(threshold=1.0, renorm=renorm, in_prefill=in_prefill)
    with streamed(tiny(shape), share=1.2, record_routes=True, drop=drop) as llm, recording(llm, trace, renorm=renorm):
        dropped, made = say(llm), counters(llm)
    assert made["dropped"] > 0
    assert not np.array_equal(dropped.logits, reference(shape).logits), "dropping is lossy"
    misses = set()
    for cache in ({"cache_mb": 0}, {"cache_mb": 64}):
        with streamed(tiny(shape), replay_drops=trace, **cache) as llm:
            replayed, again = say(llm), counters(llm)
        assert_same(replayed, dropped)
        assert again["dropped"] == made["dropped"]
        assert again["mass_dropped"] == made["mass_dropped"]
        misses.add(again["misses"])
    assert len({*misses, made["misses"]}) == 3, "each cache held other experts"
