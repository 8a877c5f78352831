"""Run cells over a trace: drives the native replay, which drives the engine's own cache and drop policy.

In: ``Routes`` and ``Cell``s. Out: one ``Outcome`` a cell, or the marks of every routing. All cells that do not need the future see the
trace in one pass and bounded memory; belady needs all of it at once (13 bytes a routing).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from moetriage import _native
from moetriage.replay.cells import ONLINE_EVICTIONS, Cell, Outcome, Tally
from moetriage.replay.routes import Routes, RouteShape, RouteTable

#: Schedules that belady chooses from. With experts of one size the first is optimal; with several no fast rule is (the problem is NP-hard),
#: and knowing what comes includes knowing which of the others will do best.
_SCHEDULES = ("belady", "belady-bytes", *ONLINE_EVICTIONS)


def run_cells(routes: Routes, cells: Sequence[Cell]) -> list[Outcome]:
    """Replay each cell, and what it is held against.

    Raises UsageError for a cell that does not fit the trace, TraceError for a trace that cannot be read.
    """
    for cell in cells:
        cell.validate(routes.shape)
    wanted = list(dict.fromkeys(found for cell in cells for found in (cell, cell.baseline)))
    if any(cell.evict == "belady" for cell in wanted):
        routes = routes.load()
    online = _replay_online(routes, [cell for cell in wanted if cell.evict != "belady"])
    offline = {cell: _replay_belady(routes.load(), cell) for cell in wanted if cell.evict == "belady"}
    found = online | offline
    for outcome in found.values():
        outcome.check()
    return [found[cell] if cell == cell.baseline else dataclasses.replace(found[cell], baseline=found[cell.baseline]) for cell in cells]


def run_cell(routes: Routes, cell: Cell) -> Outcome:
    """Replay one cell; see ``run_cells``."""
    return run_cells(routes, [cell])[0]


def mark_routings(table: RouteTable, cell: Cell) -> dict[str, npt.NDArray[Any]]:
    """Replay one cell and return what it made of each routing, under the names and with the meaning of a trace's columns.

    residency, dropped: uint8; expert_bytes: int64; each [cells * top_k].
    """
    cell.validate(table.shape)
    evict = _best_schedule(table, cell) if cell.evict == "belady" else cell.evict
    replay = _native_replay(table.shape, cell, evict)
    marks: dict[str, npt.NDArray[Any]] = _feed(replay, table, _next_use(table, cell) if cell.evict == "belady" else None, marks=True)
    return marks


def feed_planned(table: RouteTable, budget_bytes: int, *, next_use: npt.NDArray[np.int32], drop: npt.NDArray[np.uint8]) -> Outcome:
    """Follow a plan with a real budget: evict by ``next_use``, drop where ``drop`` is 1 and the expert not resident.

    Both [cells * top_k].
    """
    cell = Cell(mode="closed-loop", evict="belady", budget_bytes=budget_bytes)
    replay = _native_replay(table.shape, cell, cell.evict)
    arrays = (getattr(table, name) for name in RouteTable.ARRAYS)
    replay.feed(*arrays, next_use, drop)
    return _outcome(cell, replay)


def _replay_online(routes: Routes, cells: Iterable[Cell]) -> dict[Cell, Outcome]:
    replays = {cell: _native_replay(routes.shape, cell, cell.evict) for cell in cells}
    if replays:
        for table in routes.tables():
            for replay in replays.values():
                _feed(replay, table, None)
    return {cell: _outcome(cell, replay) for cell, replay in replays.items()}


def _replay_belady(table: RouteTable, cell: Cell) -> Outcome:
    schedule = _best_schedule(table, cell)
    replay = _native_replay(table.shape, cell, schedule)
    _feed(replay, table, _next_use(table, cell))
    return dataclasses.replace(_outcome(cell, replay), schedule=schedule)


def _best_schedule(table: RouteTable, cell: Cell) -> str:
    """Return the schedule with the most hits; where drops change what is loaded there is no telling, and the first is taken."""
    if table.shape.has_one_size or cell.mode == "closed-loop":
        return _SCHEDULES[0]
    next_use = _next_use(table, cell)
    hits = {}
    for schedule in _SCHEDULES:
        replay = _native_replay(table.shape, cell.baseline, schedule)
        _feed(replay, table, next_use)
        hits[schedule] = sum(replay.tally(phase)["hits"] for phase in (0, 1))
    return max(_SCHEDULES, key=lambda schedule: hits[schedule])


def _next_use(table: RouteTable, cell: Cell) -> npt.NDArray[np.int32]:
    shape = table.shape
    narrowed = cell.lossy.n_expert_used if cell.mode == "closed-loop" else None
    next_use: Any = _native.next_uses(
        table.layer,
        table.phase,
        table.first_cell,
        table.expert,
        n_layers=len(shape.layers),
        n_expert=shape.n_expert,
        top_k=shape.top_k,
        keep=narrowed or shape.top_k,
    )
    return cast("npt.NDArray[np.int32]", next_use)


def _native_replay(shape: RouteShape, cell: Cell, evict: str | None) -> Any:
    return _native.Replay.make(
        evict,
        expert_bytes=list(shape.expert_bytes),
        n_expert=shape.n_expert,
        top_k=shape.top_k,
        budget=cell.budget_bytes or 0,
        seed=cell.seed,
        drop_threshold=cell.lossy.threshold or 0.0,
        drop_raw=cell.lossy.raw_weight,
        drop_in_prefill=cell.lossy.in_prefill,
        keep=cell.lossy.n_expert_used or shape.top_k,
        closed_loop=cell.mode == "closed-loop",
        prefetch=min(cell.prefetch, len(shape.expert_bytes)),  # farther is the same, and may be no C int
    )


def _feed(replay: Any, table: RouteTable, next_use: npt.NDArray[np.int32] | None, *, marks: bool = False) -> Any:
    arrays = (getattr(table, name) for name in RouteTable.ARRAYS)
    return replay.feed(*arrays, next_use, None, marks)


def _outcome(cell: Cell, replay: Any) -> Outcome:
    return Outcome(
        cell=cell,
        prefill=Tally(**replay.tally(0)),
        decode=Tally(**replay.tally(1)),
        evictions=replay.evictions,
        peak_bytes=replay.peak_bytes,
        layer_hits=tuple(replay.layer_hits),
        layer_dropped=tuple(replay.layer_dropped),
    )
