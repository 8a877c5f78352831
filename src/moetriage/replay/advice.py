"""What to set: the cache, the drop threshold and the time a token should take, from memory, disk and compute as measured.

In: a trace and three figures of a machine. Out: ``Advice`` with the formula behind it. An estimate: docs/replay.md says how
far replays were off where they were checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from moetriage.errors import BudgetError, UsageError
from moetriage.replay.cells import Cell, Lossy, Outcome
from moetriage.replay.engine import run_cells
from moetriage.replay.routes import Routes
from moetriage.types import MIB

THRESHOLDS = (None, 0.25, 0.5, 0.75, 1.0)
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
#: Settings that differ by less than this are equally fast: then the one that loses less, and then the one that needs less, is better.
_SAME_SPEED = 0.02


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a machine gives.

    memory_mb: MiB for weights, the dense ones included. disk_mb_s: random reads in 10^6 bytes a second. compute_ms: a token without reads.
    """

    memory_mb: float
    disk_mb_s: float
    compute_ms: float

    def validate(self) -> None:
        """Raise UsageError for a figure that no machine has."""
        for flag, value, least in (
            ("--memory-mb", self.memory_mb, "above 0"),
            ("--disk-mb-s", self.disk_mb_s, "above 0"),
            ("--compute-ms", self.compute_ms, "at least 0"),
        ):
            if not math.isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
                raise UsageError(f"{flag} {value}: must be {least}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run: read and compute seconds a token, as if nothing overlapped (expected) and as if all did (floor)."""

    outcome: Outcome
    compute_seconds: float
    read_seconds: float

    @property
    def expected_seconds(self) -> float:
        return self.compute_seconds + self.read_seconds

    @property
    def floor_seconds(self) -> float:
        return max(self.compute_seconds, self.read_seconds)

    @property
    def floor(self) -> str:
        """What sets the floor."""
        return "compute" if self.compute_seconds >= self.read_seconds else "disk"

    @property
    def threshold(self) -> float | None:
        return self.outcome.cell.lossy.threshold

    @property
    def budget_bytes(self) -> int:
        return self.outcome.cell.budget_bytes or 0

    @property
    def weight_dropped_fraction(self) -> float:
        return self.outcome.decode.weight_dropped_fraction

    def formula(self) -> str:
        """Return the sum and the maximum with their figures."""
        parts = f"{self.compute_seconds:.4f} s compute, {self.read_seconds:.4f} s reads"
        return (
            f"sum({parts}) = {self.expected_seconds:.4f} s a token if nothing overlaps; "
            f"max({parts}) = {self.floor_seconds:.4f} s if all does: the floor is the {self.floor}"
        )


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The setting to take, the lossless one beside it, one for each threshold at the largest budget, and what was taken off the memory."""

    best: Setting
    lossless: Setting
    by_threshold: tuple[Setting, ...]
    cache_ceiling_bytes: int
    dense_bytes: int
    max_weight_dropped: float
    notes: tuple[str, ...]


def advise(routes: Routes, machine: Machine, *, max_weight_dropped: float = 0.05) -> Advice:
    """Return what to set so that a token takes least time with at most this share of the router weight discarded.

    Raises UsageError for figures out of range or a trace without decode, BudgetError where the dense weights alone fill the memory.
    """
    machine.validate()
    if not 0 <= max_weight_dropped <= 1:
        raise UsageError(f"--max-weight-dropped {max_weight_dropped}: must be between 0 and 1")
    shape = routes.shape
    ceiling = min(int(machine.memory_mb * MIB) - shape.dense_bytes, shape.total_bytes)
    if ceiling < MIB:
        raise BudgetError(
            f"--memory-mb {machine.memory_mb:g}: the dense weights take {shape.dense_bytes / MIB:.0f} MiB, which leaves none for a cache",
            budget_bytes=int(machine.memory_mb * MIB),
            limit_bytes=shape.dense_bytes,
        )
    settings = [_setting(outcome, machine) for outcome in run_cells(routes, list(_cells(ceiling)))]
    if not settings[0].outcome.decode.tokens:
        raise UsageError("the trace has no decoded token; advice is about decoding")
    largest = tuple(setting for setting in settings if setting.budget_bytes == _whole_mib(ceiling))
    best = _choose([setting for setting in settings if setting.weight_dropped_fraction <= max_weight_dropped])
    return Advice(
        best=best,
        lossless=_choose([setting for setting in settings if setting.threshold is None]),
        by_threshold=largest,
        cache_ceiling_bytes=ceiling,
        dense_bytes=shape.dense_bytes,
        max_weight_dropped=max_weight_dropped,
        notes=tuple(_notes(best, shape.working_set_bytes, shape.top_k)),
    )


def _cells(ceiling: int) -> Iterator[Cell]:
    budgets = dict.fromkeys(_whole_mib(int(share * ceiling)) for share in _SHARES)
    for budget in budgets:
        for threshold in THRESHOLDS:
            if budget:
                yield Cell(mode="closed-loop", evict="lru", budget_bytes=budget, lossy=Lossy(threshold=threshold))


def _whole_mib(nbytes: int) -> int:
    return nbytes // MIB * MIB


def _setting(outcome: Outcome, machine: Machine) -> Setting:
    read_seconds = outcome.decode.read_bytes_per_token / (machine.disk_mb_s * 1e6)
    return Setting(outcome=outcome, compute_seconds=machine.compute_ms * 1e-3, read_seconds=read_seconds)


def _choose(settings: list[Setting]) -> Setting:
    fastest = min(setting.expected_seconds for setting in settings)
    good = [setting for setting in settings if setting.expected_seconds <= fastest * (1 + _SAME_SPEED)]
    return min(good, key=lambda setting: (setting.threshold or 0.0, setting.budget_bytes))


def _notes(best: Setting, working_set_bytes: int, top_k: int) -> Iterator[str]:
    if best.budget_bytes < working_set_bytes:
        yield f"the cache is below one token's working set T of {working_set_bytes / MIB:.0f} MiB: hardly any read is saved"
    if best.threshold is not None and top_k <= 4:
        yield f"a threshold at top-k {top_k} discards more of a routing than at the top-k 8 it was measured on: check the output"
