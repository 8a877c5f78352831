"""The cell of bench_stream that changes one setting at a time, on a smaller model with a quarter of its experts in the cache.

In: a ``Bench`` and the model's file. Out: a table. Every setting here is lossless, so all must say the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import Spread, Table
from stream_runs import Bench, Record, check_same

from moetriage.gguf.layout import read_layout
from moetriage.types import MIB

CACHED_FRACTION = 0.25
_CHANGES: dict[str, dict[str, Any]] = {
    "as is": {},
    "not staged": {"staged": False},
    "not in place": {"in_place": False},
    "not O_DIRECT": {"odirect": False},
    "dense weights mapped": {"dense_weights": "mmap"},
    **{f"{n} lanes": {"io_threads": n} for n in (1, 2, 8, 16)},
    **{f"prefetch {n}": {"prefetch": n} for n in (1, 2)},
}


def settings(bench: Bench, model: Path) -> list[Table]:
    """Run every setting once a round, in turns, and compare it with the round's first, which changes nothing."""
    layout = read_layout(model)
    cache_mb = round(CACHED_FRACTION * layout.expert_total_bytes / MIB)
    layer = layout.expert_bytes(layout.moe_layers[0]) * layout.n_expert
    limit_mb = cache_mb + (layout.dense_total_bytes + 2 * layer) // MIB + 512
    runs: dict[str, list[Record]] = {label: [] for label in _CHANGES}
    for _ in range(bench.rounds):
        for label, change in _CHANGES.items():
            config = bench.streamed(**{"cache_mb": cache_mb} | change)
            runs[label].append(bench.sample(label, model, config, limit_mb=limit_mb))
            check_same(runs["as is"][0], runs[label][-1])
    rows = [_row(label, found, runs["as is"]) for label, found in runs.items()]
    columns = ("setting", "tok/s", "times 'as is' of the round", "read wait, ms a token", "prompt, s", "MiB/token")
    notes = [
        f"{len(layout.moe_layers)} layers, cache {cache_mb} MiB, cgroup {limit_mb} MiB, {bench.lanes} lanes unless said otherwise; medians "
        f"(least to largest) of {bench.rounds} rounds; all said the same tokens",
        "not O_DIRECT: the page cache fills what the limit leaves, and hits where the expert cache does not",
    ]
    return [Table("One setting at a time", columns, rows, notes)]


def _row(label: str, found: list[Record], base: list[Record]) -> tuple[str, ...]:
    ratio = Spread.of([run["tok_per_s"] / other["tok_per_s"] for run, other in zip(found, base, strict=True)])
    wait = Spread.of([1e3 * run["read_wait_seconds"] for run in found])
    prefill = Spread.of([run["prefill_seconds"] for run in found])
    reads = Spread.of([run["read_mib"] for run in found])
    rate = Spread.of([run["tok_per_s"] for run in found])
    return (label, rate.text(), ratio.text(), wait.text(1), prefill.text(), f"{reads.median:.1f}")
