"""Outcomes as rows: the objects of ``--json``, the columns of a sweep's Parquet, the cells of a table.

In: ``Outcome``s. Out: dictionaries of plain values under the keys that docs/replay.md defines. Knows no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moetriage.replay.cells import Outcome
from moetriage.types import MIB

PHASES = ("prefill", "decode", "all")

Value = str | int | float | bool | None
Row = dict[str, Value]


def rows_of(trace: str, outcomes: Iterable[Outcome], *, truncated: bool = False, phases: Sequence[str] = PHASES) -> list[Row]:
    """Return one row for each outcome and each phase that has tokens."""
    return [_row(trace, outcome, phase, truncated=truncated) for outcome in outcomes for phase in phases if outcome.phase(phase).tokens]


def _row(trace: str, outcome: Outcome, phase: str, *, truncated: bool) -> Row:
    cell, tally = outcome.cell, outcome.phase(phase)
    budget = cell.budget_bytes
    return {
        "trace": trace,
        "phase": phase,
        "mode": cell.mode,
        "policy": cell.lossy.name,
        "value": cell.lossy.value,
        "evict": cell.evict,
        "cache_mb": None if budget is None else budget // MIB if budget % MIB == 0 else budget / MIB,
        "reads_avoided_fraction": outcome.reads_avoided_fraction(phase),
        "weight_dropped_fraction": tally.weight_dropped_fraction,
        "dropped_fraction": tally.dropped_fraction,
        "hit_fraction": tally.hit_fraction,
        "read_bytes_per_token": tally.read_bytes_per_token,
        "experts_per_routing": tally.experts_per_routing,
        "prefetch": cell.prefetch,
        "drop_in_prefill": cell.lossy.in_prefill,
        "drop_raw_weight": cell.lossy.raw_weight,
        "seed": cell.seed,
        "tokens": tally.tokens,
        "routed": tally.routed,
        "dropped": tally.dropped,
        "hits": tally.hits,
        "misses": tally.misses,
        "skipped": tally.skipped,
        "read_bytes": tally.read_bytes,
        "prefetched": tally.ahead,
        "prefetch_hits": tally.ahead_hits,
        "truncated": truncated,
    }
