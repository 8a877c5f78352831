"""Fixtures that the tests of streaming share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moetriage.types import MIB


def file_system(path: Path) -> str:
    """Return the type of the file system that holds the path, as the mount table names it; "" if it is not found there."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    lines = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return next((fields[fields.index("-") + 1] for fields in lines if fields[2] == number), "")


@pytest.fixture
def disk_dir(tmp_path: Path) -> Iterator[Path]:
    """An empty directory on a disk: /tmp is tmpfs on some systems, /var/tmp hardly ever."""
    if file_system(tmp_path) != "tmpfs":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        if file_system(Path(name)) == "tmpfs":
            pytest.skip("neither /tmp nor /var/tmp is on a disk")
        yield Path(name)


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """An empty directory on tmpfs."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK) or file_system(shm) != "tmpfs":
        pytest.skip("/dev/shm is no writable tmpfs here")
    with tempfile.TemporaryDirectory(dir=shm) as name:
        yield Path(name)


@pytest.fixture
def file(disk_dir: Path) -> Path:
    """A file on a disk, of no whole number of blocks, with nothing in it that could be compressed."""
    path = disk_dir / "data"
    path.write_bytes(os.urandom(16 * MIB + 777))
    return path


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    """A tiny model, not to be changed."""
    return tiny("tiny-qwen3moe")
