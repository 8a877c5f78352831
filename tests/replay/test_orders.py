"""Each order of eviction does what its description says; belady is the optimum."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay.models import ORDERS, Belady, budgets, fewest_cost, tables

from moetriage.replay.cells import EVICTIONS, ONLINE_EVICTIONS, Cell
from moetriage.replay.engine import run_cell, run_cells
from moetriage.types import MIB


def hits(table, evict, budget, seed=0):
    return run_cell(table, Cell(mode="simulate", evict=evict, budget_bytes=budget, seed=seed)).phase("all").hits


@pytest.mark.parametrize("evict", ORDERS)
@given(st.data())
def test_the_native_order_has_the_hits_of_a_plain_one(evict, data):
    table = data.draw(tables(max_tokens=20))
    budget = data.draw(budgets(table))
    assert hits(table, evict, budget) == ORDERS[evict](table, budget).run()


@pytest.mark.parametrize("evict", ORDERS)
def test_the_native_order_has_the_hits_of_a_plain_one_on_a_recording(short_qwen, evict):
    assert hits(short_qwen, evict, 900 * MIB) == ORDERS[evict](short_qwen, 900 * MIB).run()


@given(st.data())
def test_belady_is_the_plain_one_where_sizes_are_equal(data):
    table = data.draw(tables(one_size=True, max_tokens=20))
    budget = data.draw(budgets(table))
    assert hits(table, "belady", budget) == Belady(table, budget).run()


@settings(max_examples=60)
@given(st.data())
def test_belady_has_the_most_hits_that_any_schedule_can_have(data):
    table = data.draw(tables(one_size=True, max_tokens=5, max_layers=2, max_experts=4))
    budget = data.draw(budgets(table))
    outcome = run_cell(table, Cell(mode="simulate", evict="belady", budget_bytes=budget))
    assert outcome.phase("all").misses == fewest_cost(table, budget, bytes_count=False)


@given(st.data())
def test_belady_is_never_below_any_other_order(data):
    table = data.draw(tables())
    budget = data.draw(budgets(table))
    seed = data.draw(st.integers(0, 99))
    best = hits(table, "belady", budget, seed)
    for evict in ONLINE_EVICTIONS:
        assert hits(table, evict, budget, seed) <= best, evict


def test_belady_is_never_below_any_other_order_on_the_recording(qwen):
    for budget in (200, 785, 1500, 4000, 9000):
        found = run_cells(qwen, [Cell(mode="simulate", evict=evict, budget_bytes=budget * MIB) for evict in EVICTIONS])
        assert max(outcome.phase("all").hits for outcome in found) == found[-1].phase("all").hits


#: Hits of the whole recording (39,526 lookups) at these budgets in MiB.
BUDGETS = (600, 785, 2000, 4000, 8000)
PINNED = {
    "lru": (0, 13881, 20843, 29597, 35372),
    "lfu": (0, 4825, 16143, 27354, 35374),
    "lfuda": (0, 3266, 22274, 30340, 35374),
    "s3fifo": (9884, 12240, 21530, 30214, 35243),
    "partition": (9896, 13889, 21669, 29312, 35184),
    "random": (5097, 7309, 18273, 27246, 34477),
    "belady": (18330, 20877, 29283, 34194, 35793),
}


@pytest.mark.parametrize("evict", EVICTIONS)
def test_hits_on_the_recording_are_pinned(qwen, evict):
    found = run_cells(qwen, [Cell(mode="simulate", evict=evict, budget_bytes=budget * MIB, seed=7) for budget in BUDGETS])
    assert tuple(outcome.phase("all").hits for outcome in found) == PINNED[evict]
