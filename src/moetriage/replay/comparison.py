"""Where the engine's policies stand between LRU and what is possible.

In: a trace, a budget, thresholds. Out: one row each, with the bytes of LRU, of the policy, of the bound and of the best schedule found.
"""

from __future__ import annotations

from collections.abc import Sequence

from moetriage.replay.bounds import LossyFrontier, hit_bound
from moetriage.replay.cells import LOSSLESS, Cell, Lossy, Outcome
from moetriage.replay.engine import run_cells
from moetriage.replay.routes import RouteTable
from moetriage.replay.rows import Row
from moetriage.types import MIB


def compare_with_bound(trace: str, table: RouteTable, budget_bytes: int, lossy: Sequence[Lossy]) -> list[Row]:
    """Return decode's reads of LRU, belady and LRU with each policy in closed loop, beside the bound at the weight that each discards.

    ``possible_fraction_at_least`` and ``_at_most``: the share that a policy has of what could be saved at its loss, measured against the
    bound and against the schedule. The row without loss also has the most hits that are possible in the whole run, and belady's.
    """
    caches = [Cell(mode="simulate", evict=evict, budget_bytes=budget_bytes) for evict in ("lru", "belady")]
    drops = [Cell(mode="closed-loop", evict="lru", budget_bytes=budget_bytes, lossy=policy) for policy in lossy]
    lru, belady, *dropping = run_cells(table, [*caches, *drops])
    frontier = LossyFrontier(table, budget_bytes)
    rows = [_row(trace, outcome, lru, frontier) for outcome in (lru, belady, *dropping)]
    hits, lookups = hit_bound(table, budget_bytes), lru.phase("all")
    return [
        row | _hits(outcome, hits.bound_hits / max(1, lookups.hits + lookups.misses))
        for row, outcome in zip(rows, (lru, belady, *dropping), strict=True)
    ]


def _row(trace: str, outcome: Outcome, lru: Outcome, frontier: LossyFrontier) -> Row:
    cell, tally, reads = outcome.cell, outcome.decode, lru.decode.read_bytes
    bound = frontier.at(tally.weight_dropped_fraction)
    saved = reads - tally.read_bytes
    return {
        "trace": trace,
        "phase": "decode",
        "cache_mb": (cell.budget_bytes or 0) / MIB,
        "evict": cell.evict,
        "policy": cell.lossy.name,
        "value": cell.lossy.value,
        "weight_dropped_fraction": tally.weight_dropped_fraction,
        "lru_read_bytes": reads,
        "read_bytes": tally.read_bytes,
        "bound_read_bytes": bound.bound_bytes,
        "schedule_read_bytes": bound.schedule_bytes,
        "gap_fraction": bound.gap_fraction,
        "possible_fraction_at_least": _share(saved, reads - bound.bound_bytes),
        "possible_fraction_at_most": _share(saved, reads - bound.schedule_bytes),
    }


def _hits(outcome: Outcome, bound: float) -> Row:
    lossless = outcome.cell.lossy == LOSSLESS
    return {"hit_fraction_all": outcome.phase("all").hit_fraction, "hit_fraction_all_bound": bound if lossless else None}


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0
