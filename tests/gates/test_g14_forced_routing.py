"""G14: a run forced to its own recorded routing is the run again."""

from __future__ import annotations

import numpy as np
import pytest
from gates.harness import FAMILIES, PROMPT, SEED, assert_same, recording, say, streamed

from moetriage.trace.reader import read_trace


@pytest.fixture(scope="module")
def recorded(tiny, reference, tmp_path_factory):
    """Return a function that gives a trace of what resident llama.cpp says, recorded once per module."""
    folder = tmp_path_factory.mktemp("recorded")

    def record(shape, suffix):
        trace = folder / f"{shape}{suffix}"
        if not trace.exists():
            with streamed(tiny(shape), share=1.3, record_routes=True) as llm, recording(llm, trace):
                assert_same(say(llm), reference(shape))
        return trace

    return record


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize(
    ("suffix", "how"),
    [(".csv", {"cache_mb": 0}), (".parquet", {"mmap": True}), (".parquet", {"share": 1.3})],
    ids=["off", "mmap", "evicting"],
)
def test_forced_to_its_own_routing_equals_the_run(tiny, reference, recorded, shape, suffix, how):
    with streamed(tiny(shape), force_routing=recorded(shape, suffix), **how) as llm:
        assert_same(say(llm), reference(shape))


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("how", [{"cache_mb": 0}, {"mmap": True}], ids=["streamed", "mmap"])
def test_another_text_is_forced_to_the_recorded_routing(tiny, reference, recorded, tmp_path, shape, how):
    trace, forced = recorded(shape, ".parquet"), tmp_path / "forced.parquet"
    with streamed(tiny(shape), record_routes=True, force_routing=trace, **how) as llm, recording(llm, forced):
        said = say(llm, prompt=PROMPT[::-1], seed=SEED + 1)
    assert said.tokens != reference(shape).tokens
    before, after = read_trace(trace).frame, read_trace(forced).frame
    for column in ("phase", "step", "layer", "slot", "expert", "weight"):
        assert np.array_equal(before[column], after[column]), column
