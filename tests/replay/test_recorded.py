"""The figures that were published with the recording come out to the digit, and what holds for any of them holds."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay.models import tables

from moetriage.replay.cells import Cell, Lossy
from moetriage.replay.engine import run_cell, run_cells
from moetriage.types import MIB


@pytest.mark.parametrize(
    ("lossy", "avoided", "discarded"),
    [
        (Lossy(threshold=1.0), "66.1", "9.46"),
        (Lossy(threshold=0.75), "36.8", "4.44"),
        (Lossy(threshold=0.5), "5.84", "0.49"),
        (Lossy(n_expert_used=5), "23.2", "10.6"),
        (Lossy(n_expert_used=3), "58.8", "36.8"),
    ],
)
def test_recorded_residency_gives_the_published_table(qwen, lossy, avoided, discarded):
    outcome = run_cell(qwen, Cell(mode="recorded", lossy=lossy))
    digits = len(avoided.partition(".")[2])
    assert f"{100 * outcome.reads_avoided_fraction('decode'):.{digits}f}" == avoided
    digits = len(discarded.partition(".")[2])
    assert f"{100 * outcome.decode.weight_dropped_fraction:.{digits}f}" == discarded


def test_lru_of_the_recordings_budget_gives_the_recorded_hits(qwen):
    outcome = run_cell(qwen, Cell(mode="simulate", evict="lru", budget_bytes=4000 * MIB))
    assert f"{100 * outcome.phase('all').hit_fraction:.1f} {100 * outcome.decode.hit_fraction:.1f}" == "74.9 80.3"
    recorded = run_cell(qwen, Cell(mode="recorded"))
    assert f"{100 * recorded.phase('all').hit_fraction:.1f} {100 * recorded.decode.hit_fraction:.1f}" == "74.9 80.3"


def test_the_static_view_misses_what_closing_the_loop_finds(qwen):
    """Dropped experts do not push others out, so the next tokens find more and read less."""
    lossy = Lossy(threshold=0.75)
    static, closed = run_cells(
        qwen, [Cell(mode=mode, evict="lru", budget_bytes=4000 * MIB, lossy=lossy) for mode in ("simulate", "closed-loop")]
    )
    assert static.reads_avoided_fraction("decode") == pytest.approx(0.3682, abs=5e-5)
    assert closed.reads_avoided_fraction("decode") == pytest.approx(0.4504, abs=5e-5)


@st.composite
def recorded_tables(draw):
    table = draw(tables())
    resident = draw(st.lists(st.booleans(), min_size=len(table.expert), max_size=len(table.expert)))
    # One residency for each distinct expert of a batch, as a cache has.
    batch = table.batch_of_routing
    first = {}
    values = [first.setdefault((int(b), int(e)), r) for b, e, r in zip(batch, table.expert, resident, strict=True)]
    return dataclasses.replace(table, resident=np.array(values, np.uint8))


@given(recorded_tables(), st.booleans(), st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5))
def test_a_higher_threshold_avoids_and_discards_at_least_as_much(table, in_prefill, thresholds):
    cells = [Cell(mode="recorded", lossy=Lossy(threshold=value, in_prefill=in_prefill)) for value in sorted(thresholds)]
    outcomes = run_cells(table, cells)
    for less, more in itertools.pairwise(outcomes):
        for phase in ("prefill", "decode"):
            assert less.reads_avoided_fraction(phase) <= more.reads_avoided_fraction(phase)
            assert less.phase(phase).weight_dropped <= more.phase(phase).weight_dropped
            assert less.phase(phase).dropped <= more.phase(phase).dropped


@given(recorded_tables())
def test_fewer_experts_avoid_and_discard_at_least_as_much(table):
    outcomes = run_cells(table, [Cell(mode="recorded", lossy=Lossy(n_expert_used=k)) for k in range(table.shape.top_k, 0, -1)])
    assert outcomes[0].phase("all").dropped == 0
    for less, more in itertools.pairwise(outcomes):
        assert less.reads_avoided_fraction("all") <= more.reads_avoided_fraction("all")
        assert less.phase("all").weight_dropped < more.phase("all").weight_dropped
