"""G4: how the bytes come off the disk (lanes, O_DIRECT, in place, one stage or two) changes nothing."""

from __future__ import annotations

import os

import pytest
from gates.harness import FAMILIES, assert_same, counters, say, streamed


def takes_direct_reads(path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize(
    "how",
    [
        {"io_threads": 1},
        {"io_threads": 8},
        {"odirect": False},
        {"in_place": False},
        {"staged": False},
        {"io_threads": 1, "odirect": False, "staged": False},
    ],
    ids=lambda how: " ".join(f"{key}={value}" for key, value in how.items()),
)
def test_reading_otherwise_equals_resident(tiny, reference, shape, how):
    with streamed(tiny(shape), cache_mb=0, **how) as llm:
        said = say(llm)
        stats, state, layers = counters(llm), llm.session.hook.direct_state, llm.session.layers
    assert_same(said, reference(shape))
    assert stats["reads"] > 0
    assert all(len(layer.stages) > 1 for layer in layers), "every family has a product to wait for apart"
    if not how.get("odirect", True):
        assert state == "off"
        assert stats["disk_bytes"] == stats["read_bytes"]
    elif takes_direct_reads(tiny(shape)):
        assert state == "on"
        assert stats["disk_bytes"] > stats["read_bytes"], "direct reads round outward to whole blocks"


@pytest.mark.parametrize("shape", FAMILIES)
def test_in_place_reads_have_somewhere_to_land(tiny, shape):
    """What makes ``in_place`` fire: an expert's address mirrors its file offset, and it is larger than the two ragged blocks."""
    with streamed(tiny(shape), cache_mb=0) as llm:
        for tensor in llm.session.layout.experts:
            assert llm.session.weights.source.address(tensor.span.name) % 4096 == tensor.span.offset % 4096
            assert tensor.expert_bytes > 2 * 4096


@pytest.mark.parametrize("shape", FAMILIES)
def test_stages_are_waited_for_apart(tiny, shape):
    barriers = {}
    for staged in (False, True):
        with streamed(tiny(shape), cache_mb=0, staged=staged) as llm:
            said = say(llm, 8)
            barriers[staged] = counters(llm)["barriers"]
            stages = len(llm.session.layers[0].stages)
    assert stages > 1
    assert barriers[False] == len(said.steps) * len(llm.session.layers)
    # A stage whose reads are done when its product comes up needs no barrier.
    assert barriers[False] < barriers[True] <= stages * barriers[False]
