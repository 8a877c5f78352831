"""The demo's file lies on a disk with room for it, and goes away whatever ends the demo."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetriage.demo import workspace
from moetriage.demo.workspace import choose_folder, file_system, model_file
from moetriage.errors import UsageError

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture
def write(disk: Path):  # type: ignore[no-untyped-def]
    return lambda: model_file(disk, shape="tiny-qwen3moe", layers=2, keep=False, progress=lambda *_: None)


def test_a_folder_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    monkeypatch.setattr(workspace, "file_system", lambda _folder: "tmpfs")
    with pytest.raises(UsageError, match=r"is in memory \(tmpfs\); name one on a disk with --dir"):
        choose_folder([disk])


def test_the_mount_table_tells_memory_from_disk() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm")
    assert file_system(Path("/dev/shm")) == "tmpfs"
    assert file_system(Path("/proc")) == "proc"


def test_the_folder_with_more_space_is_taken_and_made(monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:
    (disk / "large").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 9 if Path(path).name == "large" else 1))
    assert choose_folder([disk / "small", disk / "large" / "new"]) == disk / "large" / "new"
    assert (disk / "large" / "new").is_dir()
    assert not (disk / "small").exists()


def test_the_first_of_equal_folders_is_taken(disk: Path) -> None:
    assert choose_folder([disk / "a", disk / "b"]) == disk / "a"


def test_a_folder_that_cannot_be_written_is_refused(disk: Path) -> None:
    (disk / "file").write_text("")
    with pytest.raises(UsageError, match="file is not a folder that can be written to"):
        choose_folder([disk / "file"])


def test_a_disk_that_is_too_small_is_refused_with_both_sizes(write, monkeypatch: pytest.MonkeyPatch, disk: Path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(0, 0, 1_000_000))
    with pytest.raises(UsageError, match=r"needs 0.0 GB and the disk has 0.0 GB free; use fewer --layers"), write():
        raise AssertionError("there is no room")
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_the_file_goes_away_with_any_exception(write, disk: Path, error: type[BaseException]) -> None:  # type: ignore[no-untyped-def]
    def write_and_fail() -> None:
        with write() as path:
            assert path.stat().st_size > 1_000_000
            raise error

    with pytest.raises(error):
        write_and_fail()
    assert list(disk.iterdir()) == []


def test_a_kept_file_stays_and_is_used_again(disk: Path) -> None:
    written: list[int] = []

    def kept(layers: int) -> Path:
        with model_file(disk, shape="tiny-qwen3moe", layers=layers, keep=True, progress=lambda n, _total: written.append(n)) as path:
            return path

    path = kept(2)
    assert path.exists()
    assert written
    written.clear()
    assert kept(2) == path
    assert not written
    assert kept(1) != path  # another number of layers is another file
    path.write_bytes(b"GGUF, but not much of one")
    with pytest.raises(UsageError, match="is not the demo's file"):
        kept(2)


def test_what_a_killed_demo_left_is_removed_but_not_what_a_living_one_uses(write, disk: Path) -> None:  # type: ignore[no-untyped-def]
    stale, fresh = disk / "moetriage-demo-killed", disk / "moetriage-demo-begun"
    for folder in (stale, fresh):
        folder.mkdir()
        (folder / "model.gguf").write_text("gigabytes")
    os.utime(stale, (1, 1))
    with write() as living:
        os.utime(living.parent, (1, 1))
        with write() as other:
            assert living.exists()
            assert other.exists()
            assert not stale.exists()
            assert fresh.exists()
