"""Every replay accounts for itself, whatever the trace, the cache and the policy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay.models import budgets, distinct_batches, needed_bytes, tables

from moetriage.errors import AccountingError
from moetriage.replay.cells import EVICTIONS, MODES, Cell, Lossy, Outcome, Tally
from moetriage.replay.engine import mark_routings, run_cell, run_cells
from moetriage.replay.routes import RouteTable
from moetriage.types import MIB


@st.composite
def cells_of(draw, table):
    mode = draw(st.sampled_from(MODES))
    lossy = draw(
        st.one_of(
            st.just(Lossy()),
            st.builds(Lossy, threshold=st.floats(0.05, 1.0), in_prefill=st.booleans(), raw_weight=st.booleans()),
            st.builds(Lossy, n_expert_used=st.integers(1, table.shape.top_k)),
        )
    )
    if mode == "recorded":
        return Cell(mode=mode, lossy=lossy)
    evict = draw(st.sampled_from(EVICTIONS))
    prefetch = 0 if evict == "belady" else draw(st.integers(0, 2))
    return Cell(mode=mode, lossy=lossy, evict=evict, budget_bytes=draw(budgets(table)), prefetch=prefetch, seed=draw(st.integers(0, 9)))


@given(st.data())
def test_hits_misses_and_drops_are_the_routings_and_bytes_are_the_misses(data):
    table = data.draw(tables())
    cell = data.draw(cells_of(table))
    outcome = run_cell(table, cell)  # checks itself too
    marks = mark_routings(table, cell)
    phase = np.repeat(table.phase, np.diff(table.first_cell) * table.shape.top_k)
    for name, number in (("prefill", 0), ("decode", 1)):
        tally = outcome.phase(name)
        distinct = sum(len(slots) for slots, p in zip(distinct_batches(table), table.phase, strict=True) if p == number)
        assert tally.hits + tally.misses + tally.skipped == distinct
        assert tally.dropped == marks["dropped"][phase == number].sum()
        assert tally.routed == (phase == number).sum()
        reads = marks["expert_bytes"][phase == number]
        assert tally.misses == (reads > 0).sum()
        assert tally.read_bytes == reads.sum() + tally.ahead_bytes
        assert tally.weight == pytest.approx(table.weight[phase == number].astype(float).sum())
        assert 0 <= outcome.reads_avoided_fraction(name) <= 1 or cell.prefetch or cell.mode == "closed-loop"
    decode = outcome.decode
    assert decode.hits + decode.misses + decode.dropped == decode.routed


@given(st.data())
def test_a_cache_never_holds_more_than_its_budget_or_one_batch(data):
    table = data.draw(tables())
    budget = data.draw(budgets(table))
    largest = max(needed_bytes(table, slots) for slots in distinct_batches(table))
    for evict in EVICTIONS:
        outcome = run_cell(table, Cell(mode="simulate", evict=evict, budget_bytes=budget))
        assert outcome.peak_bytes <= max(budget, largest)


@given(st.data())
def test_a_trace_in_pieces_gives_what_it_gives_as_a_whole(data):
    table = data.draw(tables())
    cells = [
        Cell(mode="closed-loop", evict=e, budget_bytes=data.draw(budgets(table)), lossy=Lossy(threshold=0.8)) for e in ("lru", "s3fifo")
    ]
    cut = data.draw(st.integers(1, len(table.layer)))

    class Pieces:
        shape = table.shape

        def tables(self):
            for begin, end in ((0, cut), (cut, len(table.layer))):
                if begin < end:
                    yield _part(table, begin, end)

        def load(self):
            raise AssertionError("an online order does not need the whole trace")

    assert run_cells(Pieces(), cells) == run_cells(table, cells)


def _part(table: RouteTable, begin: int, end: int) -> RouteTable:
    first, last = (int(table.first_cell[at]) * table.shape.top_k for at in (begin, end))
    return dataclasses.replace(
        table,
        layer=table.layer[begin:end],
        phase=table.phase[begin:end],
        first_cell=table.first_cell[begin : end + 1] - table.first_cell[begin],
        **{name: getattr(table, name)[first:last] for name in ("expert", "weight", "resident")},
    )


@pytest.mark.parametrize("evict", EVICTIONS)
def test_with_room_for_all_each_expert_is_read_once(qwen, evict):
    outcome = run_cell(qwen, Cell(mode="simulate", evict=evict, budget_bytes=qwen.shape.total_bytes))
    assert outcome.phase("all").misses == len({slot for slots in distinct_batches(qwen) for slot in slots})
    # A layer's own share holds all its experts only if it is not rounded down below them.
    assert outcome.evictions == 0


def test_reading_ahead_farther_than_there_are_layers_is_reading_ahead_all_of_them(qwen):
    near, far = (
        run_cell(qwen, Cell(mode="simulate", evict="lru", budget_bytes=4000 * MIB, prefetch=n))
        for n in (len(qwen.shape.expert_bytes), 10**11)
    )
    assert (near.prefill, near.decode) == (far.prefill, far.decode)


def test_the_random_order_is_repeatable_by_its_seed(qwen):
    cells = [Cell(mode="simulate", evict="random", budget_bytes=2000 * MIB, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (run_cells(qwen, [cell])[0].phase("all").hits for cell in cells)
    assert first == again != other


def test_counts_that_contradict_each_other_are_an_error():
    wrong = Outcome(cell=Cell(mode="recorded"), prefill=Tally(), decode=Tally(tokens=1, cells=1, routed=2, hits=1, misses=0))
    with pytest.raises(AccountingError, match="are 1, not the 2 routings"):
        wrong.check()
