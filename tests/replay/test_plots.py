"""Pictures hold what they should show, and are drawn."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from moetriage.errors import UsageError
from moetriage.replay import figure_data as figure_module
from moetriage.replay.cells import EVICTIONS
from moetriage.replay.figure_data import figure_data
from moetriage.replay.plots import check_path, draw
from moetriage.types import MIB


@pytest.fixture(scope="module")
def data(qwen):
    return figure_data(qwen, model="/models/Qwen3-30B-A3B-Q4_K_M.gguf", budget_bytes=4000 * MIB)


def test_curves_hold_both_policies_and_the_bound(data):
    curves = {curve.name: curve for curve in data.curves}
    assert set(curves) == {"drop cold experts", "drop cold experts, static view", "use fewer experts", "bound", "best schedule found"}
    bound, found = curves["bound"], curves["best schedule found"]
    assert (np.diff(bound.reads_avoided) >= 0).all()
    assert (bound.reads_avoided >= found.reads_avoided).all()
    for name in ("drop cold experts", "use fewer experts"):
        curve = curves[name]
        assert curve.weight_dropped[0] == curve.reads_avoided[0] == 0
        inside = curve.weight_dropped <= bound.weight_dropped[-1]
        at = np.searchsorted(bound.weight_dropped, curve.weight_dropped[inside])
        assert (bound.reads_avoided[np.minimum(at, len(bound.reads_avoided) - 1)] >= curve.reads_avoided[inside]).all()


def test_hits_are_there_for_every_order_on_both_sides_of_the_cliff(data):
    assert set(data.hit_fraction) == set(EVICTIONS)
    below = data.budgets_mib * MIB < data.shape.cliff_bytes
    assert 0 < below.sum() < len(below)
    assert (data.hit_fraction["lru"][below] == 0).all()
    assert (data.hit_fraction["belady"] >= np.max([data.hit_fraction[name] for name in EVICTIONS], axis=0) - 1e-3).all()


def test_layers_account_for_all_routings(data):
    assert data.popularity.shape == (48, 128)
    assert data.popularity.sum(axis=1) == pytest.approx(1)
    assert data.hit_of_layer.mean() == pytest.approx(0.8029, abs=1e-4)
    assert 0 < data.dropped_of_layer.mean() < 0.2


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_each_format_is_drawn(data, tmp_path, suffix, magic):
    path = tmp_path / f"replay{suffix}"
    check_path(path)
    draw(data, path)
    content = path.read_bytes()
    assert content.startswith(magic)
    assert len(content) > 20_000


def test_a_narrow_model_can_be_drawn(tmp_path, monkeypatch):
    """Top-1 of 2 experts in one layer: no narrower routing exists, and the cliff is at nothing."""
    from replay.models import constant_routing

    monkeypatch.setattr(figure_module, "_BOUND_POINTS", 3)
    table = constant_routing(4, top_k=1, expert_bytes=(MIB,), n_expert=2)
    draw(figure_data(table, model="", budget_bytes=MIB), tmp_path / "narrow.png")
    assert (tmp_path / "narrow.png").stat().st_size > 20_000


def test_bad_targets_are_refused_before_anything_is_replayed(tmp_path, monkeypatch, data):
    with pytest.raises(UsageError, match=r"must end in one of \.svg, \.png, \.pdf"):
        check_path(tmp_path / "replay.gif")
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        draw(data, tmp_path / "no" / "replay.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'moetriage\[plot\]'"):
        check_path(tmp_path / "replay.svg")
