"""G10: recording the routing changes nothing."""

from __future__ import annotations

import pytest
from gates.harness import FAMILIES, N_SHORT, PROMPT, assert_same, counters, recording, say, streamed

from moetriage.trace.reader import read_trace


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_recording_equals_resident(tiny, reference, tmp_path, shape, suffix):
    path = tmp_path / f"routes{suffix}"
    with streamed(tiny(shape), share=1.3, record_routes=True) as llm, recording(llm, path):
        said, layers, stats = say(llm), llm.session.layers, counters(llm)
    assert_same(said, reference(shape))
    frame = read_trace(path).frame
    top_k, n_layers = llm.session.top_k, len(layers)
    assert len(frame.filter(phase=1)) == (N_SHORT - 1) * n_layers * top_k
    # Some families compute the last layer's experts only for the tokens whose output was asked for: of the prompt, the last one.
    in_last = len(PROMPT) if shape in ("tiny-gemma4", "tiny-gpt-oss") else 1
    assert len(frame.filter(phase=0)) == (len(PROMPT) * (n_layers - 1) + in_last) * top_k
    assert frame["expert_bytes"].sum() == stats["read_bytes"]
    decoded = frame.filter(phase=1)
    assert decoded["residency"].sum() == said.decode_sum("hits") > 0
    assert (decoded["residency"] == 0).sum() == said.decode_sum("misses") > 0
