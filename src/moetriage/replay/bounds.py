"""What no cache and no lossy policy can beat on a trace: fewest bytes read with at most a given router weight discarded, most hits.

In: a ``RouteTable``, a budget. Out: a true lower bound and a schedule that a cache could really follow, so that the gap between both is
known. ``native/bound.h`` has the relaxation; here its prices are improved step by step. Any prices give a true bound: stopping early makes
it weaker, never wrong. docs/replay.md explains both in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from moetriage import _native
from moetriage.errors import UsageError
from moetriage.replay.cells import Cell, Tally
from moetriage.replay.engine import feed_planned, run_cell
from moetriage.replay.routes import RouteTable
from moetriage.types import Phase

Floats = npt.NDArray[np.float64]

#: A bound takes about 120 bytes and, per improvement of the prices, 10 ns a routing; beyond this it would take hours.
MAX_ROUTINGS = 20_000_000
#: Of the sums of doubles behind a bound, as a share of what is summed; a bound is lowered by it so that it stays true.
_ROUNDING = 1e-11


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to search: improvements of the first prices, of those for each further weight price, and halvings of its range."""

    first_steps: int = 1500
    warm_steps: int = 200
    halvings: int = 12


THOROUGH = Effort()


@dataclass(frozen=True, kw_only=True)
class LossyBound:
    """Fewest bytes read in a phase with at most ``weight_limit_fraction`` of its router weight discarded (decode's, where dropping is).

    bound_bytes: no schedule reads fewer. schedule_bytes: what one reads that was found, discarding schedule_weight_fraction.
    """

    weight_limit_fraction: float
    bound_bytes: int
    schedule_bytes: int
    schedule_weight_fraction: float

    @property
    def gap_fraction(self) -> float:
        """How far the bound may be below the optimum, as a share of the schedule's bytes."""
        return (self.schedule_bytes - self.bound_bytes) / self.schedule_bytes if self.schedule_bytes else 0.0


@dataclass(frozen=True, kw_only=True)
class HitBound:
    """Most hits over the whole trace: no schedule has more than ``bound_hits``; belady has ``schedule_hits``."""

    bound_hits: int
    schedule_hits: int


@dataclass
class _Point:
    """A price for weight, and what it was found to give: ``value`` bounds bytes + price x weight from below."""

    weight_price: float
    value: float
    relaxed_weight: float
    schedule: Tally


@dataclass
class LossyFrontier:
    """The bound as a function of the discarded weight, for one trace and budget. Points are found as they are needed, and kept.

    phase: whose bytes count. Dropping is in decode alone, and a token's top expert stays, as in the engine.
    """

    table: RouteTable
    budget_bytes: int
    phase: Phase = Phase.DECODE
    effort: Effort = THOROUGH
    _points: dict[float, _Point] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_size(self.table)
        self._problem = _problem(self.table, self.budget_bytes, int(self.phase), count_misses=False)
        self._prices, self._step = _first_prices(self._problem, cost_per_byte=1.0)
        lossless = self._at(math.inf)
        self._weight = lossless.schedule.weight

    def scan(self, n: int) -> None:
        """Find ``n`` points over the whole range, so that a curve of ``at(..., refine=False)`` is close everywhere."""
        shape = self.table.shape
        per_weight = sum(shape.expert_bytes) / len(shape.expert_bytes) * shape.top_k
        for price in (*np.geomspace(30.0, 0.1, n - 1) * per_weight, 0.0):
            self._at(float(price))

    def at(self, weight_limit_fraction: float, *, refine: bool = True) -> LossyBound:
        """Return the bound with at most this share of the router weight discarded, 0 to 1.

        refine: look for the points that suit this share best (about 2 s for a trace of 50,000 routings); else those known are used.
        """
        if not 0 <= weight_limit_fraction <= 1:
            raise UsageError(f"a share of the router weight of {weight_limit_fraction} is not between 0 and 1")
        limit = weight_limit_fraction * self._weight * (1 + _ROUNDING)
        if limit > 0 and refine:
            self._search(limit)
        points = self._points.values()
        bound = max(
            point.value - (point.weight_price * limit if limit else 0.0) for point in points if limit or point.weight_price == math.inf
        )
        fits = [point.schedule for point in points if point.schedule.weight_dropped <= limit]
        best = min(fits, key=lambda tally: tally.read_bytes)
        return LossyBound(
            weight_limit_fraction=weight_limit_fraction,
            bound_bytes=max(0, math.floor(bound)),
            schedule_bytes=best.read_bytes,
            schedule_weight_fraction=best.weight_dropped_fraction,
        )

    def _search(self, limit: float) -> None:
        """Find weight prices around the one at which the schedule discards just the limit, and the relaxed one too."""
        shape = self.table.shape
        cheapest = min(shape.expert_bytes) * shape.top_k * 1e-3
        dearest = max(shape.expert_bytes) * shape.top_k * 1e3
        for relaxed in (False, True):
            low, high = math.log(cheapest), math.log(dearest)
            for _ in range(self.effort.halvings):
                middle = (low + high) / 2
                point = self._at(math.exp(middle))
                if (point.relaxed_weight if relaxed else point.schedule.weight_dropped) <= limit:
                    high = middle
                else:
                    low = middle

    def _at(self, weight_price: float) -> _Point:
        if weight_price not in self._points:
            steps = self.effort.warm_steps if self._points else self.effort.first_steps
            value, prices = _ascend(self._problem, self._prices, self._step, weight_price, steps)
            self._prices = prices
            _, _, relaxed_weight = self._problem.evaluate(prices, weight_price)
            drop, next_use = self._problem.plan(weight_price, len(self.table.expert))
            outcome = feed_planned(self.table, self.budget_bytes, next_use=next_use, drop=drop)
            schedule = outcome.decode if self.phase is Phase.DECODE else outcome.prefill
            self._points[weight_price] = _Point(weight_price, value, relaxed_weight, schedule)
        return self._points[weight_price]


