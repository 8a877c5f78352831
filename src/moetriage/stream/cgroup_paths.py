"""Find the memory cgroups that this process lives in.

In: /proc/self/cgroup and /proc/self/mountinfo. Out: for each hierarchy (v1 memory controller, v2) the directory of this process and the
mount it hangs under. Knows no limits and makes nothing: ``budget`` reads limits there, ``cgroup`` makes children there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal


@dataclass(frozen=True)
class CgroupDir:
    """One hierarchy as this process sees it: its own directory and the mount point above it (which may be the same)."""

    version: Literal[1, 2]
    own: Path
    mount: Path

    def levels(self) -> tuple[Path, ...]:
        """Return the directories whose limits apply to this process, its own first, the mount point last."""
        if self.own == self.mount:
            return (self.mount,)
        between = self.own.relative_to(self.mount).parts
        return tuple(self.mount.joinpath(*between[:depth]) for depth in range(len(between), -1, -1))


@dataclass(frozen=True)
class _Mount:
    version: Literal[1, 2]
    root: PurePosixPath
    point: Path


def memory_cgroups(proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> tuple[CgroupDir, ...]:
    """Return the hierarchies that can hold a memory limit of this process; empty where none is visible.

    On a hybrid set-up both versions are returned, although only one of them has the memory controller: its files tell which.
    """
    own_paths = dict(_own_paths(proc_root))
    found: list[CgroupDir] = []
    mounts = list(_mounts(proc_root, sys_root))
    for version in (1, 2):
        of_version = [mount for mount in mounts if mount.version == version and mount.point.is_dir()]
        if of_version:
            found.append(_locate(of_version, own_paths.get(version)))
    return tuple(found)


def _locate(mounts: list[_Mount], own_path: PurePosixPath | None) -> CgroupDir:
    for mount in mounts:
        own = _below(mount, own_path)
        if own is not None and own.is_dir():
            return CgroupDir(mount.version, own, mount.point)
    # In a container the path may be named from outside ("/../..") or lie above what is mounted; then the mount's top is the nearest
    # directory that surely holds this process.
    return CgroupDir(mounts[0].version, mounts[0].point, mounts[0].point)


def _below(mount: _Mount, own_path: PurePosixPath | None) -> Path | None:
    if own_path is None or ".." in own_path.parts:
        return None
    try:
        return mount.point / own_path.relative_to(mount.root)
    except ValueError:
        return None


def _own_paths(proc_root: Path) -> Iterator[tuple[int, PurePosixPath]]:
    for line in _read_lines(proc_root / "self" / "cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        if hierarchy == "0" and not controllers:
            yield 2, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield 1, PurePosixPath(path)


def _mounts(proc_root: Path, sys_root: Path) -> Iterator[_Mount]:
    for line in _read_lines(proc_root / "self" / "mountinfo"):
        before, dash, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if not dash or len(left) < 5:
            continue
        root, point = PurePosixPath(_unescape(left[3])), _under(sys_root, _unescape(left[4]))
        if right[0] == "cgroup2":
            yield _Mount(2, root, point)
        elif right[0] == "cgroup" and "memory" in right[-1].split(","):
            yield _Mount(1, root, point)


def _under(sys_root: Path, mount_point: str) -> Path:
    """Move what the kernel says is below /sys to where sys_root is; mount points elsewhere are taken as they are."""
    path = PurePosixPath(mount_point)
    return sys_root / path.relative_to("/sys") if path.is_relative_to("/sys") else Path(path)


def _unescape(text: str) -> str:
    """Undo the octal escapes that mountinfo writes for blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
