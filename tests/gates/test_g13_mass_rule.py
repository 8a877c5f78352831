"""G13: what is dropped is what the document's rule says, on normalised, unnormalised (OLMoE) and scaled (DeepSeek) gates alike."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from gates.harness import FAMILIES, assert_same, counters, recording, rewrite, say, streamed
from gates.rule import cells, decode_rows, dropped_by_rule, edited_weights

from moetriage.config import DropConfig
from moetriage.gguf.layout import read_layout
from moetriage.trace.reader import read_trace

#: Families whose weights sum to one, to less (a softmax over all experts, not rescaled), and to 2.5.
UNNORMALISED = {"tiny-olmoe": (0.2, 0.99), "tiny-deepseek2": (2.49, 2.51)}


def record(path, trace, *, drop=None, share=1.2, **config):
    """Return (what was said, the trace's rows, top_k)."""
    with streamed(path, share=share, record_routes=True, drop=drop, **config) as llm, recording(llm, trace):
        said = say(llm)
    return said, read_trace(trace).frame, llm.session.top_k


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize(
    ("threshold", "n_expert_used", "raw"), [(1.0, None, False), (0.75, None, False), (1.0, 3, False), (1.0, None, True)]
)
def test_every_drop_follows_the_rule(tiny, tmp_path, shape, threshold, n_expert_used, raw):
    drop = DropConfig(threshold=threshold, raw_weight=raw)
    _, frame, top_k = record(tiny(shape), tmp_path / "routes.parquet", drop=drop, n_expert_used=n_expert_used)
    decoded = decode_rows(frame)
    dropped = cells(decoded, "dropped", top_k) == 1
    assert np.array_equal(dropped, dropped_by_rule(decoded, threshold=threshold, top_k=top_k, raw=raw))
    assert top_k == (n_expert_used or top_k)
    assert frame.filter(phase=0)["dropped"].sum() == 0
    if not (raw and shape == "tiny-deepseek2"):  # a scaled gate is never below the raw threshold of a narrow routing
        assert dropped.any()
    cold = cells(decoded, "residency", top_k) == 0
    assert (cold & ~dropped).any(), "some cold experts were worth their read"
    assert (~cold & ~dropped).any()
    if n_expert_used is not None:  # had the file's width been taken, others would have gone
        at_file_width = threshold * top_k / read_layout(tiny(shape)).top_k
        assert not np.array_equal(dropped, dropped_by_rule(decoded, threshold=at_file_width, top_k=top_k))


@pytest.mark.parametrize("shape", FAMILIES)
def test_every_drop_in_prefill_follows_the_rule(tiny, tmp_path, shape):
    drop = DropConfig(threshold=1.0, in_prefill=True)
    _, frame, top_k = record(tiny(shape), tmp_path / "routes.parquet", drop=drop, llama={"n_ubatch": 5})
    dropped = cells(frame, "dropped", top_k) == 1
    assert np.array_equal(dropped, dropped_by_rule(frame, threshold=1.0, top_k=top_k))
    assert frame.filter(phase=0)["dropped"].sum() > 0


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("renorm", [True, False])
def test_survivors_carry_the_original_mass(tiny, tmp_path, shape, renorm):
    """Routing forced to the weights that numpy makes of the recorded drops (zero, and the mass on the survivors) gives the same bytes."""
    dropped, frame, top_k = record(tiny(shape), tmp_path / "routes.parquet", drop=DropConfig(threshold=1.0, renorm=renorm))
    assert frame["dropped"].sum() > 0
    edited = edited_weights(frame, top_k=top_k, renorm=renorm)
    if renorm:
        assert np.allclose(edited.sum(axis=1), cells(frame, "weight", top_k).sum(axis=1), rtol=1e-6)
    forced = frame.with_columns(weight=pl.Series(edited.ravel()), dropped=pl.lit(0, pl.Int8))
    trace = rewrite(tmp_path / "routes.parquet", tmp_path / "edited.parquet", forced)
    with streamed(tiny(shape), cache_mb=0, force_routing=trace) as llm:
        assert_same(say(llm), dropped)


@pytest.mark.parametrize(("shape", "mass"), UNNORMALISED.items())
def test_scale_of_the_gate_changes_no_drop(tiny, tmp_path, shape, mass):
    """The same routing with its weights as they are, normalised, and scaled: the share drops alike, the raw weight does not."""
    _, frame, top_k = record(tiny(shape), tmp_path / "own.parquet")
    weight = cells(frame, "weight", top_k)
    sums = weight.sum(axis=1, keepdims=True)
    assert mass[0] < sums.min()
    assert sums.max() < mass[1]
    sets = {}
    for name, forced in {"own": weight, "normalised": weight / sums, "scaled": 3 * weight}.items():
        rows = frame.with_columns(weight=pl.Series(forced.astype(np.float32).ravel()))
        trace = rewrite(tmp_path / "own.parquet", tmp_path / f"{name}-forced.parquet", rows)
        for raw in (False, True):
            drop = DropConfig(threshold=0.8, raw_weight=raw)
            out = tmp_path / f"{name}-{raw}.parquet"
            with streamed(tiny(shape), share=1.2, record_routes=True, drop=drop, force_routing=trace) as llm, recording(llm, out):
                say(llm)
                assert counters(llm)["routed"] > 0
            sets[name, raw] = read_trace(out).frame["dropped"].to_numpy()
    assert sets["own", False].any()
    assert np.array_equal(sets["own", False], sets["normalised", False])
    assert np.array_equal(sets["own", False], sets["scaled", False])
    assert np.array_equal(sets["normalised", True], sets["normalised", False]), "on a normalised gate share and weight are one"
    assert not np.array_equal(sets["own", True], sets["own", False])
    assert not np.array_equal(sets["own", True], sets["normalised", True])
    more = sets["own", True].sum() > sets["own", False].sum()
    assert more == (shape == "tiny-olmoe"), "compared raw, an unnormalised gate loses too much and a scaled one too little"
