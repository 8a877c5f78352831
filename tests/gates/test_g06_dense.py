"""G6: dense weights in own memory or mapped from the file are the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from gates.harness import FAMILIES, assert_same, counters, say, streamed


def mapped_bytes(path: Path) -> int:
    """Return how much of ``path`` this process maps."""
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path)))
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("dense_weights", ["anon", "mmap"])
def test_dense_weights_in_either_place_equal_resident(tiny, reference, shape, dense_weights):
    before = mapped_bytes(tiny(shape))
    with streamed(tiny(shape), share=1.3, dense_weights=dense_weights) as llm:
        said, stats = say(llm), counters(llm)
        is_mapped = mapped_bytes(tiny(shape)) > before
    assert_same(said, reference(shape))
    assert is_mapped == (dense_weights == "mmap")
    assert stats["reads"] > 0
