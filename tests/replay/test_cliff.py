"""Below one token's working set LRU finds nothing: where exactly, under the engine's batches and under single lookups."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay.models import constant_routing, tables

from moetriage.replay.cells import Cell
from moetriage.replay.engine import run_cell
from moetriage.replay.routes import RouteTable


def decode_hits(table: RouteTable, budget: int) -> int:
    return run_cell(table, Cell(mode="simulate", evict="lru", budget_bytes=budget)).decode.hits


def one_lookup_a_batch(table: RouteTable) -> RouteTable:
    """Return the same lookups, each as a batch of its own: plain LRU as textbooks have it."""
    n = len(table.expert)
    return dataclasses.replace(
        table,
        shape=dataclasses.replace(table.shape, top_k=1),
        layer=np.repeat(table.layer, np.diff(table.first_cell) * table.shape.top_k),
        phase=np.repeat(table.phase, np.diff(table.first_cell) * table.shape.top_k),
        first_cell=np.arange(n + 1, dtype=np.int64),
    )


def decode_only(table: RouteTable) -> RouteTable:
    begin = int(np.argmax(table.phase == 1))
    first = int(table.first_cell[begin]) * table.shape.top_k
    return dataclasses.replace(
        table,
        layer=table.layer[begin:],
        phase=table.phase[begin:],
        first_cell=table.first_cell[begin:] - table.first_cell[begin],
        **{name: getattr(table, name)[first:] for name in ("expert", "weight", "resident")},
    )


@pytest.mark.parametrize(("top_k", "sizes"), [(2, (10, 10, 10)), (4, (7, 7)), (3, (5, 9, 4, 9)), (1, (3, 8))])
def test_plain_lru_finds_nothing_just_under_t_and_everything_at_t(top_k, sizes):
    """A cycle that is one byte too long for the cache: each expert went just before it is needed."""
    table = one_lookup_a_batch(constant_routing(6, top_k=top_k, expert_bytes=sizes))
    t = top_k * sum(sizes)
    assert decode_hits(table, t - 1) == 0
    assert decode_hits(table, t) == 5 * top_k * len(sizes)


@pytest.mark.parametrize(("top_k", "sizes"), [(2, (10, 10, 10)), (4, (7, 7)), (3, (9, 9, 9, 9)), (1, (8, 8))])
def test_in_batches_lru_finds_nothing_just_under_the_cliff(top_k, sizes):
    """A batch is looked up before room is made for it, so the last of a layer's experts may still be there between the cliff and T."""
    table = constant_routing(6, top_k=top_k, expert_bytes=sizes)
    t, cliff = table.shape.working_set_bytes, table.shape.cliff_bytes
    assert cliff == t - (top_k - 1) * max(sizes)
    assert decode_hits(table, cliff - 1) == 0
    assert decode_hits(table, t) == 5 * top_k * len(sizes)
    # From the cliff on one expert more of each batch survives for each expert's size.
    for spared in range(1, top_k + 1):
        assert decode_hits(table, cliff + (spared - 1) * max(sizes)) == 5 * spared * len(sizes)


@given(st.data())
def test_no_decoding_hits_below_the_cliff_whatever_is_routed(data):
    table = data.draw(tables(prefill=False))
    assert decode_hits(table, table.shape.cliff_bytes - 1) == 0


def test_the_recording_has_a_cliff_there_too(qwen):
    cliff, t = qwen.shape.cliff_bytes, qwen.shape.working_set_bytes
    assert decode_hits(qwen, cliff - 1) == 0
    assert 0 < decode_hits(qwen, cliff) < decode_hits(qwen, t - 1) < decode_hits(qwen, t)
    # Tokens do not use their common experts in one order, so single lookups find some of them below T as well.
    assert decode_hits(one_lookup_a_batch(decode_only(qwen)), cliff - 1) == 0
