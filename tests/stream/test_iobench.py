"""The disk benchmark reads the disk, says how, and refuses every number that memory would have given."""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from moetriage.errors import UsageError
from moetriage.gguf.layout import read_layout
from moetriage.gguf.synth import write_model
from moetriage.stream.disk_sample import BLOCK_BYTES, Range, open_files
from moetriage.stream.iobench import LaneResult, bench_reads, mean_read_bytes, measure_lanes, quick_disk_rate, summarise
from moetriage.types import MIB

KIB = 1024
QUICK_SECONDS = 0.05


def bytes_read_from_storage() -> int:
    """What the kernel says this process has made storage read; page cache hits do not count."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


class Preadv(NamedTuple):
    """The kernel's preadv, and whether a descriptor was opened with O_DIRECT."""

    real: Callable[[int, Sequence[mmap.mmap], int], int]

    @staticmethod
    def is_direct(fd: int) -> bool:
        return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the file system refuse O_DIRECT as tmpfs did before Linux 6.1."""
    real = os.open

    def refusing(path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)


def needs_direct(path: Path) -> None:
    with open_files([path], 64 * KIB, seed=0) as sample:
        if not sample.odirect:
            pytest.skip("the file system of the temporary directory cannot read directly")


def test_each_lane_count_gives_a_result_whose_numbers_agree(file: Path) -> None:
    seen: list[LaneResult] = []
    results = bench_reads(file, expert_bytes=64 * KIB, lanes=(1, 4), seconds=QUICK_SECONDS, progress=seen.append)
    assert [result.lanes for result in results] == [1, 4]
    assert seen == results
    for result in results:
        assert result.reads >= result.lanes
        assert result.bytes == result.reads * 64 * KIB
        assert result.mb_s == pytest.approx(result.bytes / result.seconds / 1e6)
        assert result.iops == pytest.approx(result.reads / result.seconds)
        assert 0 < result.latency_ms_p50 <= result.latency_ms_p99


def test_direct_reads_really_come_from_storage(file: Path) -> None:
    needs_direct(file)
    file.read_bytes()  # all of it is in the page cache now
    before = bytes_read_from_storage()
    (result,) = bench_reads(file, expert_bytes=256 * KIB, lanes=(2,), seconds=QUICK_SECONDS)
    assert result.odirect
    assert bytes_read_from_storage() - before >= result.bytes


def test_without_direct_reads_the_page_cache_is_emptied_and_storage_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    file.read_bytes()
    before = bytes_read_from_storage()
    results = bench_reads(file, expert_bytes=256 * KIB, lanes=(1, 2), seconds=10)
    assert [(result.odirect, result.reads) for result in results] == [(False, 64), (False, 64)], "each range once: twice is from memory"
    assert bytes_read_from_storage() - before >= 2 * 16 * MIB


def test_direct_reads_that_return_garbage_are_not_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_direct(file)
    kernel = Preadv(os.preadv)

    def garbage(fd: int, buffers: Sequence[mmap.mmap], offset: int) -> int:
        count = kernel.real(fd, buffers, offset)
        if kernel.is_direct(fd):
            buffers[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", garbage)
    (result,) = bench_reads(file, expert_bytes=256 * KIB, lanes=(1,), seconds=QUICK_SECONDS)
    assert not result.odirect


def test_direct_reads_that_go_through_the_page_cache_are_not_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_direct(file)
    kernel = Preadv(os.preadv)

    def buffered(fd: int, buffers: Sequence[mmap.mmap], offset: int) -> int:
        if not kernel.is_direct(fd):
            return kernel.real(fd, buffers, offset)
        with file.open("rb") as opened:
            return kernel.real(opened.fileno(), buffers, offset)

    monkeypatch.setattr(os, "preadv", buffered)
    (result,) = bench_reads(file, expert_bytes=256 * KIB, lanes=(1,), seconds=QUICK_SECONDS)
    assert not result.odirect


def test_a_mapped_file_gives_direct_reads_no_place_to_be_verified_at(file: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert len(bytes(mapped)) == file.stat().st_size
        with pytest.raises(UsageError, match="stays in memory"):
            bench_reads(file, expert_bytes=256 * KIB, lanes=(1,), seconds=QUICK_SECONDS)


def test_a_partly_mapped_file_is_still_read_directly(file: Path) -> None:
    needs_direct(file)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 8 * MIB, prot=mmap.PROT_READ) as mapped:
        assert len(bytes(mapped)) == 8 * MIB
        (result,) = bench_reads(file, expert_bytes=256 * KIB, lanes=(1,), seconds=QUICK_SECONDS)
    assert result.odirect


def test_short_direct_reads_are_not_used(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_direct(file)
    kernel = Preadv(os.preadv)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: kernel.real(fd, buffers, offset) - kernel.is_direct(fd))
    (result,) = bench_reads(file, expert_bytes=256 * KIB, lanes=(1,), seconds=QUICK_SECONDS)
    assert not result.odirect


def test_a_file_that_stays_in_memory_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert len(bytes(mapped)) == file.stat().st_size  # touches every page, as a running mmap model does
        with pytest.raises(UsageError, match="stays in memory"):
            bench_reads(file, expert_bytes=256 * KIB, lanes=(1,), seconds=QUICK_SECONDS)


def test_a_part_that_stays_in_memory_is_left_out(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_direct(monkeypatch)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 8 * MIB, prot=mmap.PROT_READ) as mapped:
        assert len(bytes(mapped)) == 8 * MIB
        (result,) = bench_reads(file, expert_bytes=256 * KIB, lanes=(1,), seconds=10)
    assert result.reads == 32, "8 of the 16 MiB"


def test_tmpfs_is_refused_whether_it_takes_direct_reads_or_not(memory_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = memory_dir / "data"
    path.write_bytes(os.urandom(2 * MIB))
    with pytest.raises(UsageError, match="tmpfs is memory"):
        bench_reads(path, expert_bytes=256 * KIB, lanes=(1,), seconds=QUICK_SECONDS)
    refuse_direct(monkeypatch)
    with pytest.raises(UsageError, match="tmpfs is memory"):
        bench_reads(path, expert_bytes=256 * KIB, lanes=(1,), seconds=QUICK_SECONDS)


def test_a_directory_on_tmpfs_is_refused_before_anything_is_written(memory_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", None)
    with pytest.raises(UsageError, match="tmpfs is memory"):
        bench_reads(memory_dir)


def test_a_rate_beyond_every_disk_is_refused_as_read_from_memory() -> None:
    assert summarise(4, MIB, 1.0, [0.1] * 60_000, odirect=True).mb_s == pytest.approx(62_914.56)
    with pytest.raises(UsageError, match=r"65000 MB/s at 4 lanes .* read from memory"):
        summarise(4, 1_000_000, 1.0, [0.1] * 65_000, odirect=True)


def test_percentiles_are_those_of_single_reads() -> None:
    result = summarise(1, MIB, 1.0, [0.001] * 98 + [0.5] * 2, odirect=True)
    assert result.latency_ms_p50 == pytest.approx(1)
    assert result.latency_ms_p99 == pytest.approx(500)


def test_reads_are_rounded_up_to_blocks_and_aligned(file: Path) -> None:
    with open_files([file], 300_000, seed=0) as sample:
        ranges = list(itertools.islice(sample.cold_ranges(), 55))
    assert sample.read_bytes == 303_104
    assert {r.nbytes for r in ranges} == {303_104}
    assert all(r.offset % BLOCK_BYTES == 0 and r.offset + r.nbytes <= file.stat().st_size for r in ranges)
    assert len({r.offset for r in ranges}) == 55, "every place once before any comes again"


def test_a_second_measurement_goes_on_with_places_the_first_has_not_read(file: Path) -> None:
    needs_direct(file)
    with open_files([file], 256 * KIB, seed=0) as sample:
        first = {r.offset for r in itertools.islice(sample.cold_ranges(), 32)}
        second = {r.offset for r in itertools.islice(sample.cold_ranges(), 32)}
    assert not first & second


def test_the_seed_decides_the_order(file: Path) -> None:
    def order(seed: int) -> list[int]:
        with open_files([file], 256 * KIB, seed=seed) as sample:
            return [r.offset for r in itertools.islice(sample.cold_ranges(), 64)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2))


def test_holes_of_a_sparse_file_are_not_read(disk_dir: Path) -> None:
    path = disk_dir / "sparse"
    with path.open("wb") as opened:
        opened.truncate(16 * MIB)
        opened.seek(4 * MIB)
        opened.write(os.urandom(MIB))
    with open_files([path], 256 * KIB, seed=0) as sample:
        places = {r.offset for r in itertools.islice(sample.cold_ranges(), 4)}
    if len(places) == 4 and not all(4 * MIB <= offset < 5 * MIB for offset in places):
        pytest.skip("this file system does not tell holes")
    assert places == {4 * MIB + n * 256 * KIB for n in range(4)}


def test_a_file_of_holes_is_refused(disk_dir: Path) -> None:
    path = disk_dir / "empty"
    with path.open("wb") as opened:
        opened.truncate(16 * MIB)
        if os.lseek(opened.fileno(), 0, os.SEEK_HOLE) != 0:
            pytest.skip("this file system does not tell holes")
    with pytest.raises(UsageError, match="is sparse"):
        bench_reads(path, expert_bytes=256 * KIB)


def test_a_directory_gets_a_test_file_that_has_no_name_and_is_gone_afterwards(disk_dir: Path) -> None:
    names: list[list[str]] = []
    (result,) = bench_reads(
        disk_dir, lanes=(2,), seconds=QUICK_SECONDS, test_file_bytes=8 * MIB, progress=lambda _: names.append(os.listdir(disk_dir))
    )
    assert result.bytes == result.reads * MIB
    assert names == [[]]
    assert os.listdir(disk_dir) == []


def test_a_directory_without_room_is_refused_before_anything_is_written(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1279 * MIB))
    monkeypatch.setattr(tempfile, "mkstemp", None)
    with pytest.raises(UsageError, match="1279 MiB are free, a test file needs 1280 MiB"):
        bench_reads(disk_dir)


def test_a_disk_that_fills_up_is_reported_and_nothing_is_left(disk_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(UsageError, match="no test file can be written: No space left"):
        bench_reads(disk_dir, test_file_bytes=8 * MIB)
    assert os.listdir(disk_dir) == []


def test_a_model_is_read_in_its_own_expert_size_over_all_its_shards(disk_dir: Path) -> None:
    paths = write_model(disk_dir / "m.gguf", "tiny-qwen3moe", split=2)
    layout = read_layout(paths[0])
    assert len(layout.paths) == 2
    expected = -(-mean_read_bytes(layout) // BLOCK_BYTES) * BLOCK_BYTES
    (result,) = bench_reads(paths[0], lanes=(1,), seconds=QUICK_SECONDS)
    assert result.bytes == result.reads * expected
    with open_files(layout.paths, mean_read_bytes(layout), seed=0) as sample:
        count = sum(size // expected for size in layout.sizes)
        assert {r.path for r in itertools.islice(sample.cold_ranges(), count)} == {str(path) for path in layout.paths}


def test_the_mean_read_weighs_every_projection_of_every_layer(tiny: Callable[[str], Path]) -> None:
    layout = read_layout(tiny("tiny-mixed"))
    sizes = [tensor.expert_bytes for tensor in layout.experts for _ in range(tensor.n_expert)]
    assert len(set(sizes)) > 1
    assert mean_read_bytes(layout) == sum(sizes) // len(sizes)


def test_the_quick_rate_is_that_of_a_short_measurement(file: Path, disk_dir: Path, tiny: Callable[[str], Path]) -> None:
    assert 0 < quick_disk_rate(file, seconds=QUICK_SECONDS) < 64_000
    # A layout that is given is used, and the model is not read again.
    elsewhere = replace(read_layout(tiny("tiny-qwen3moe")), paths=(file,))
    assert 0 < quick_disk_rate(disk_dir / "gone", layout=elsewhere, seconds=QUICK_SECONDS) < 64_000


def test_the_quick_rate_wants_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory"):
        quick_disk_rate(tmp_path)


def test_lanes_share_the_ranges_and_no_range_is_read_twice(file: Path) -> None:
    with file.open("rb") as opened:
        ranges = [Range(opened.fileno(), str(file), n * 4096, 4096) for n in range(500)]
        wall, latencies = measure_lanes(iter(ranges), read_bytes=4096, lanes=8, seconds=10)
    assert len(latencies) == 500
    assert wall > 0
