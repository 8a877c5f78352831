"""Run a child process inside a memory limit, and say what it really took.

In: a limit in bytes and a command. Out: the command's result, the cgroup's own peak, what of it was held and what was page cache. Used by
the demo and the benches: a memory cgroup counts page cache, so a model larger than its limit is honestly larger than memory. Knows nothing
of models. ``budget`` reads limits; this makes one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from moetriage.errors import MoetriageError, UsageError
from moetriage.stream.cgroup_files import read_number, read_table, read_words, write_value
from moetriage.stream.cgroup_paths import CgroupDir, memory_cgroups

_PREFIX = "moetriage-"
#: A process that was killed while it waits for a disk needs a moment to go; beyond this something holds it for good.
_REMOVE_SECONDS = 10.0
#: What the wrapping shell exits with when it cannot enter the cgroup, as timeout and container runtimes do for their own failures.
_CANNOT_ENTER = 125
_PROBE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class _Files:
    """The names of one cgroup version."""

    limit: str
    swap: str
    swap_counts_memory: bool
    current: str
    peak: str
    events: str
    held: tuple[str, ...]
    file: str
    shmem: str


_FILES = {
    1: _Files(
        limit="memory.limit_in_bytes",
        swap="memory.memsw.limit_in_bytes",
        swap_counts_memory=True,
        current="memory.usage_in_bytes",
        peak="memory.max_usage_in_bytes",
        events="memory.oom_control",
        held=("total_rss", "total_shmem"),
        file="total_cache",
        shmem="total_shmem",
    ),
    2: _Files(
        limit="memory.max",
        swap="memory.swap.max",
        swap_counts_memory=False,
        current="memory.current",
        peak="memory.peak",
        events="memory.events",
        held=("anon", "shmem"),
        file="file",
        shmem="shmem",
    ),
}


@dataclass(frozen=True, kw_only=True)
class CgroupUsage:
    """What was sampled from memory.stat, in bytes; each peak is taken by itself, so the two need not be of one moment.

    held_peak_bytes: memory that cannot be taken back: anonymous and shared memory.
    cache_peak_bytes: page cache, which fills whatever the limit leaves.
    samples: how often it was looked at; a short-lived peak between two looks is only in ``MemoryCgroup.peak_bytes``.
    """

    held_peak_bytes: int = 0
    cache_peak_bytes: int = 0
    samples: int = 0


class MemoryCgroup:
    """A memory cgroup that exists inside one ``with`` block; on leaving it, everything in it is killed and it is removed.

    limit_bytes: the limit, swap included (the child gets no swap); the kernel rounds it to pages, and the attribute then says to what.
    sample_seconds: how often memory.stat is looked at for ``stat``.

    It is made below this process's own cgroup where that is possible. On v2 it mostly is not (a cgroup that has processes cannot hand the
    controller down): it is then made above, where the limits of the own cgroup do not apply. A process that is itself ended by a signal
    leaves an empty cgroup behind; the next one made at the same place removes it. Page cache outlives the cgroup: call
    ``page_cache.drop_page_cache`` before each measurement.

    Raises UsageError on entering where none can be made; ``available`` asks beforehand.
    """

    def __init__(
        self, limit_bytes: int, *, sample_seconds: float = 0.05, proc_root: Path = Path("/proc"), sys_root: Path = Path("/sys")
    ) -> None:
        if limit_bytes < 1:
            raise UsageError(f"memory limit of {limit_bytes} bytes: must be at least 1")
        self.limit_bytes = limit_bytes
        self.path: Path | None = None
        self._sample_seconds = sample_seconds
        self._proc_root, self._sys_root = proc_root, sys_root
        self._files = _FILES[1]
        self._own = contextlib.ExitStack()  # holds the lock that says that the owner lives
        self._usage = CgroupUsage()
        self._peak_bytes = 0
        self._oom_kills = 0
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample_until_stopped, name="memory-cgroup-sampler", daemon=True)

    @classmethod
    def available(cls) -> str | None:
        """Return None if a cgroup can be made and entered here, otherwise why not, in one line. Really makes one (some 40 ms)."""
        try:
            with cls(_PROBE_BYTES) as probe:
                child = probe.run([sys.executable, "-I", "-S", "-c", ""], timeout=30, capture_output=True)
        except (MoetriageError, OSError, subprocess.SubprocessError) as error:
            return str(error)
        return None if child.returncode == 0 else f"a child in a memory cgroup ends with {child.returncode}"

    def __enter__(self) -> MemoryCgroup:
        reasons = []
        for cgroup, parent, hand_down in self._candidates():
            self._files = _FILES[cgroup.version]
            try:
                if hand_down:
                    write_value(parent / "cgroup.subtree_control", "+memory")
                self._make(parent)
            except OSError as error:
                reasons.append(f"{parent}: {error.strerror}")
            else:
                return self
        root = "" if os.geteuid() == 0 else "; making one needs root, or a delegated cgroup"
        raise UsageError(f"no memory cgroup can be made here ({'; '.join(reasons) or 'no memory controller is mounted'}){root}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._stop.set()
            self._sampler.join()
            self._look()
        finally:
            self._remove()

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """Return a command that enters the cgroup and then becomes ARGV; give it to ``subprocess`` for control over the child.

        A shell enters, not a ``preexec_fn``: that one can deadlock beside other threads, and Python 3.12 warns of it.
        """
        return ["/bin/sh", "-c", f'echo $$ > "$0" || exit {_CANNOT_ENTER}; exec "$@"', str(self._directory() / "cgroup.procs"), *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float | None = None,
        capture_output: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run ARGV inside the cgroup and return its result; a child that the limit killed has returncode -9 and counts in ``oom_kills``.

        Raises MoetriageError when the child could not enter, subprocess.TimeoutExpired after ``timeout`` seconds; then, and on an
        interrupt, everything in the cgroup is killed.
        """
        try:
            done = subprocess.run(self.wrap(argv), env=env, cwd=cwd, timeout=timeout, capture_output=capture_output, text=True, check=False)
        except BaseException:
            _kill_all(self._directory())
            raise
        if done.returncode == _CANNOT_ENTER:
            raise MoetriageError(f"{self._directory()}: {argv[0]} could not be put into the cgroup (exit status {_CANNOT_ENTER})")
        return subprocess.CompletedProcess(list(argv), done.returncode, done.stdout, done.stderr)

    def peak_bytes(self) -> int:
        """Return the largest memory use, page cache included: the kernel's own peak, or the largest sample where it keeps none."""
        self._look()
        return self._peak_bytes

    def stat(self) -> CgroupUsage:
        """Return what the use consisted of, as sampled so far."""
        self._look()
        return self._usage

    def oom_kills(self) -> int:
        """Return how many processes were killed for crossing the limit."""
        self._look()
        return self._oom_kills

    def _directory(self) -> Path:
        if self.path is None:
            raise RuntimeError("MemoryCgroup is used outside its with block")
        return self.path

    def _candidates(self) -> Iterator[tuple[CgroupDir, Path, bool]]:
        """Yield where one may be made and whether the controller must be handed down first, the least intrusive first."""
        cgroups = memory_cgroups(self._proc_root, self._sys_root)
        for cgroup in cgroups:
            if cgroup.version == 1:
                yield from ((cgroup, parent, False) for parent in dict.fromkeys((cgroup.own, cgroup.mount)))
        for cgroup in cgroups:
            if cgroup.version == 2:
                ready = [level for level in cgroup.levels() if "memory" in read_words(level / "cgroup.subtree_control")]
                able = [level for level in cgroup.levels() if "memory" in read_words(level / "cgroup.controllers") and level not in ready]
                yield from ((cgroup, parent, False) for parent in ready)
                yield from ((cgroup, parent, True) for parent in able)

    def _make(self, parent: Path) -> None:
        self.path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            # Or another run could take the new directory for a stale one before it is locked. Not the parent directory itself: where we run
            # inside such a cgroup already, our parent process holds that one for good.
            with _locked(parent / "cgroup.procs"):
                _remove_stale(parent)
                self.path.mkdir()
                self._own.enter_context(_locked(self.path))
            self._set_limit(self.path)
            self._sampler.start()
        except BaseException:
            self._remove()
            raise

    def _set_limit(self, path: Path) -> None:
        write_value(path / self._files.limit, str(self.limit_bytes))
        self.limit_bytes = read_number(path / self._files.limit) or self.limit_bytes
        if (path / self._files.swap).exists():
            write_value(path / self._files.swap, str(self.limit_bytes if self._files.swap_counts_memory else 0))

    def _remove(self) -> None:
        try:
            _remove_tree(self._directory())
        finally:
            self._own.close()
            self.path = None

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(self._sample_seconds):
            self._look()

    def _look(self) -> None:
        """Take one sample; after the block this does nothing and the last values stand."""
        with self._looking:
            if self.path is None:
                return
            stat = read_table(self.path / "memory.stat")
            held = sum(stat.get(name, 0) for name in self._files.held)
            cache = stat.get(self._files.file, 0) - stat.get(self._files.shmem, 0)
            self._usage = CgroupUsage(
                held_peak_bytes=max(self._usage.held_peak_bytes, held),
                cache_peak_bytes=max(self._usage.cache_peak_bytes, cache),
                samples=self._usage.samples + 1,
            )
            peak = read_number(self.path / self._files.peak) or read_number(self.path / self._files.current) or 0
            self._peak_bytes = max(self._peak_bytes, peak)
            self._oom_kills = read_table(self.path / self._files.events).get("oom_kill", 0)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock on a directory or file; the kernel lets go of it when the process dies, however it dies. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(fd)


def _remove_stale(parent: Path) -> None:
    """Remove cgroups that a killed run left below PARENT; one that still has processes is left alone (rmdir refuses it)."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(path, wait=False):
            path.rmdir()


def _remove_tree(path: Path) -> None:
    """Kill everything in the cgroup, in those a child made inside it too, and remove it. Raises MoetriageError if it will not go."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        _kill_all(path)
        try:
            for directory, _, _ in os.walk(path, topdown=False):
                os.rmdir(directory)
            return
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.ENOTEMPTY) or time.monotonic() > deadline:
                raise MoetriageError(f"cgroup {path} could not be removed ({error.strerror}): remove it with rmdir") from error
        time.sleep(0.005)


def _kill_all(path: Path) -> None:
    for directory, _, _ in os.walk(path, topdown=False):
        for word in read_words(Path(directory) / "cgroup.procs"):
            # 0 stands for a process of another PID namespace, and to kill 0 would be to kill ourselves.
            if int(word) > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)
