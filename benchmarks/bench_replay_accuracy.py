#!/usr/bin/env python3
"""How far a replay is off: what it predicts from a lossless run, beside runs that really drop. docs/replay.md says what it was here.

A lossless run of a small random-weight model is recorded; its trace is replayed with dropping, static and in closed loop; then the same
prompt is run with dropping on, from the same seed. What a replay cannot know, that dropping changes what is routed and sampled next, is the
difference. Random weights route without the habits of a trained model, so this is a check of the method, not of any model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from moetriage.config import DropConfig, StreamConfig
from moetriage.gguf.synth import write_model
from moetriage.replay.cells import Cell, Lossy
from moetriage.replay.engine import run_cells
from moetriage.replay.routes import RouteFile
from moetriage.stream.output_files import OutputFiles
from moetriage.stream.runner import run
from moetriage.stream.sampling import Sampling
from moetriage.types import MIB, RunReport

SHAPES = ("tiny-qwen3moe", "tiny-olmoe")
CACHES_MB = (2, 3)
THRESHOLDS = (0.5, 0.75, 1.0)
PROMPT = "The cache holds what was used last, and the disk has the rest."


def engine_run(model: Path, cache_mb: int, seed: int, tokens: int, threshold: float | None, trace: Path | None = None) -> RunReport:
    config = StreamConfig(cache_mb=cache_mb, drop=None if threshold is None else DropConfig(threshold=threshold))
    sampling = Sampling(temperature=1.3, top_k=0, top_p=1.0, min_p=0.0, seed=seed, max_tokens=tokens)
    return run(model, config, PROMPT, sampling=sampling, n_threads=1, outputs=OutputFiles(route_trace=trace))


def compare(model: Path, cache_mb: int, seed: int, tokens: int, folder: Path) -> list[dict[str, Any]]:
    """Return, for each threshold, the share of decode's read bytes avoided as predicted twice and as measured.

    Empty if a run ended before its last token: rates over a few tokens from a cold cache say nothing.
    """
    trace = folder / "lossless.parquet"
    lossless = engine_run(model, cache_mb, seed, tokens, None, trace)
    routes = RouteFile(trace).load()
    rows = []
    for threshold in THRESHOLDS:
        lossy = Lossy(threshold=threshold)
        cells = [Cell(mode=mode, evict="lru", budget_bytes=cache_mb * MIB, lossy=lossy) for mode in ("simulate", "closed-loop")]
        static, closed = run_cells(routes, cells)
        dropped = engine_run(model, cache_mb, seed, tokens, threshold)
        if {lossless.finish_reason, dropped.finish_reason} != {"length"}:
            return []
        per_token = [report.decode.read_bytes / report.decode.tokens for report in (lossless, dropped)]
        if lossless.decode.read_bytes != run_cells(routes, [cells[0].baseline])[0].decode.read_bytes:
            raise SystemExit("the replay of the lossless run does not read what the run read: there is nothing to compare")
        rows.append(
            {
                "threshold": threshold,
                "static": static.reads_avoided_fraction("decode"),
                "closed_loop": closed.reads_avoided_fraction("decode"),
                "measured": 1 - per_token[1] / per_token[0],
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=150)
    options = parser.parse_args()
    found = []
    print("reads avoided in decode, mean over seeds in %: static, closed loop, measured; closed loop off by (mean, most) in points")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in SHAPES:
            model = write_model(folder / f"{shape}.gguf", shape)[0]
            for cache_mb in CACHES_MB:
                compared = (compare(model, cache_mb, seed, options.tokens, folder) for seed in itertools.count())
                rows = list(itertools.chain.from_iterable(itertools.islice(filter(None, compared), options.seeds)))
                for threshold in THRESHOLDS:
                    same = [row for row in rows if row["threshold"] == threshold]
                    means = [100 * statistics.mean(row[key] for row in same) for key in ("static", "closed_loop", "measured")]
                    off = [100 * (row["closed_loop"] - row["measured"]) for row in same]
                    figures = " ".join(f"{mean:6.1f}" for mean in means)
                    print(f"{shape:14} {cache_mb} MiB  F={threshold:<4} {figures}   {statistics.mean(off):+5.1f} {max(off, key=abs):+5.1f}")
                    found.append({"shape": shape, "cache_mb": cache_mb, "threshold": threshold, "means": means, "off_points": off})
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
