"""What the benchmarks share: the machine in words, samples with what disturbed them, medians, tables and result files.

In: numbers that a benchmark measured. Out: text and JSON. Knows no model and no engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Others' part of all processor time below which the machine counts as calm, and how long it is looked at.
CALM_FRACTION = 0.1
_LOOK_SECONDS = 3.0


@dataclass
class Disturbance:
    """Filled when a ``watched`` block ends. others_cpu: fraction of all processor time that other processes used meanwhile."""

    seconds: float = 0.0
    others_cpu: float = 0.0


@contextlib.contextmanager
def watched() -> Iterator[Disturbance]:
    """Measure how much of the machine others used during the block; its child processes must have been waited for by its end."""
    found = Disturbance()
    began, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    yield found
    found.seconds = time.perf_counter() - began
    others = (_busy_seconds() - busy) - (_own_seconds() - own)
    found.others_cpu = max(0.0, others / (found.seconds * (os.cpu_count() or 1)))


def wait_until_calm(patience_seconds: float) -> None:
    """Wait until others leave the processors alone, at most so long."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        with watched() as found:
            time.sleep(_LOOK_SECONDS)
        if found.others_cpu < CALM_FRACTION:
            return


def _busy_seconds() -> float:
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq, *_ = fields  # user includes guests
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass(frozen=True)
class Spread:
    """Of several samples: the median, the least and the largest."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, digits: int = 2) -> str:
        if self.n == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Table:
    """A table with what it is to be held against: ``notes`` are sentences below it."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: list[str] = field(default_factory=list)

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join([*lines, "", *(f"- {note}" for note in self.notes), ""])


def machine(path: Path) -> dict[str, object]:
    """Describe the hardware and what runs on it, as far as the kernel tells; ``path`` lies on the disk that is measured."""
    cpu = next((line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    flags = next((line.split() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), [])
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": cpu or platform.machine(),
        "cpus": os.cpu_count(),
        "extensions": [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if name in flags],
        "memory_gib": round(total_kib / 2**20, 1),
        "kernel": platform.release().split("-")[0],  # what follows names a build
        "python": platform.python_version(),
        "read_ahead_kib": _read_ahead_kib(path),
        "load_average": list(os.getloadavg()),
    }


def _read_ahead_kib(path: Path) -> int | None:
    """Return how much the kernel reads ahead on the path's disk: every fault of a mapped file may cost as much."""
    there = next(candidate for candidate in (path, *path.absolute().parents) if candidate.exists())
    number = there.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for folder in (device, device.resolve().parent):  # a partition's queue is that of its disk
        with contextlib.suppress(OSError):
            return int((folder / "queue/read_ahead_kb").read_text())
    return None


def save(
    folder: Path, what: str, hardware: str, date: str, tables: Sequence[Table], records: Sequence[Mapping[str, Any]], head: str
) -> None:
    """Write ``<what>_<hardware>_<date>``: .md for people, .jsonl with every sample."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{what}_{hardware}_{date}"
    (folder / f"{stem}.md").write_text(head + "\n" + "\n".join(table.markdown() for table in tables))
    (folder / f"{stem}.jsonl").write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))


def say(text: str) -> None:
    """Print a line of progress on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def add_timing(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark that times calls in its own process."""
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each figure (default: 15)")
    parser.add_argument("--threads", type=int, default=2, help="default: 2")
    parser.add_argument("--cpu-time", action="store_true", help="processor time on one thread: for a machine that others use too")


def chosen_clock(options: argparse.Namespace) -> Callable[[], float]:
    """Return the clock that was asked for; processor time is that of one thread, which ``options.threads`` then says."""
    options.threads = 1 if options.cpu_time else options.threads
    return time.process_time if options.cpu_time else time.perf_counter


def plain(value: Any) -> Any:
    """Return a value with dataclasses made into dicts."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
