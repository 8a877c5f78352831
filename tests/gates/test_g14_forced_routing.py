"""G14: a run forced to its own recorded routing is the run again."""

from __future__ import annotations

import numpy as np
import pytest
from gates.harness import FAMILIES, PROMPT, SEED, assert_same, recording, say, streamed

from moetriage.trace.reader import read_trace


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize(("suffix", "ways"), [(".csv", [{"cache_mb": 0}, {"mmap": True}]), (".parquet", [{"share": 1.3}])])
def test_forced_to_its_own_routing_equals_the_run(tiny, reference, tmp_path, shape, suffix, ways):
    trace = tmp_path / f"routes{suffix}"
    with streamed(tiny(shape), share=1.3, record_routes=True) as llm, recording(llm, trace):
        assert_same(say(llm), reference(shape))
    for how in ways:
        with streamed(tiny(shape), force_routing=trace, **how) as llm:
            assert_same(say(llm), reference(shape))


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("how", [{"cache_mb": 0}, {"mmap": True}], ids=["streamed", "mmap"])
def test_another_text_is_forced_to_the_recorded_routing(tiny, reference, tmp_path, shape, how):
    recorded, forced = tmp_path / "recorded.parquet", tmp_path / "forced.parquet"
    with streamed(tiny(shape), cache_mb=0, record_routes=True) as llm, recording(llm, recorded):
        say(llm)
    with streamed(tiny(shape), record_routes=True, force_routing=recorded, **how) as llm, recording(llm, forced):
        said = say(llm, prompt=PROMPT[::-1], seed=SEED + 1)
    assert said.tokens != reference(shape).tokens
    before, after = read_trace(recorded).frame, read_trace(forced).frame
    for column in ("phase", "step", "layer", "slot", "expert", "weight"):
        assert np.array_equal(before[column], after[column]), column
