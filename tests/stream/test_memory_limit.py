"""Memory limits read from fake /proc and /sys trees: v1, v2, hybrid, nested, containers, damage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from moetriage.stream.cgroup_paths import memory_cgroups
from moetriage.stream.memory_limit import MemoryLimit, memory_limit

GIB = 1 << 30
V1_NO_LIMIT = 9223372036854771712


@dataclass
class FakeHost:
    """A /proc and a /sys in which only what a test writes exists."""

    root: Path

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def meminfo(self, total: int, available: int) -> None:
        self.write(
            "/proc/meminfo", f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0"
        )

    def place(self, *, v1: str | None = None, v2: str | None = None, v1_root: str = "/", v2_root: str = "/") -> None:
        """Write cgroup and mountinfo as the kernel does for a process at these paths, v2 beside v1 when both are given (hybrid)."""
        lines, mounts = ["8:pids:/x", "1:name=systemd:/x"], ["27 1 254:0 / / rw - ext4 /dev/vda rw", "not a mount line"]
        if v1 is not None:
            lines.append(f"4:memory:{v1}")
            mounts.append(f"35 31 0:32 {v1_root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory")
            mounts.append("36 31 0:33 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids")
        if v2 is not None:
            lines.append(f"0::{v2}")
            point = "/sys/fs/cgroup" if v1 is None else "/sys/fs/cgroup/unified"
            mounts.append(f"41 31 0:38 {v2_root} {point} rw shared:3 master:4 - cgroup2 cgroup2 rw,nsdelegate")
            (self.root / point.lstrip("/")).mkdir(parents=True, exist_ok=True)
        self.write("/proc/self/cgroup", "\n".join(lines))
        self.write("/proc/self/mountinfo", "\n".join(mounts))

    def v1(self, path: str, limit: int, usage: int, *, hierarchical: int | None = None, cache: int = 0, use_hierarchy: int = 1) -> None:
        base = f"/sys/fs/cgroup/memory{path}".rstrip("/")
        self.write(f"{base}/memory.limit_in_bytes", limit)
        self.write(f"{base}/memory.usage_in_bytes", usage)
        self.write(f"{base}/memory.use_hierarchy", use_hierarchy)
        smallest = limit if hierarchical is None else hierarchical
        lines = (
            "inactive_file 1",
            f"hierarchical_memory_limit {smallest}",
            f"total_inactive_file {cache // 2}",
            f"total_active_file {cache - cache // 2}",
        )
        self.write(f"{base}/memory.stat", "\n".join(lines))

    def v2(self, path: str, current: int, *, maximum: int | str = "max", high: int | str = "max", cache: int = 0) -> None:
        base = f"/sys/fs/cgroup{path}".rstrip("/")
        self.write(f"{base}/memory.max", maximum)
        self.write(f"{base}/memory.high", high)
        self.write(f"{base}/memory.current", current)
        self.write(f"{base}/memory.stat", f"anon 5\nfile 7\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}")

    def limit(self) -> MemoryLimit:
        return memory_limit(self.root / "proc", self.root / "sys")

    def source(self, path: str) -> str:
        return str(self.root / path.lstrip("/"))


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    fake = FakeHost(tmp_path)
    fake.meminfo(total=64 * GIB, available=40 * GIB)
    return fake


def test_without_cgroups_the_host_s_available_memory_decides(host: FakeHost) -> None:
    assert host.limit() == MemoryLimit(40 * GIB, host.source("/proc/meminfo MemAvailable"), None)
    assert host.limit().hard is None


def test_v2_limit_leaves_what_is_not_used_and_counts_page_cache_as_free(host: FakeHost) -> None:
    host.place(v2="/app")
    host.v2("/app", current=5 * GIB, maximum=8 * GIB, cache=3 * GIB)
    assert host.limit() == MemoryLimit(6 * GIB, host.source("/sys/fs/cgroup/app/memory.max"), 8 * GIB)


def test_v2_memory_high_decides_when_it_is_lower(host: FakeHost) -> None:
    host.place(v2="/app")
    host.v2("/app", current=1 * GIB, maximum=8 * GIB, high=4 * GIB)
    assert host.limit() == MemoryLimit(3 * GIB, host.source("/sys/fs/cgroup/app/memory.high"), 4 * GIB)


def test_v2_the_tightest_ancestor_decides(host: FakeHost) -> None:
    host.place(v2="/slice/app/inner")
    host.v2("/slice/app/inner", current=1 * GIB)
    host.v2("/slice/app", current=1 * GIB, maximum=16 * GIB)
    host.v2("/slice", current=9 * GIB, maximum=20 * GIB)
    assert host.limit() == MemoryLimit(11 * GIB, host.source("/sys/fs/cgroup/slice/memory.max"), 20 * GIB)


def test_v2_the_mount_itself_counts_as_a_level(host: FakeHost) -> None:
    host.place(v2="/")
    host.v2("/", current=1 * GIB, maximum=2 * GIB)
    assert host.limit().available_bytes == 1 * GIB


def test_v2_max_everywhere_is_no_limit(host: FakeHost) -> None:
    host.place(v2="/app")
    host.v2("/app", current=1 * GIB)
    assert host.limit().limit_bytes is None


def test_v1_limit_and_hierarchical_page_cache(host: FakeHost) -> None:
    host.place(v1="/job")
    host.v1("/", V1_NO_LIMIT, 30 * GIB)
    host.v1("/job", 8 * GIB, 5 * GIB, cache=3 * GIB)
    assert host.limit() == MemoryLimit(6 * GIB, host.source("/sys/fs/cgroup/memory/job/memory.limit_in_bytes"), 8 * GIB)


def test_v1_huge_number_is_no_limit(host: FakeHost) -> None:
    host.place(v1="/job")
    host.v1("/job", V1_NO_LIMIT, 5 * GIB)
    assert host.limit().limit_bytes is None


def test_v1_huge_number_is_no_limit_even_without_meminfo(tmp_path: Path) -> None:
    host = FakeHost(tmp_path)
    host.place(v1="/job")
    host.v1("/job", V1_NO_LIMIT, 5 * GIB)
    assert host.limit().available_bytes == 0


def test_v1_ancestor_with_a_fuller_limit_decides(host: FakeHost) -> None:
    host.place(v1="/a/b")
    host.v1("/a/b", V1_NO_LIMIT, 1 * GIB, hierarchical=8 * GIB)
    host.v1("/a", 8 * GIB, 6 * GIB)
    assert host.limit() == MemoryLimit(2 * GIB, host.source("/sys/fs/cgroup/memory/a/memory.limit_in_bytes"), 8 * GIB)


def test_v1_ancestor_above_the_container_s_mount_is_seen_through_the_kernel_s_own_minimum(host: FakeHost) -> None:
    host.place(v1="/docker/abc", v1_root="/docker/abc")
    host.v1("/", V1_NO_LIMIT, 1 * GIB, hierarchical=4 * GIB)
    assert host.limit() == MemoryLimit(3 * GIB, host.source("/sys/fs/cgroup/memory/memory.stat hierarchical_memory_limit"), 4 * GIB)


def test_v1_ancestor_without_hierarchy_does_not_limit(host: FakeHost) -> None:
    host.place(v1="/a/b")
    host.v1("/a/b", 16 * GIB, 1 * GIB)
    host.v1("/a", 2 * GIB, 1 * GIB, use_hierarchy=0)
    assert host.limit().available_bytes == 15 * GIB


def test_hybrid_reads_the_controller_s_v1_files_beside_an_empty_v2(host: FakeHost) -> None:
    host.place(v1="/job", v2="/job")
    host.v1("/job", 8 * GIB, 1 * GIB)
    assert [cgroup.version for cgroup in memory_cgroups(host.root / "proc", host.root / "sys")] == [1, 2]
    assert host.limit().available_bytes == 7 * GIB


def test_hybrid_with_the_controller_in_v2(host: FakeHost) -> None:
    host.place(v1="/job", v2="/job")
    host.v1("/job", 30 * GIB, 1 * GIB)
    host.v2("/unified/job", current=1 * GIB, maximum=3 * GIB)
    assert host.limit().available_bytes == 2 * GIB


@pytest.mark.parametrize("path", ["/../../system.slice/foo", "/kubepods/pod1/gone"])
def test_a_cgroup_that_the_container_cannot_see_falls_back_to_the_top_of_its_mount(host: FakeHost, path: str) -> None:
    host.place(v2=path)
    host.v2("/", current=1 * GIB, maximum=4 * GIB)
    assert host.limit().available_bytes == 3 * GIB


def test_a_mount_of_a_sub_tree_is_matched_by_its_root(host: FakeHost) -> None:
    host.place(v2="/kubepods/pod1/inner", v2_root="/kubepods/pod1")
    host.v2("/", current=1 * GIB, maximum=6 * GIB)
    host.v2("/inner", current=1 * GIB, maximum=4 * GIB)
    assert host.limit() == MemoryLimit(3 * GIB, host.source("/sys/fs/cgroup/inner/memory.max"), 4 * GIB)


def test_a_cgroup_name_with_a_colon_is_kept_whole(host: FakeHost) -> None:
    host.place(v2="/app:1")
    host.v2("/app:1", current=0, maximum=4 * GIB)
    assert host.limit().available_bytes == 4 * GIB


def test_a_mount_point_outside_sys_with_a_blank_is_found(host: FakeHost, tmp_path: Path) -> None:
    point = tmp_path / "my cgroups"
    point.mkdir()
    (point / "memory.max").write_text(f"{GIB}\n")
    escaped = str(point).replace(" ", r"\040")
    host.write("/proc/self/cgroup", "0::/")
    host.write("/proc/self/mountinfo", f"41 31 0:38 / {escaped} rw - cgroup2 cgroup2 rw")
    assert host.limit() == MemoryLimit(GIB, str(point / "memory.max"), GIB)


def test_a_limit_above_the_host_s_memory_does_not_count(host: FakeHost) -> None:
    host.place(v2="/app")
    host.v2("/app", current=0, maximum=64 * GIB)
    assert host.limit() == MemoryLimit(40 * GIB, host.source("/proc/meminfo MemAvailable"), None)


def test_a_host_that_is_shorter_than_the_cgroup_wins_and_keeps_the_hard_limit(host: FakeHost) -> None:
    host.meminfo(total=64 * GIB, available=2 * GIB)
    host.place(v2="/app")
    host.v2("/app", current=1 * GIB, maximum=8 * GIB)
    limit = host.limit()
    assert (limit.available_bytes, limit.limit_bytes) == (2 * GIB, None)
    assert limit.hard == MemoryLimit(7 * GIB, host.source("/sys/fs/cgroup/app/memory.max"), 8 * GIB)


def test_usage_above_the_limit_leaves_nothing_instead_of_a_negative_number(host: FakeHost) -> None:
    host.place(v2="/app")
    host.v2("/app", current=9 * GIB, maximum=8 * GIB)
    assert host.limit().available_bytes == 0


def test_more_page_cache_than_usage_does_not_leave_more_than_the_limit(host: FakeHost) -> None:
    host.place(v2="/app")
    host.v2("/app", current=1 * GIB, maximum=8 * GIB, cache=2 * GIB)
    assert host.limit().available_bytes == 8 * GIB


def test_damaged_files_are_left_out(host: FakeHost) -> None:
    host.place(v2="/app")
    host.write("/sys/fs/cgroup/app/memory.max", "-1")
    host.write("/sys/fs/cgroup/app/memory.high", "soon")
    host.write("/sys/fs/cgroup/app/memory.stat", "inactive_file\nactive_file many")
    host.write("/proc/self/cgroup", "garbage\n0::/app\n:")
    assert host.limit().limit_bytes is None


def test_a_directory_in_place_of_a_file_is_left_out(host: FakeHost) -> None:
    host.place(v2="/app")
    host.v2("/app", current=1 * GIB, maximum=8 * GIB)
    (host.root / "sys/fs/cgroup/app/memory.high").unlink()
    (host.root / "sys/fs/cgroup/app/memory.high").mkdir()
    assert host.limit().available_bytes == 7 * GIB


def test_nothing_readable_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    limit = FakeHost(tmp_path).limit()
    assert (limit.available_bytes, limit.limit_bytes) == (0, None)
    assert "can be read" in limit.source


def test_this_machine_has_a_limit() -> None:
    limit = memory_limit()
    assert limit.available_bytes > 0
    assert limit.source
