"""Measure how fast a disk answers reads of expert size, by number of lanes.

In: a model, a file or a directory. Out: one ``LaneResult`` per lane count; ``cli`` makes the table. The reads are those of the engine:
random, aligned, past the page cache. Which ranges are read, and that they come from the disk, is ``disk_sample``'s job.

A lane is a Python thread here, which costs some 20 to 50 microseconds a read: nothing beside a read of 256 KiB or more, but a limit for
smaller ones, whose rate is then understated.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetriage.config import MAX_IO_THREADS
from moetriage.errors import ModelFileError, NotMoeError, UsageError
from moetriage.gguf.layout import ModelLayout, read_layout
from moetriage.stream.disk_sample import DiskSample, Range, kind_of, open_files, open_test_file
from moetriage.types import MIB

DEFAULT_LANES = (1, 2, 4, 8, 16)
DEFAULT_READ_BYTES = MIB
DEFAULT_TEST_FILE_BYTES = 1024 * MIB
#: No single disk or array of this decade reads as fast; memory does. A rate above it is a fault of the measurement.
MAX_CREDIBLE_MB_S = 64_000.0


@dataclass(frozen=True, kw_only=True)
class LaneResult:
    """What one lane count gave. MB are 10^6 bytes; latencies are of single reads; ``odirect``: past the page cache, else evicted from it.

    ``reads``, ``bytes``: finished within ``seconds``, the wall time from the first read's start to the last one's end.
    """

    lanes: int
    reads: int
    bytes: int
    seconds: float
    mb_s: float
    iops: float
    latency_ms_p50: float
    latency_ms_p99: float
    odirect: bool


def bench_reads(
    path: Path,
    *,
    expert_bytes: int | None = None,
    lanes: Sequence[int] = DEFAULT_LANES,
    seconds: float = 2.0,
    seed: int = 0,
    test_file_bytes: int = DEFAULT_TEST_FILE_BYTES,
    progress: Callable[[LaneResult], None] | None = None,
) -> list[LaneResult]:
    """Measure random reads at each lane count and return the results in that order.

    path: a model (all its shards are read), any other file, or a directory, where a file of ``test_file_bytes`` is written and removed.
    expert_bytes: size of a read, rounded up to 4096; None takes the mean expert matrix of a model, otherwise 1 MiB.
    seconds: how long each lane count is measured; shorter where direct reads are refused and the file has been read once.
    progress: called with each result as it comes.

    Raises ModelFileError for a file that cannot be read, UsageError for bad settings, a file shorter than a read, a disk without room for
    the test file, and for everything that would be read from memory.
    """
    _check(lanes, seconds, expert_bytes, test_file_bytes)
    if kind_of(path) == "directory":
        with open_test_file(path, expert_bytes or DEFAULT_READ_BYTES, seed=seed, size=test_file_bytes) as sample:
            return _bench(sample, lanes, seconds, progress)
    paths, read_bytes = _reads_of(path, expert_bytes)
    with open_files(paths, read_bytes, seed=seed) as sample:
        return _bench(sample, lanes, seconds, progress)


def quick_disk_rate(path: Path, *, layout: ModelLayout | None = None, lanes: int = 4, seconds: float = 0.4) -> float:
    """Return the rate of random expert reads in MB/s (10^6 bytes), good to some ten percent.

    layout: of the model at PATH, where the caller has read it already. Raises what ``bench_reads`` raises.
    """
    _check([lanes], seconds, None, DEFAULT_TEST_FILE_BYTES)
    paths, read_bytes = _reads_of(path, None) if layout is None else (layout.paths, mean_read_bytes(layout))
    with open_files(paths, read_bytes, seed=0) as sample:
        return _bench(sample, [lanes], seconds, None)[0].mb_s


def mean_read_bytes(layout: ModelLayout) -> int:
    """Return the mean size of what the engine reads at once: one projection of one expert."""
    return layout.expert_total_bytes // sum(tensor.n_expert for tensor in layout.experts)


def measure_lanes(ranges: Iterator[Range], *, read_bytes: int, lanes: int, seconds: float) -> tuple[float, list[float]]:
    """Read from the ranges on so many threads until the time is over or they end; return the wall seconds and each read's seconds.

    Raises ModelFileError, naming file and offset, for a read that fails or falls short.
    """
    start = threading.Barrier(lanes)

    def lane(buffer: mmap.mmap) -> tuple[float, float, list[float]]:
        start.wait(timeout=10)
        begin = now = time.perf_counter()
        latencies = []
        for wanted in ranges:
            _read(wanted, buffer)
            before, now = now, time.perf_counter()
            latencies.append(now - before)
            if now - begin >= seconds:
                break
        return begin, now, latencies

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(lanes) as pool:
        buffers = [stack.enter_context(_touched(read_bytes)) for _ in range(lanes)]
        done = list(pool.map(lane, buffers))
    wall = max(end for _, end, _ in done) - min(begin for begin, _, _ in done)
    return wall, [latency for _, _, latencies in done for latency in latencies]


def _bench(
    sample: DiskSample, lane_counts: Sequence[int], seconds: float, progress: Callable[[LaneResult], None] | None
) -> list[LaneResult]:
    results = []
    for lanes in lane_counts:
        wall, latencies = measure_lanes(sample.cold_ranges(), read_bytes=sample.read_bytes, lanes=lanes, seconds=seconds)
        result = summarise(lanes, sample.read_bytes, wall, latencies, odirect=sample.odirect)
        results.append(result)
        if progress is not None:
            progress(result)
    return results


def summarise(lanes: int, read_bytes: int, wall_seconds: float, latencies: Sequence[float], *, odirect: bool) -> LaneResult:
    """Turn measured times (seconds) into a result. Raises UsageError for a rate that no disk has."""
    nbytes = len(latencies) * read_bytes
    mb_s = nbytes / wall_seconds / 1e6
    if mb_s > MAX_CREDIBLE_MB_S:
        raise UsageError(f"{mb_s:.0f} MB/s at {lanes} lanes is more than any disk gives: it was read from memory, so no rate is reported")
    p50, p99 = np.percentile(np.asarray(latencies) * 1e3, [50, 99])
    return LaneResult(
        lanes=lanes,
        reads=len(latencies),
        bytes=nbytes,
        seconds=wall_seconds,
        mb_s=mb_s,
        iops=len(latencies) / wall_seconds,
        latency_ms_p50=float(p50),
        latency_ms_p99=float(p99),
        odirect=odirect,
    )


def _read(wanted: Range, buffer: mmap.mmap) -> None:
    try:
        count = os.preadv(wanted.fd, [buffer], wanted.offset)
    except OSError as error:
        raise ModelFileError(wanted.path, f"reading {wanted.nbytes} bytes failed: {error.strerror}", offset=wanted.offset) from error
    if count != wanted.nbytes:
        raise ModelFileError(wanted.path, f"a read of {wanted.nbytes} bytes gave {count}: the file was shortened", offset=wanted.offset)


def _touched(nbytes: int) -> mmap.mmap:
    """Return page-aligned memory (as O_DIRECT needs it) that is there already, so that no read pays for page faults."""
    buffer = mmap.mmap(-1, nbytes)
    buffer.write(bytes(nbytes))
    return buffer


def _reads_of(path: Path, expert_bytes: int | None) -> tuple[Sequence[Path], int]:
    """Return the files to read and the size of a read, as the model's layout says if PATH is one."""
    if kind_of(path) == "directory":
        raise UsageError(f"{path}: is a directory; give a file")
    if expert_bytes is not None:
        return [path], expert_bytes
    try:
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        layout = read_layout(path) if is_gguf else None
    except NotMoeError:
        layout = None  # a dense model is a file like any other
    except OSError as error:
        raise ModelFileError(str(path), f"cannot be opened: {error.strerror}") from error
    return ([path], DEFAULT_READ_BYTES) if layout is None else (layout.paths, mean_read_bytes(layout))


def _check(lanes: Sequence[int], seconds: float, expert_bytes: int | None, test_file_bytes: int) -> None:
    for count in lanes:
        if not 1 <= count <= MAX_IO_THREADS:
            raise UsageError(f"{count} lanes: must be between 1 and {MAX_IO_THREADS}")
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{seconds} seconds for each lane count: must be above 0")
    for what, nbytes in (("a read", expert_bytes), ("the test file", test_file_bytes)):
        if nbytes is not None and nbytes < 1:
            raise UsageError(f"{nbytes} bytes for {what}: must be at least 1")
