"""Say how much memory this process may still take.

In: the cgroup files of this process and /proc/meminfo. Out: one ``MemoryLimit`` that names its source. Knows nothing of models or caches.
Host memory alone is the wrong answer in a container: a cache sized by it gets the container killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from moetriage.stream.cgroup_files import read_number, read_table
from moetriage.stream.cgroup_paths import memory_cgroups

#: cgroup v1 writes "no limit" as the largest page-aligned 64-bit number; an exbibyte is beyond every real limit.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """What can still be allocated, in bytes, and what says so.

    available_bytes: what the source leaves, page cache that can be given back included; never negative.
    source: the file that decided, e.g. "/sys/fs/cgroup/memory.max" or "/proc/meminfo MemAvailable".
    limit_bytes: the whole limit where the source is a cgroup (crossing it kills the process), None where it is the host's memory.
    cgroup: the tightest cgroup limit where there is one but the host's memory is shorter still.
    """

    available_bytes: int
    source: str
    limit_bytes: int | None
    cgroup: MemoryLimit | None = None

    @property
    def hard(self) -> MemoryLimit | None:
        """Return the limit that kills when it is crossed, None without one."""
        return self if self.limit_bytes is not None else self.cgroup


def memory_limit(proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")) -> MemoryLimit:
    """Return the smallest of what each cgroup level and the host leave to this process.

    Looks at every level from the process's own cgroup up to the mount, since the tightest may be any of them. What cannot be read is left
    out; where nothing can be, 0 bytes are available, because a guess would risk the process.
    """
    meminfo = read_table(proc_root / "meminfo", unit=1024)
    # A limit at or above the host's memory never binds before the host does.
    ceiling = min(meminfo.get("MemTotal:", _NO_LIMIT_BYTES), _NO_LIMIT_BYTES)
    limits = [limit for limit in _cgroup_limits(proc_root, sys_root) if limit.limit_bytes is not None and limit.limit_bytes < ceiling]
    tightest = min(limits, key=lambda limit: limit.available_bytes, default=None)
    if "MemAvailable:" not in meminfo:
        return tightest or MemoryLimit(0, f"neither a cgroup limit nor {proc_root / 'meminfo'} can be read", None)
    host = MemoryLimit(meminfo["MemAvailable:"], f"{proc_root / 'meminfo'} MemAvailable", None)
    if tightest is None:
        return host
    return tightest if tightest.available_bytes <= host.available_bytes else replace(host, cgroup=tightest)


def _cgroup_limits(proc_root: Path, sys_root: Path) -> Iterator[MemoryLimit]:
    for cgroup in memory_cgroups(proc_root, sys_root):
        yield from _v1_limits(cgroup.levels()) if cgroup.version == 1 else _v2_limits(cgroup.levels())


def _v2_limits(levels: tuple[Path, ...]) -> Iterator[MemoryLimit]:
    for level in levels:
        stat = read_table(level / "memory.stat")
        cache = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        used = read_number(level / "memory.current") or 0
        # Above memory.high nothing is killed, but every allocation is throttled: as a size for a cache it is as final as memory.max.
        for name in ("memory.max", "memory.high"):
            limit = read_number(level / name)
            if limit is not None:
                yield _leave(limit, used, cache, str(level / name))


def _v1_limits(levels: tuple[Path, ...]) -> Iterator[MemoryLimit]:
    for depth, level in enumerate(levels):
        stat = read_table(level / "memory.stat")
        cache = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))
        used = read_number(level / "memory.usage_in_bytes") or 0
        limit = read_number(level / "memory.limit_in_bytes")
        if limit is not None:
            yield _leave(limit, used, cache, str(level / "memory.limit_in_bytes"))
        # The kernel's own minimum over all ancestors: in a container the tightest of them may lie above what is mounted.
        if depth == 0 and "hierarchical_memory_limit" in stat:
            yield _leave(stat["hierarchical_memory_limit"], used, cache, f"{level / 'memory.stat'} hierarchical_memory_limit")
        above = levels[depth + 1] if depth + 1 < len(levels) else None
        if above is not None and read_number(above / "memory.use_hierarchy") == 0:
            return  # old kernels: this ancestor neither counts nor limits what its children use


def _leave(limit: int, used: int, cache: int, source: str) -> MemoryLimit:
    held = max(0, used - cache)
    return MemoryLimit(max(0, limit - held), source, limit)
