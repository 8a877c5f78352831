"""Advice is the best of what was replayed, with the formula that says so."""

from __future__ import annotations

import math

import pytest

from moetriage.errors import BudgetError, UsageError
from moetriage.replay.advice import Machine, advise
from moetriage.types import MIB


def test_a_slow_disk_is_the_floor_and_dropping_helps(qwen):
    advice = advise(qwen, Machine(memory_mb=5000, disk_mb_s=500, compute_ms=50))
    assert advice.lossless.floor == "disk"
    assert advice.best.threshold == 0.75
    assert advice.best.weight_dropped_fraction <= 0.05
    assert advice.best.expected_seconds < advice.lossless.expected_seconds
    assert advice.best.expected_seconds == pytest.approx(0.05 + advice.best.outcome.decode.read_bytes / 128 / 500e6)
    assert advice.best.floor_seconds == max(advice.best.compute_seconds, advice.best.read_seconds)
    assert "sum(0.0500 s compute" in advice.best.formula()
    assert advice.best.formula().endswith(f"the floor is the {advice.best.floor}")


def test_where_compute_is_all_nothing_is_dropped_and_memory_is_spared(qwen):
    advice = advise(qwen, Machine(memory_mb=16000, disk_mb_s=1e6, compute_ms=500))
    assert advice.best.threshold is None
    assert advice.best.floor == "compute"
    assert advice.best.budget_bytes < 2000 * MIB


def test_no_loss_allowed_means_no_loss(qwen):
    advice = advise(qwen, Machine(memory_mb=4000, disk_mb_s=100, compute_ms=10), max_weight_dropped=0.0)
    assert advice.best == advice.lossless
    assert advice.best.threshold is None


def test_more_loss_allowed_is_never_slower(qwen):
    machine = Machine(memory_mb=3000, disk_mb_s=300, compute_ms=30)
    seconds = [advise(qwen, machine, max_weight_dropped=loss).best.expected_seconds for loss in (0.0, 0.05, 0.2, 1.0)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1]


def test_a_cache_below_the_working_set_is_said(qwen):
    advice = advise(qwen, Machine(memory_mb=700, disk_mb_s=1000, compute_ms=50))
    assert "below one token's working set T of 785 MiB" in advice.notes[0]


def test_dense_weights_come_off_the_memory(qwen):
    advice = advise(qwen, Machine(memory_mb=2000, disk_mb_s=1000, compute_ms=50))
    assert advice.cache_ceiling_bytes == 2000 * MIB - qwen.shape.dense_bytes
    assert qwen.shape.dense_bytes > 500 * MIB
    with pytest.raises(BudgetError, match="the dense weights take 541 MiB, which leaves none for a cache"):
        advise(qwen, Machine(memory_mb=500, disk_mb_s=1000, compute_ms=50))


@pytest.mark.parametrize("name", ["memory_mb", "disk_mb_s", "compute_ms"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_figures_that_no_machine_has_are_refused(qwen, name, value):
    figures = {"memory_mb": 5000.0, "disk_mb_s": 1000.0, "compute_ms": 50.0} | {name: value}
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
        advise(qwen, Machine(**figures))
