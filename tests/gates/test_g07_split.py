"""G7: a model split over several files is the same model."""

from __future__ import annotations

import pytest
from gates.harness import FAMILIES, assert_same, counters, resident, say, streamed


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("dense_weights", ["anon", "mmap"])
def test_split_file_equals_single_file(tiny, reference, shape, dense_weights):
    with streamed(tiny(shape, split=3), share=1.3, dense_weights=dense_weights) as llm:
        said, stats = say(llm), counters(llm)
        layout = llm.session.layout
    assert_same(said, reference(shape))
    assert len(layout.paths) == 3
    assert len({tensor.span.shard for tensor in layout.experts}) > 1, "experts were read from more than one file"
    assert stats["hits"] > 0
    assert stats["evictions"] > 0


def test_split_file_equals_what_llama_cpp_makes_of_it(tiny, reference):
    with resident(tiny("tiny-qwen3moe", split=3)) as llm:
        assert_same(say(llm), reference("tiny-qwen3moe"))
