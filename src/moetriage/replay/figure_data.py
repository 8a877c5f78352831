"""The numbers behind the pictures of a replay.

In: a trace, a budget. Out: curves and per-layer figures as arrays. ``plots`` draws them; nothing here knows how.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetriage.errors import UsageError
from moetriage.replay.bounds import MAX_ROUTINGS, LossyFrontier
from moetriage.replay.cells import EVICTIONS, Cell, Lossy, Mode, Outcome
from moetriage.replay.engine import run_cells
from moetriage.replay.routes import RouteShape, RouteTable
from moetriage.types import MIB

Floats = npt.NDArray[np.float64]

THRESHOLDS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0)
_BOUND_POINTS = 20
_CURVE_POINTS = 80


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Shares of weight discarded (x) and of reads avoided (y), 0 to 1, with the setting of each point (F or K; none for bounds)."""

    name: str
    weight_dropped: Floats
    reads_avoided: Floats
    values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FigureData:
    """What is drawn. Hit fractions are decode's; per-layer arrays have a row for each MoE layer.

    budgets_mib [N]; hit_fraction: order -> [N]. hit_of_layer, dropped_of_layer [L] at the budget and threshold that the others are for.
    popularity: [L, E], share of a layer's decode routings, each row sorted downwards.
    """

    model: str
    shape: RouteShape
    budget_bytes: int
    threshold: float
    budgets_mib: Floats
    hit_fraction: dict[str, Floats]
    curves: tuple[Curve, ...]
    hit_of_layer: Floats
    dropped_of_layer: Floats
    popularity: Floats


def figure_data(table: RouteTable, *, model: str, budget_bytes: int, threshold: float = 0.75) -> FigureData:
    """Replay what the pictures show: ``budget_bytes`` for all but the first, ``threshold`` for the per-layer drops.

    Raises UsageError for a trace without decode, a budget of 0, or a trace too long for bounds.
    """
    if not (table.phase == 1).any():
        raise UsageError("the trace has no decoded token; the pictures are about decoding")
    if len(table.expert) > MAX_ROUTINGS:
        raise UsageError(f"pictures hold a bound, and for {len(table.expert)} routings that takes hours; give at most {MAX_ROUTINGS}")
    budgets = _budgets(table.shape)
    simulated = run_cells(table, [Cell(mode="simulate", evict=evict, budget_bytes=budget) for evict in EVICTIONS for budget in budgets])
    hits = np.array([outcome.decode.hit_fraction for outcome in simulated]).reshape(len(EVICTIONS), -1)
    drops = Cell(mode="closed-loop", evict="lru", budget_bytes=budget_bytes, lossy=Lossy(threshold=threshold))
    lossless, dropping = run_cells(table, [Cell(mode="simulate", evict="lru", budget_bytes=budget_bytes), drops])
    routed, popularity = _popularity(table)
    policies = _policy_curves(table, budget_bytes)
    return FigureData(
        model=model,
        shape=table.shape,
        budget_bytes=budget_bytes,
        threshold=threshold,
        budgets_mib=np.array(budgets) / MIB,
        hit_fraction=dict(zip(EVICTIONS, hits, strict=True)),
        curves=(*policies, *_bound_curves(table, budget_bytes, lossless, most=2 * float(policies[0].weight_dropped.max()))),
        hit_of_layer=np.array(lossless.layer_hits) / routed,
        dropped_of_layer=np.array(dropping.layer_dropped) / routed,
        popularity=popularity,
    )


def _budgets(shape: RouteShape) -> list[int]:
    """Return budgets from half of T to all experts, close together where the cliff is."""
    t, cliff, total = shape.working_set_bytes, shape.cliff_bytes, shape.total_bytes
    below = list(np.geomspace(0.5 * cliff, cliff - 1, 4)) if cliff > 2 else []
    around = [*below, *np.linspace(cliff, t, 6), *np.geomspace(t, total, 24)]
    return sorted({max(1, int(value)) for value in around})


def _policy_curves(table: RouteTable, budget_bytes: int) -> list[Curve]:
    drop = [Lossy(threshold=value) for value in THRESHOLDS]
    narrow = [Lossy(n_expert_used=k) for k in range(table.shape.top_k - 1, 0, -1)]
    asked: list[tuple[str, Mode, list[Lossy]]] = [
        ("drop cold experts", "closed-loop", drop),
        ("drop cold experts, static view", "simulate", drop),
        ("use fewer experts", "closed-loop", narrow),
    ]
    return [
        _curve(name, table, [Cell(mode=mode, evict="lru", budget_bytes=budget_bytes, lossy=lossy) for lossy in policies])
        for name, mode, policies in asked
        if policies
    ]


def _curve(name: str, table: RouteTable, cells: list[Cell]) -> Curve:
    outcomes = run_cells(table, [cells[0].baseline, *cells])  # every curve begins where nothing is dropped
    return Curve(
        name=name,
        weight_dropped=np.array([outcome.decode.weight_dropped_fraction for outcome in outcomes]),
        reads_avoided=np.array([outcome.reads_avoided_fraction("decode") for outcome in outcomes]),
        values=tuple(float(outcome.cell.lossy.value or 0) for outcome in outcomes),
    )


def _bound_curves(table: RouteTable, budget_bytes: int, lossless: Outcome, *, most: float) -> list[Curve]:
    frontier = LossyFrontier(table, budget_bytes)
    frontier.scan(_BOUND_POINTS)
    weights = np.linspace(0.0, min(1.0, max(0.05, most)), _CURVE_POINTS)
    bounds = [frontier.at(float(weight), refine=False) for weight in weights]
    reads = max(1, lossless.decode.read_bytes)
    return [
        Curve(name="bound", weight_dropped=weights, reads_avoided=np.array([1 - bound.bound_bytes / reads for bound in bounds])),
        Curve(
            name="best schedule found",
            weight_dropped=np.array([bound.schedule_weight_fraction for bound in bounds]),
            reads_avoided=np.array([1 - bound.schedule_bytes / reads for bound in bounds]),
        ),
    ]


def _popularity(table: RouteTable) -> tuple[Floats, Floats]:
    """Return decode's routings of each layer [L] and how they fall on its experts [L, E], most popular first."""
    shape = table.shape
    layer = np.repeat(table.layer, np.diff(table.first_cell) * shape.top_k)
    decode = np.repeat(table.phase == 1, np.diff(table.first_cell) * shape.top_k)
    counts = np.zeros((len(shape.layers), shape.n_expert))
    np.add.at(counts, (layer[decode], table.expert[decode]), 1)
    routed = np.maximum(counts.sum(axis=1), 1)
    return routed, -np.sort(-counts / routed[:, None], axis=1)
