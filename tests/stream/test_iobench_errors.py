"""What the disk benchmark cannot measure it refuses, by name."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from moetriage.errors import ModelFileError, UsageError
from moetriage.stream.disk_sample import Range
from moetriage.stream.iobench import bench_reads, measure_lanes, quick_disk_rate
from moetriage.types import MIB

KIB = 1024


@pytest.mark.parametrize("size", [0, 1, MIB - 1])
def test_a_file_shorter_than_a_read_is_refused_with_both_sizes(disk_dir: Path, size: int) -> None:
    path = disk_dir / "short"
    path.write_bytes(bytes(size))
    with pytest.raises(UsageError, match=f"{size} bytes are less than one read of {MIB} bytes"):
        bench_reads(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone: cannot be opened: No such file"):
        bench_reads(tmp_path / "gone")


def test_an_unreadable_file_is_named(file: Path) -> None:
    file.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(ModelFileError, match="Permission denied"):
            bench_reads(file, expert_bytes=256 * KIB)
    finally:
        os.seteuid(user)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        bench_reads(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        quick_disk_rate(tmp_path / "pipe")


def test_a_failing_read_names_file_and_offset(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, buffers: Sequence[mmap.mmap], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with file.open("rb") as opened:
        ranges = [Range(opened.fileno(), str(file), 8192, 4096)]
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(ModelFileError, match="reading 4096 bytes failed: Input/output error") as error:
            measure_lanes(iter(ranges), read_bytes=4096, lanes=3, seconds=1)
    assert (error.value.path, error.value.offset) == (str(file), 8192)


def test_a_file_shortened_meanwhile_is_an_error(file: Path) -> None:
    with file.open("rb") as opened:
        ranges = [Range(opened.fileno(), str(file), 32 * MIB, 4096)]
        with pytest.raises(ModelFileError, match="a read of 4096 bytes gave 0"):
            measure_lanes(iter(ranges), read_bytes=4096, lanes=1, seconds=1)


def test_a_damaged_model_is_refused_as_such(disk_dir: Path) -> None:
    path = disk_dir / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(2 * MIB))
    with pytest.raises(ModelFileError):
        bench_reads(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lanes": (0,)}, "0 lanes: must be between 1 and 32"),
        ({"lanes": (4, 33)}, "33 lanes: must be between 1 and 32"),
        ({"seconds": 0.0}, "must be above 0"),
        ({"seconds": float("nan")}, "must be above 0"),
        ({"seconds": float("inf")}, "must be above 0"),
        ({"expert_bytes": 0}, "0 bytes for a read"),
        ({"test_file_bytes": -1}, "-1 bytes for the test file"),
    ],
)
def test_bad_settings_are_refused(file: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_reads(file, **settings)  # type: ignore[arg-type]
