"""On a fake tree, cgroup v2 is set up as the kernel wants it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moetriage.errors import UsageError
from moetriage.stream.cgroup import MemoryCgroup
from moetriage.types import MIB


@pytest.fixture
def fake_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cgroup v2 tree /app/run in plain directories, whose mkdir and rmdir do what the kernel's do for the files inside."""
    top = tmp_path / "sys/fs/cgroup"
    own = top / "app/run"
    own.mkdir(parents=True)
    for level, handed_down in ((top, "memory pids"), (top / "app", "memory"), (own, "")):
        (level / "cgroup.controllers").write_text("memory pids\n")
        (level / "cgroup.procs").write_text("")
        (level / "cgroup.subtree_control").write_text(handed_down)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/app/run\n")
    (tmp_path / "proc/self/mountinfo").write_text("41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    make, remove = os.mkdir, os.rmdir
    files = {"max": "max", "swap.max": "max", "current": str(7 * MIB), "stat": "anon 5\nfile 9\nshmem 2", "events": "low 0\noom_kill 3"}

    def mkdir(path: Path, mode: int = 0o777) -> None:
        make(path, mode)
        if "memory" in (path.parent / "cgroup.subtree_control").read_text():
            for name, text in files.items():
                (path / f"memory.{name}").write_text(text)

    def rmdir(path: Path | str) -> None:
        for file in Path(path).iterdir():
            file.unlink()
        remove(path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "rmdir", rmdir)
    return tmp_path


def v2(root: Path) -> MemoryCgroup:
    return MemoryCgroup(64 * MIB, proc_root=root / "proc", sys_root=root / "sys")


def test_without_any_controller_the_reason_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no memory controller is mounted") as error, v2(tmp_path):
        pass
    assert "\n" not in str(error.value)


def test_v2_is_made_in_the_nearest_ancestor_that_hands_the_controller_down(fake_v2: Path) -> None:
    with v2(fake_v2) as cgroup:
        assert cgroup.path is not None
        assert cgroup.path.parent == fake_v2 / "sys/fs/cgroup/app"
        assert (cgroup.path / "memory.max").read_text() == str(64 * MIB)
        assert (cgroup.path / "memory.swap.max").read_text() == "0"
        path = cgroup.path
    assert not path.exists()


def test_v2_without_a_kernel_peak_samples_the_current_use(fake_v2: Path) -> None:
    with v2(fake_v2) as cgroup:
        assert cgroup.path is not None
        assert cgroup.peak_bytes() == 7 * MIB
        (cgroup.path / "memory.current").write_text(str(9 * MIB))
        assert cgroup.peak_bytes() == 9 * MIB
        (cgroup.path / "memory.current").write_text(str(8 * MIB))
        assert cgroup.peak_bytes() == 9 * MIB
    assert cgroup.stat().held_peak_bytes == 7
    assert cgroup.stat().cache_peak_bytes == 7
    assert cgroup.oom_kills() == 3


def test_v2_prefers_the_kernel_s_peak(fake_v2: Path) -> None:
    with v2(fake_v2) as cgroup:
        assert cgroup.path is not None
        (cgroup.path / "memory.peak").write_text(str(11 * MIB))
        assert cgroup.peak_bytes() == 11 * MIB


def test_v2_that_hands_nothing_down_is_asked_to(fake_v2: Path) -> None:
    top = fake_v2 / "sys/fs/cgroup"
    for level in (top, top / "app"):
        (level / "cgroup.subtree_control").write_text("")
    with v2(fake_v2) as cgroup:
        assert cgroup.path is not None
        assert cgroup.path.parent == top / "app/run"
    assert (top / "app/run/cgroup.subtree_control").read_text() == "+memory"


def test_v2_where_nothing_can_be_made_says_why_for_every_place(fake_v2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: int = 0o777) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UsageError, match=r"app: Read-only file system; .*cgroup: Read-only") as error, v2(fake_v2):
        pass
    assert "\n" not in str(error.value)