def hit_bound(table: RouteTable, budget_bytes: int, effort: Effort = THOROUGH) -> HitBound:
    """Return what bounds the hits of any cache that loads all that is routed, over both phases."""
    _check_size(table)
    problem = _problem(table, budget_bytes, 2, count_misses=True)
    prices, step = _first_prices(problem, cost_per_byte=len(table.shape.expert_bytes) / sum(table.shape.expert_bytes))
    misses, _ = _ascend(problem, prices, step, math.inf, effort.first_steps)
    tally = run_cell(table, Cell(mode="simulate", evict="belady", budget_bytes=budget_bytes)).phase("all")
    lookups = tally.hits + tally.misses
    return HitBound(bound_hits=lookups - max(0, math.ceil(misses)), schedule_hits=tally.hits)


def _check_size(table: RouteTable) -> None:
    if len(table.expert) > MAX_ROUTINGS:
        raise UsageError(f"a bound for {len(table.expert)} routings would take hours; give a trace of at most {MAX_ROUTINGS}")


def _problem(table: RouteTable, budget_bytes: int, counted: Literal[0, 1, 2] | int, *, count_misses: bool) -> Any:
    return _native.BoundProblem.make(
        table.layer,
        table.phase,
        table.first_cell,
        table.expert,
        table.weight,
        expert_bytes=list(table.shape.expert_bytes),
        n_expert=table.shape.n_expert,
        top_k=table.shape.top_k,
        budget=budget_bytes,
        counted_phase=counted,
        count_misses=count_misses,
    )


def _first_prices(problem: Any, *, cost_per_byte: float) -> tuple[Floats, float]:
    """Return the best prices that are the same after every batch, without drops, and a step to go on with.

    cost_per_byte: what a byte of an expert costs to load, on average. One price keeps what is used again within a fixed number of bytes x
    batches, like a working set: close for traces that do not drift.
    """
    n = len(problem.capacity)
    levels = np.concatenate([[0.0], np.geomspace(1e-7, 1.0, 36)]) * cost_per_byte  # from always worth keeping to never
    values = [problem.evaluate(np.full(n, level), math.inf)[0] for level in levels]
    best = int(np.argmax(values))
    return np.full(n, levels[best]), float(levels[max(best, 1)])


def _ascend(problem: Any, prices: Floats, step: float, weight_price: float, n_steps: int) -> tuple[float, Floats]:
    """Raise the bound by AdaGrad on its slope (bytes held above what there is room for, after each batch); return the best found."""
    capacity = np.asarray(problem.capacity)
    scale = capacity.mean()
    best_value, best_prices, summed = -math.inf, prices, 0.0
    current, squares = prices, np.full(len(prices), 1e-12)
    for _ in range(n_steps):
        value, held, _ = problem.evaluate(current, weight_price)
        if value > best_value:
            best_value, best_prices = value, current
            summed = float(current @ capacity)
        slope = (held - capacity) / scale
        squares += slope**2
        current = np.maximum(0.0, current + step * slope / np.sqrt(squares))
    return best_value - _ROUNDING * (abs(best_value) + 2 * summed), best_prices
