"""Many cells over one trace: budgets x eviction orders x lossy policies, on all processors, resumable.

In: a trace and a grid. Out: rows, in a ``SweepJournal`` as they come and as Parquet at the end.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetriage.replay.cells import EVICTIONS, LOSSLESS, Cell, Lossy
from moetriage.replay.engine import run_cells
from moetriage.replay.routes import RouteShape, RouteTable
from moetriage.replay.rows import Row, rows_of
from moetriage.replay.sweep_journal import SweepJournal
from moetriage.types import MIB

Group = list[Cell]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The cells of a sweep: each budget with each order, lossless (simulated) and with each lossy policy (in closed loop)."""

    budgets_bytes: tuple[int, ...]
    evictions: tuple[str, ...] = EVICTIONS
    lossy: tuple[Lossy, ...] = ()
    prefetch: int = 0
    seed: int = 0

    def groups(self) -> list[Group]:
        """Return the cells, those of one cache together: they share what they are held against."""
        return [self._group(budget, evict) for budget in self.budgets_bytes for evict in self.evictions]

    def _group(self, budget: int, evict: str) -> Group:
        prefetch = 0 if evict == "belady" else self.prefetch
        lossy = (LOSSLESS, *(policy for policy in self.lossy if budget or policy.threshold is None))
        return [
            Cell(
                mode="simulate" if policy is LOSSLESS else "closed-loop",
                lossy=policy,
                evict=evict,
                budget_bytes=budget,
                prefetch=prefetch,
                seed=self.seed,
            )
            for policy in lossy
        ]


def default_budgets(shape: RouteShape) -> tuple[int, ...]:
    """Return budgets in whole MiB from half of T to all experts, the last below the cliff and the first above T among them."""
    t, total = shape.working_set_bytes, shape.total_bytes
    steps = np.geomspace(max(t, 1), max(total, 1), 9)[1:]
    below_cliff = (shape.cliff_bytes - 1) // MIB * MIB
    wanted = {-(-int(value) // MIB) * MIB for value in (0.5 * t, 0.9 * t, t, *steps)} | {below_cliff}
    return tuple(sorted(budget for budget in wanted if budget > 0))


def sweep(
    table: RouteTable,
    grid: Grid,
    out: Path,
    *,
    trace: str,
    truncated: bool = False,
    jobs: int | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Row]:
    """Run the cells that ``out`` and its journal do not have yet, write all to ``out``, and return those of the grid.

    jobs: processes (default: the processors this process may use). progress: called with cells done and in total.

    Raises UsageError for a cell that does not fit, or an ``out`` that holds something else or cannot be written; what was found until an
    interruption stays in the journal.
    """
    groups = grid.groups()
    for cell in (cell for group in groups for cell in group):
        cell.validate(table.shape)
    digest = trace_digest(table)
    journal = SweepJournal(out, digest)
    total = sum(len(group) for group in groups)
    missing = [group for group in groups if any(not journal.has(cell) for cell in group)]
    done = total - sum(len(group) for group in missing)
    progress(done, total)
    with journal:
        for group, rows in _run(table, missing, trace, truncated, jobs):
            journal.add(rows)
            done += len(group)
            progress(done, total)
    journal.finish()
    return journal.rows_of(cell for group in groups for cell in group)


def trace_digest(table: RouteTable) -> str:
    """Return a digest of all that a replay looks at."""
    digest = hashlib.blake2b(repr(table.shape).encode(), digest_size=16)
    for name in RouteTable.ARRAYS:
        digest.update(np.ascontiguousarray(getattr(table, name)).data)
    return digest.hexdigest()


def _run(table: RouteTable, groups: Sequence[Group], trace: str, truncated: bool, jobs: int | None) -> Iterator[tuple[Group, list[Row]]]:
    jobs = min(len(groups), jobs or len(os.sched_getaffinity(0)))
    if jobs <= 1:
        for group in groups:
            yield group, rows_of(trace, run_cells(table, group), truncated=truncated)
        return
    with tempfile.TemporaryDirectory(prefix="moetriage-sweep-") as folder:
        for name in RouteTable.ARRAYS:  # mapped by all processes, in memory once
            np.save(Path(folder) / f"{name}.npy", getattr(table, name))
        # spawn: a fork of a process in which polars has started threads can hang.
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_start_worker, initargs=(folder, table.shape))
        try:
            waiting = {pool.submit(_work, group, trace, truncated): group for group in groups}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_worker_table: RouteTable | None = None


def _start_worker(folder: str, shape: RouteShape) -> None:
    global _worker_table
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; only the one that waits for them has to act on it
    arrays = {name: np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in RouteTable.ARRAYS}
    _worker_table = RouteTable(shape=shape, **arrays)


def _work(group: Group, trace: str, truncated: bool) -> list[Row]:
    assert _worker_table is not None
    return rows_of(trace, run_cells(_worker_table, group), truncated=truncated)
