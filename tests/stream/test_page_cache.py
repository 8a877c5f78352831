"""The page cache is asked and emptied truthfully, on the real file system and on tmpfs."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from moetriage.stream.page_cache import drop_page_cache, evict, resident_bytes, resident_pages

PAGE = mmap.PAGESIZE


@pytest.fixture
def file(disk_dir: Path) -> Path:
    path = disk_dir / "data"
    path.write_bytes(os.urandom(16 * PAGE + 100))
    return path


def test_a_file_just_written_is_resident_until_it_is_dropped(file: Path) -> None:
    with file.open("rb") as opened:
        size = file.stat().st_size
        assert resident_bytes(opened.fileno(), 0, size) == 17 * PAGE
        assert drop_page_cache([file]) == 0
        assert resident_bytes(opened.fileno(), 0, size) == 0


def test_residency_is_told_page_by_page_from_any_offset(file: Path) -> None:
    drop_page_cache([file])
    with file.open("rb") as opened:
        fd = opened.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead
        os.pread(fd, 1, 5 * PAGE)
        assert resident_pages(fd, 0, 8 * PAGE).tolist() == [False] * 5 + [True] + [False] * 2
        assert resident_pages(fd, 5 * PAGE + 100, 1).tolist() == [True]
        assert resident_pages(fd, 4 * PAGE + 100, PAGE).tolist() == [False, True]
        assert resident_pages(fd, 0, 0).tolist() == []


def test_a_part_in_the_middle_of_what_was_written_at_once_is_evicted(file: Path) -> None:
    with file.open("rb") as opened:
        evict(opened.fileno(), 5 * PAGE, PAGE)
        assert resident_bytes(opened.fileno(), 5 * PAGE, PAGE) == 0


def test_what_a_process_has_mapped_stays_and_is_reported(file: Path) -> None:
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 4 * PAGE, prot=mmap.PROT_READ) as mapped:
        assert len(bytes(mapped)) == 4 * PAGE  # touches every page
        assert 4 * PAGE <= drop_page_cache([file]) < 17 * PAGE


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        drop_page_cache([tmp_path / "gone"])


def test_tmpfs_cannot_be_dropped_and_says_so(memory_dir: Path) -> None:
    path = memory_dir / "data"
    path.write_bytes(bytes(4 * PAGE))
    assert drop_page_cache([path]) == 4 * PAGE
