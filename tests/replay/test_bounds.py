"""A bound is below what any schedule reads, and the schedule beside it is one that a cache can follow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay.models import budgets, fewest_cost, tables

from moetriage.errors import UsageError
from moetriage.replay import bounds
from moetriage.replay.bounds import Effort, LossyFrontier, hit_bound
from moetriage.replay.cells import ONLINE_EVICTIONS, Cell, Lossy
from moetriage.replay.comparison import compare_with_bound
from moetriage.replay.engine import run_cell, run_cells
from moetriage.types import MIB, Phase

SMALL = {"max_tokens": 5, "max_layers": 2, "max_experts": 4}


#: A bound is true however early its search stops; where there are many it is to be quick.
QUICK = Effort(first_steps=60, warm_steps=15, halvings=5)


@settings(max_examples=80)
@given(st.data())
def test_the_bound_is_never_above_the_best_of_all_schedules(data):
    table = data.draw(tables(**SMALL))
    budget = data.draw(budgets(table))
    weight = float(table.weight[table.first_cell[int((table.phase == 0).sum())] * table.shape.top_k :].astype(float).sum())
    fraction = data.draw(st.sampled_from((0.0, 0.05, 0.2, 0.5)))
    found = LossyFrontier(table, budget, effort=QUICK).at(fraction)
    best = fewest_cost(table, budget, weight_limit=fraction * weight, phases=(1,))
    assert found.bound_bytes <= best <= found.schedule_bytes
    assert found.schedule_weight_fraction <= fraction + 1e-9


@settings(max_examples=60)
@given(st.data())
def test_the_hit_bound_is_never_below_the_best_of_all_schedules(data):
    table = data.draw(tables(**SMALL))
    budget = data.draw(budgets(table))
    lookups = run_cell(table, Cell(mode="simulate", evict="lru", budget_bytes=budget)).phase("all")
    most = lookups.hits + lookups.misses - fewest_cost(table, budget, bytes_count=False)
    found = hit_bound(table, budget, QUICK)
    assert found.schedule_hits <= most <= found.bound_hits


@given(st.data())
def test_no_order_and_no_threshold_reads_less_than_the_bound(data):
    table = data.draw(tables())
    budget = data.draw(budgets(table))
    frontier = LossyFrontier(table, budget, effort=QUICK)
    cells = [Cell(mode="simulate", evict=evict, budget_bytes=budget) for evict in (*ONLINE_EVICTIONS, "belady")]
    cells += [Cell(mode="closed-loop", evict="lru", budget_bytes=budget, lossy=Lossy(threshold=value)) for value in (0.5, 1.0)]
    for outcome in run_cells(table, cells):
        assert outcome.decode.read_bytes >= frontier.at(outcome.decode.weight_dropped_fraction).bound_bytes


def test_on_the_recording_bound_and_schedule_are_close(qwen):
    frontier = LossyFrontier(qwen, 4000 * MIB)
    for fraction, gap in ((0.0, 0.02), (0.05, 0.08), (0.12, 0.05)):
        found = frontier.at(fraction)
        assert 0 <= found.gap_fraction < gap, fraction
    hits = hit_bound(qwen, 4000 * MIB)
    assert 0 <= hits.bound_hits - hits.schedule_hits < 0.002 * hits.bound_hits


def test_a_larger_loss_never_needs_more_bytes(qwen):
    frontier = LossyFrontier(qwen, 2000 * MIB)
    frontier.scan(8)
    found = [frontier.at(fraction, refine=False) for fraction in (0.0, 0.01, 0.05, 0.1, 0.5)]
    assert [one.bound_bytes for one in found] == sorted((one.bound_bytes for one in found), reverse=True)
    assert [one.schedule_bytes for one in found] == sorted((one.schedule_bytes for one in found), reverse=True)
    assert found[0].bound_bytes > 2 * found[-1].bound_bytes > 0


def test_three_quarters_stand_half_way_between_lru_and_the_bound(qwen):
    lru, belady, dropping = compare_with_bound("t", qwen, 4000 * MIB, [Lossy(threshold=0.75)])
    assert lru["possible_fraction_at_least"] == 0
    assert belady["possible_fraction_at_least"] > 0.98
    assert dropping["possible_fraction_at_least"] == pytest.approx(0.507, abs=0.005)
    assert dropping["possible_fraction_at_most"] == pytest.approx(0.511, abs=0.005)
    assert lru["hit_fraction_all"] < belady["hit_fraction_all"] <= lru["hit_fraction_all_bound"]


def test_reads_of_a_prompt_can_be_bounded_too(short_qwen):
    found = LossyFrontier(short_qwen, 4000 * MIB, Phase.PREFILL).at(0.0)
    reads = run_cell(short_qwen, Cell(mode="simulate", evict="lru", budget_bytes=4000 * MIB)).prefill.read_bytes
    assert found.bound_bytes == pytest.approx(reads, rel=1e-6)  # one batch: each of its experts is read once


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan])
def test_a_share_that_is_none_is_refused(short_qwen, fraction):
    with pytest.raises(UsageError, match="is not between 0 and 1"):
        LossyFrontier(short_qwen, 900 * MIB).at(fraction)


def test_a_trace_for_which_a_bound_would_take_hours_is_refused(short_qwen, monkeypatch):
    monkeypatch.setattr(bounds, "MAX_ROUTINGS", 1000)
    with pytest.raises(UsageError, match="would take hours; give a trace of at most 1000"):
        hit_bound(short_qwen, MIB)
