"""G3: reading every expert for each token changes nothing but the bytes read.

How every expert comes to be read: a recorded run is forced again at the width of all experts, the ones that the router did not choose with
weight 0. So every product of every layer runs over every expert, and what was read needlessly is multiplied by exactly zero. The prompt is
evaluated token by token: llama.cpp computes K-quantised experts that get eight or more of a batch's rows in another order of summation.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from gates.harness import FAMILIES, PROMPT, assert_same, counters, recording, resident, rewrite, say, streamed

from moetriage.trace.reader import read_trace


def widened(frame: pl.DataFrame, n_expert: int, top_k: int) -> pl.DataFrame:
    """Return the rows with the experts that were not chosen appended to each cell, with weight 0."""
    cells = frame.filter(pl.col("slot") == 0)
    chosen = frame["expert"].to_numpy().reshape(-1, top_k)
    weight = frame["weight"].to_numpy().reshape(-1, top_k)
    others = np.array([[e for e in range(n_expert) if e not in row] for row in chosen.tolist()])
    every = np.hstack([chosen, others])
    assert every.shape[1] == n_expert
    wide = pl.DataFrame({name: np.repeat(cells[name].to_numpy(), n_expert) for name in frame.columns})
    return wide.with_columns(
        slot=pl.Series(np.tile(np.arange(n_expert, dtype=np.int16), len(every))),
        expert=pl.Series(every.ravel().astype(np.int32)),
        weight=pl.Series(np.hstack([weight, np.zeros(others.shape, np.float32)]).ravel()),
        residency=pl.lit(1, pl.Int8),
        expert_bytes=pl.lit(0, pl.Int64),
    )


@pytest.mark.parametrize("shape", FAMILIES)
def test_every_expert_for_each_token_equals_selective(tiny, tmp_path, shape):
    how, prompt = {"n_batch": 1}, PROMPT[:8]
    with resident(tiny(shape), **how) as llm:
        expected = say(llm, prompt=prompt)
    with streamed(tiny(shape), cache_mb=0, record_routes=True, llama=how) as llm, recording(llm, tmp_path / "narrow.parquet"):
        selective = say(llm, prompt=prompt)
        n_expert, top_k, read_selective = llm.session.layout.n_expert, llm.session.top_k, counters(llm)["read_bytes"]
    frame = widened(read_trace(tmp_path / "narrow.parquet").frame, n_expert, top_k)
    trace = rewrite(tmp_path / "narrow.parquet", tmp_path / "wide.parquet", frame, top_k=n_expert)
    with streamed(tiny(shape), cache_mb=0, force_routing=trace, llama=how) as llm:
        every, read_every = say(llm, prompt=prompt), counters(llm)["read_bytes"]
        n_layers = len(llm.session.layers)
    assert_same(selective, expected)
    assert_same(every, expected)
    assert all(step.misses == n_layers * n_expert for step in every.steps)
    assert read_every == read_selective * n_expert // top_k
