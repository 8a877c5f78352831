"""Runs of single cells for bench_stream: each in a process of its own, repeated if others disturbed it, kept as a flat record.

In: a model and a StreamConfig. Out: a record of numbers; all of them, used or not, stay in ``Bench.records``.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness

from moetriage.config import StreamConfig
from moetriage.stream.cell import CellResult, CellSpec
from moetriage.stream.iobench import bench_reads
from moetriage.stream.launch import CellOutcome, launch
from moetriage.types import MIB

PHASES = ("compute", "read_wait", "cache", "other")

Record = dict[str, Any]


@dataclass
class Bench:
    """What all cells share; README.md says what each is for. limit_mb: of the memory cgroup; 0 for none."""

    threads: int = 2
    rounds: int = 3
    prompt_tokens: int = 144
    tokens: int = 64
    limit_mb: int = 8192
    cache_mb: int = 4000
    lanes: int = 4
    mmap_seconds: float = 75.0
    patience: float = 0.0
    retries: int = 1
    max_others: float = 0.15
    records: list[Record] = field(default_factory=list)

    def streamed(self, **changes: Any) -> StreamConfig:
        """Return the settings of the streamed cells, with changes."""
        return StreamConfig(**{"cache_mb": self.cache_mb, "io_threads": self.lanes} | changes)

    def sample(self, label: str, model: Path, config: StreamConfig, **changes: Any) -> Record:
        """Run one cell, again if others disturbed it, and return the least disturbed run.

        changes: ``limit_mb``, or fields of CellSpec. A mapped model is cut off after ``mmap_seconds``: it may take minutes a token.
        """
        limit_bytes = changes.pop("limit_mb", self.limit_mb) * MIB or None
        sizes = {"prompt_tokens": self.prompt_tokens, "tokens": self.tokens, "n_threads": self.threads} | changes
        spec = CellSpec(model=model, config=config, seconds=self.mmap_seconds if config.mmap else None, **sizes)
        # A mapped model waits for the disk most of the time: what others do with the processors meanwhile does not disturb it.
        retries = 0 if config.mmap else self.retries
        tries: list[Record] = []
        while not tries or (tries[-1]["others_cpu"] > self.max_others and len(tries) <= retries):
            harness.wait_until_calm(self.patience)
            with harness.watched() as found:
                outcome = launch(spec, limit_bytes=limit_bytes)
            tries.append({"label": label, "others_cpu": found.others_cpu} | record_of(outcome))
            harness.say(f"{label}: {tries[-1]['tok_per_s']:.2f} tok/s, others used {found.others_cpu:.0%} of the processors")
        best = min(tries, key=lambda record: float(record["others_cpu"]))
        self.records += [record | {"used": record is best} for record in tries]
        return best

    def disk_mb_s(self, model: Path) -> float:
        """Return what the disk gives to random reads of expert size on as many lanes as the engine has, in 10^6 bytes a second."""
        harness.wait_until_calm(self.patience)
        rate = bench_reads(model, lanes=[self.lanes], seconds=2.0)[0].mb_s
        self.records.append({"label": "iobench", "lanes": self.lanes, "mb_s": rate})
        harness.say(f"iobench, {self.lanes} lanes: {rate:.0f} MB/s")
        return rate


def record_of(outcome: CellOutcome) -> Record:
    """Return the numbers of one run: ``decode_*`` and the phases are a token's mean, ``prefill_*`` are totals."""
    result = outcome.result
    assert result is not None, "only a cell with kill_after_seconds can end without a result"
    return {
        "config": result.report["config"],
        "token_ids": result.report["token_ids"],
        "cut_short": result.cut_short,
        "load_seconds": result.report["load_seconds"],
        "first_token_seconds": result.report["load_seconds"] + result.report["prefill_seconds"],
        "peak_rss_bytes": result.report["peak_rss_bytes"],
        "cgroup_peak_bytes": outcome.peak_bytes if outcome.limit_bytes else None,
        "cgroup_held_peak_bytes": outcome.held_peak_bytes,
        "warm_bytes": outcome.warm_bytes,
        "o_direct": result.report["o_direct"],
        **_decode(result),
        **_prefill(result),
    }


def _decode(result: CellResult) -> Record:
    report, decode = result.report, result.report["decode"]
    n, routed = decode["tokens"], decode["routed"]
    cache = report["cache"]
    lookups = cache["hits"] + cache["misses"]
    walls = [step["wall_seconds"] for step in result.steps if step["phase"] == 1]
    disk_bytes = decode["read_bytes"] if routed else result.decode_disk_bytes or 0
    return {
        "tokens": n,
        "tok_per_s": report["tok_per_s"],
        "token_seconds": walls,
        "token_seconds_median": statistics.median(walls),
        **{f"{name}_seconds": report["phases"][f"{name}_seconds"] / n for name in PHASES},
        "read_mib": disk_bytes / n / MIB,
        "hit_fraction": decode["hits"] / routed if routed else None,
        "run_hit_fraction": cache["hits"] / lookups if lookups else None,
        "dropped_fraction": decode["dropped"] / routed if routed else None,
        "weight_dropped_fraction": report["drop"]["weight_dropped_fraction"] if routed else None,
    }


def _prefill(result: CellResult) -> Record:
    steps = [step for step in result.steps if step["phase"] == 0]
    sums = {f"prefill_{name}_seconds": sum(step[f"{name}_seconds"] for step in steps) for name in PHASES}
    return sums | {"prefill_seconds": result.report["prefill_seconds"], "prefill_read_bytes": result.report["prefill"]["read_bytes"]}


def check_same(plain: Record, other: Record) -> None:
    """Refuse to compare two runs that did not say the same, as far as both came."""
    if any(left != right for left, right in zip(plain["token_ids"], other["token_ids"], strict=False)):
        raise SystemExit(f"{plain['label']!r} and {other['label']!r} said different tokens: nothing is compared")


def speed_ratio(slow: Record, fast: Record) -> float:
    """Return how many times as fast the second run was over the tokens that both evaluated."""
    n = min(slow["tokens"], fast["tokens"])
    return float(sum(slow["token_seconds"][:n]) / sum(fast["token_seconds"][:n]))
