#!/usr/bin/env python3
"""How fast a replay is, beside libCacheSim's Python bindings on the same requests. docs/replay.md says what it was here.

Regimes: `simulate` and `closed-loop` of the recorded qwen routing in the engine's batches, repeated as turns so that a sample takes long
enough; plain LRU with a lookup at a time, which is libCacheSim's kind of request, where both must count the same hits; and a sweep. Times
are processor seconds of the replay itself (of the process, for the sweep wall seconds); reading the trace is timed apart. Needs
`pip install libcachesim` for the comparison and says so without.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import moetriage
from moetriage.replay.cells import EVICTIONS, Cell, Lossy
from moetriage.replay.engine import run_cell
from moetriage.replay.routes import RouteFile, RouteTable
from moetriage.replay.sweep import Grid, default_budgets, sweep
from moetriage.types import MIB

EXCERPT = Path(moetriage.__file__).parent / "data" / "qwen-excerpt.route.parquet"
BUDGETS_MB = (1000, 4000)


def repeated(table: RouteTable, times: int) -> RouteTable:
    """Return the trace so many times in a row, as a session's turns."""
    cells = int(table.first_cell[-1])
    starts = np.concatenate([table.first_cell[:-1] + turn * cells for turn in range(times)])
    tiled = {name: np.tile(getattr(table, name), times) for name in RouteTable.ARRAYS if name != "first_cell"}
    return dataclasses.replace(table, first_cell=np.append(starts, times * cells), **tiled)


def one_lookup_a_batch(table: RouteTable) -> RouteTable:
    """Return the same routings, each looked up alone: what a general cache simulator does."""
    lengths = np.diff(table.first_cell) * table.shape.top_k
    return dataclasses.replace(
        table,
        shape=dataclasses.replace(table.shape, top_k=1),
        layer=np.repeat(table.layer, lengths),
        phase=np.repeat(table.phase, lengths),
        first_cell=np.arange(len(table.expert) + 1, dtype=np.int64),
    )


def rate(run: Callable[[], Any], n: int, samples: int) -> tuple[float, float, float]:
    """Return millions of routings a processor second: median, least, most."""
    rates = []
    for _ in range(samples):
        began = time.process_time()
        run()
        rates.append(n / (time.process_time() - began) / 1e6)
    return statistics.median(rates), min(rates), max(rates)


def replay_rates(table: RouteTable, samples: int) -> dict[str, tuple[float, float, float]]:
    n, found = len(table.expert), {}
    for evict in EVICTIONS:
        cell = Cell(mode="simulate", evict=evict, budget_bytes=4000 * MIB)
        found[f"simulate {evict}"] = rate(lambda cell=cell: run_cell(table, cell), n, samples)
    for threshold in (0.75, 1.0):
        cell = Cell(mode="closed-loop", evict="lru", budget_bytes=4000 * MIB, lossy=Lossy(threshold=threshold))
        # The time holds the lossless replay that the cell is held against, too; its routings are not counted.
        found[f"closed-loop lru F={threshold}"] = rate(lambda cell=cell: run_cell(table, cell), n, samples)
    return found


def beside_libcachesim(table: RouteTable, samples: int) -> list[dict[str, Any]] | None:
    """Run plain LRU on the same requests in both; None without libCacheSim. Raises SystemExit if they count different hits."""
    try:
        import libcachesim
    except ImportError:
        return None
    table = one_lookup_a_batch(table)
    shape = table.shape
    slots = table.layer.astype(np.int64) * shape.n_expert + table.expert
    requests = np.zeros(len(slots), np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")]))
    requests["id"], requests["size"], requests["next"] = slots, np.array(shape.expert_bytes)[table.layer], -1
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "qwen.oracleGeneral"
        requests.tofile(path)

        def theirs(budget: int) -> float:
            cache = libcachesim.LRU(budget, hashpower=14)  # 16,384 buckets for 6,144 objects: their table never grows
            reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
            missed: float = cache.process_trace(reader)[0]
            return missed

        for budget_mb in BUDGETS_MB:
            cell = Cell(mode="simulate", evict="lru", budget_bytes=budget_mb * MIB)
            hits, their_hits = run_cell(table, cell).phase("all").hits, round((1 - theirs(budget_mb * MIB)) * len(slots))
            if hits != their_hits:
                raise SystemExit(f"{budget_mb} MiB: {hits} hits here, {their_hits} in libCacheSim: nothing to compare")
            ours, other = [], []
            for _ in range(samples):  # interleaved, so that what disturbs one disturbs both
                ours.append(rate(lambda cell=cell: run_cell(table, cell), len(slots), 1)[0])
                other.append(rate(lambda budget_mb=budget_mb: theirs(budget_mb * MIB), len(slots), 1)[0])
            rows.append({"cache_mb": budget_mb, "requests": len(slots), "hits": hits, "ours": spread(ours), "libcachesim": spread(other)})
    return rows


def sweep_seconds(table: RouteTable, samples: int) -> dict[str, Any]:
    budgets = default_budgets(table.shape)[:10]
    grid = Grid(budgets_bytes=budgets, evictions=EVICTIONS[:5], lossy=tuple(Lossy(threshold=value) for value in (0.5, 0.75, 1.0)))
    cells = sum(len(group) for group in grid.groups())
    seconds = []
    for _ in range(samples):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            sweep(table, grid, Path(folder) / "sweep.parquet", trace="qwen", jobs=2)
            seconds.append(time.perf_counter() - began)
    return {"cells": cells, "jobs": 2, "seconds": spread(seconds)}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def text(values: Sequence[float]) -> str:
    median, least, most = values
    return f"{median:8.2f}  ({least:.2f} to {most:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=50, help="times the recording is repeated in a sample (default: 50, 2.2 M routings)")
    parser.add_argument("--samples", type=int, default=7, help="samples of each figure (default: 7)")
    options = parser.parse_args()

    began = time.perf_counter()
    table = RouteFile(EXCERPT).load()
    load_seconds = time.perf_counter() - began
    hits = run_cell(table, Cell(mode="simulate", evict="lru", budget_bytes=4000 * MIB)).decode.hit_fraction
    if f"{100 * hits:.1f}" != "80.3":
        raise SystemExit(f"LRU at 4000 MiB has {100 * hits:.1f} % hits in decode, not the recorded 80.3 %: nothing here can be timed")
    long = repeated(table, options.turns)

    rates = replay_rates(long, options.samples)
    print(f"{len(long.expert)} routings in the engine's batches; millions a processor second, median (least to most) of {options.samples}")
    for name, values in rates.items():
        print(f"  {name:26} {text(values)}")
    compared = beside_libcachesim(long, options.samples)
    print("\nplain LRU, one lookup at a time: the same hits in both; millions a processor second")
    if compared is None:
        print("  pip install libcachesim to compare")
    for row in compared or ():
        ours, other = text(row["ours"]), text(row["libcachesim"])
        print(f"  {row['cache_mb']} MiB, {row['hits']} hits of {row['requests']}: here {ours}, libCacheSim {other}")
    swept = sweep_seconds(table, min(3, options.samples))
    print(f"\nsweep of {swept['cells']} cells over the recording, {swept['jobs']} processes: {text(swept['seconds'])} s")
    print(f"reading the recording: {load_seconds:.2f} s")
    found = {
        "routings": len(long.expert),
        "million_per_second": rates,
        "libcachesim": compared,
        "sweep": swept,
        "load_seconds": load_seconds,
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
