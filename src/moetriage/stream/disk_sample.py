"""Choose file ranges whose reading surely goes to the disk.

In: files and a read size. Out: open file descriptors with shuffled, aligned ranges, read past the page cache (O_DIRECT, verified) or, where
a file system cannot do that, evicted from it and checked. What cannot be kept out of memory is refused: a rate without a disk behind it
is worse than none. Knows no model format and takes no time. Caches below the kernel (drive, hypervisor, server) cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moetriage.errors import ModelFileError, UsageError
from moetriage.stream.page_cache import evict, resident_bytes, resident_pages
from moetriage.types import MIB

#: The largest logical block of the disks we know; O_DIRECT wants offset, length and address in multiples of the disk's own.
BLOCK_BYTES = 4096
#: More ranges than any run of seconds gets through; keeps the shuffle of a terabyte file small.
_MAX_RANGES = 1 << 16
#: Places of a file at which to look for one that is not in memory, before direct reads are given up as unverifiable.
_MAX_PROBES = 64
#: Left free on the disk beside a test file: a full disk hurts others.
_SPARE_BYTES = 256 * MIB
#: File systems by the magic of statfs(2) that serve reads from memory whatever one asks for.
_IN_MEMORY = {
    0x01021994: "tmpfs is memory",
    0x858458F6: "ramfs is memory",
    0x958458F6: "hugetlbfs is memory",
    0x2FC12FC1: "ZFS reads through a cache of its own that nobody can look into",
}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Range:
    """One read: ``nbytes`` (a multiple of the block) from ``offset`` (likewise) of the file open as ``fd``; ``path`` is for messages."""

    fd: int
    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _File:
    path: str
    fd: int
    size: int


class DiskSample:
    """Shuffled reads over open files; made by ``open_files`` and ``open_test_file``, which close what it uses."""

    def __init__(self, files: Sequence[_File], ranges: Sequence[Range], *, odirect: bool) -> None:
        self.odirect = odirect
        self.read_bytes = ranges[0].nbytes
        self._files = files
        self._ranges = ranges
        self._endless = itertools.cycle(ranges)

    def cold_ranges(self) -> Iterator[Range]:
        """Return ranges that are not in the page cache; threads may share the iterator.

        Direct reads go on where the last call's iterator stopped and never end, so that a second measurement does not ask a drive's own
        cache for what the first has read. Buffered reads end after one pass: what was read once is in memory. Raises UsageError where the
        page cache cannot be emptied.
        """
        if self.odirect:
            return self._endless
        resident: dict[int, NDArray[np.bool_]] = {}
        for file in self._files:
            evict(file.fd)
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_RANDOM)  # readahead would bring in what others are about to read
            resident[file.fd] = resident_pages(file.fd, 0, file.size)
        cold = [r for r in self._ranges if not resident[r.fd][r.offset // mmap.PAGESIZE : -(-(r.offset + r.nbytes) // mmap.PAGESIZE)].any()]
        if not cold:
            raise UsageError(
                f"{self._files[0].path}: cannot be measured: the file system refuses direct reads and the file stays in memory (another "
                "process has it mapped, or only the file's owner may ask); measure a copy, or a directory on the same disk"
            )
        return iter(cold)


def kind_of(path: Path) -> Literal["file", "directory"]:
    """Say what there is to measure. Raises ModelFileError for what is missing, out of reach, or neither of the two."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ModelFileError(str(path), f"cannot be opened: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        return "directory"
    if not stat.S_ISREG(mode):
        raise ModelFileError(str(path), "is not a regular file; give a model, a file or a directory")
    return "file"


@contextlib.contextmanager
def open_files(paths: Sequence[Path], read_bytes: int, *, seed: int) -> Iterator[DiskSample]:
    """Open existing files for reads of ``read_bytes``, rounded up to whole blocks.

    Raises ModelFileError for a file that cannot be opened, UsageError where all are shorter than one read, sparse, or in memory.
    """
    with contextlib.ExitStack() as stack:
        yield _sample([_open(stack, path) for path in paths], read_bytes, seed, stack)


@contextlib.contextmanager
def open_test_file(directory: Path, read_bytes: int, *, seed: int, size: int) -> Iterator[DiskSample]:
    """Write a file of random bytes into the directory and open it; it has no name by then, so it goes away however the process ends.

    Raises UsageError where the disk lacks the space, the directory cannot be written or is in memory.
    """
    with contextlib.ExitStack() as stack:
        try:
            _refuse_memory(str(directory), _opened(stack, directory, os.O_RDONLY | os.O_DIRECTORY))
            free = shutil.disk_usage(directory).free
            if free < size + _SPARE_BYTES:
                raise UsageError(f"{directory}: {free // MIB} MiB are free, a test file needs {(size + _SPARE_BYTES) // MIB} MiB")
            fd, name = tempfile.mkstemp(prefix="moetriage-iobench-", dir=directory)
            stack.callback(os.close, fd)
            os.unlink(name)
            _fill(fd, size, seed)
        except OSError as error:
            raise UsageError(f"{directory}: no test file can be written: {error.strerror}") from error
        yield _sample([_File(f"test file in {directory}", fd, size)], read_bytes, seed, stack)


def _sample(files: list[_File], read_bytes: int, seed: int, stack: contextlib.ExitStack) -> DiskSample:
    read_bytes = -(-read_bytes // BLOCK_BYTES) * BLOCK_BYTES
    long_enough = [file for file in files if file.size >= read_bytes]
    if not long_enough:
        longest = max(files, key=lambda file: file.size)
        message = f"{longest.path}: {longest.size} bytes are less than one read of {read_bytes} bytes; give a larger file or a directory"
        raise UsageError(message)
    for file in long_enough:
        _refuse_memory(file.path, file.fd)
    places = _shuffled(long_enough, read_bytes, seed)
    offsets: dict[_File, list[int]] = {}
    for file, offset in places:
        offsets.setdefault(file, []).append(offset)
    opened = {file: _open_direct(stack, file, offsets[file][:_MAX_PROBES], read_bytes) for file in offsets}
    direct_fds = {file: fd for file, fd in opened.items() if fd is not None}
    odirect = len(direct_fds) == len(opened)
    fds = direct_fds if odirect else {file: file.fd for file in long_enough}
    return DiskSample(long_enough, [Range(fds[file], file.path, offset, read_bytes) for file, offset in places], odirect=odirect)


def _open(stack: contextlib.ExitStack, path: Path) -> _File:
    kind_of(path)  # before opening: to open a pipe would be to wait for its writer
    try:
        fd = _opened(stack, path, os.O_RDONLY)
    except OSError as error:
        raise ModelFileError(str(path), f"cannot be opened: {error.strerror}") from error
    return _File(str(path), fd, os.fstat(fd).st_size)


def _opened(stack: contextlib.ExitStack, path: Path | str, flags: int) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    return fd


def _refuse_memory(path: str, fd: int) -> None:
    buffer = ctypes.create_string_buffer(256)  # struct statfs is 120 bytes and begins with f_type on every 64-bit Linux
    if _libc.fstatfs(fd, buffer) == 0:
        reason = _IN_MEMORY.get(int.from_bytes(buffer.raw[:8], sys.byteorder) & 0xFFFFFFFF)
        if reason is not None:
            raise UsageError(f"{path}: cannot be measured: {reason}; give a path on a disk")


def _shuffled(files: Sequence[_File], read_bytes: int, seed: int) -> list[tuple[_File, int]]:
    """Return disjoint places in random order, only such as have disk blocks: a hole in a sparse file reads as zeros from memory."""
    slots = np.array([file.size // read_bytes for file in files])
    ends = np.cumsum(slots)
    chosen = np.random.default_rng(seed).choice(ends[-1], size=min(int(ends[-1]), _MAX_RANGES), replace=False)
    which = np.searchsorted(ends, chosen, side="right")
    offsets = (chosen - (ends - slots)[which]) * read_bytes
    dense = {file for file in files if _is_stored(file, 0, file.size)}  # nearly always all: saves two calls for each place
    places = [(files[index], offset) for index, offset in zip(which.tolist(), offsets.tolist(), strict=True)]
    stored = [(file, offset) for file, offset in places if file in dense or _is_stored(file, offset, read_bytes)]
    if not stored:
        raise UsageError(f"{files[0].path}: is sparse: no {read_bytes} bytes in a row are on the disk; give a file with data")
    return stored


def _is_stored(file: _File, offset: int, nbytes: int) -> bool:
    try:
        return os.lseek(file.fd, offset, os.SEEK_DATA) == offset and os.lseek(file.fd, offset, os.SEEK_HOLE) >= offset + nbytes
    except OSError as error:
        return error.errno != errno.ENXIO  # ENXIO: nothing but a hole to the end; anything else: this file system cannot tell


def _open_direct(stack: contextlib.ExitStack, file: _File, offsets: Sequence[int], nbytes: int) -> int | None:
    """Return a descriptor for direct reads, None where the file system refuses them, fakes them or returns wrong bytes."""
    try:
        fd = _opened(stack, f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return None
    for offset in offsets:
        evict(file.fd, offset, nbytes)
        # Only where nothing is in memory can one see that a direct read leaves nothing there.
        if resident_bytes(file.fd, offset, nbytes) == 0:
            return fd if _is_direct(fd, file, offset, nbytes) else None
    return None


def _is_direct(fd: int, file: _File, offset: int, nbytes: int) -> bool:
    try:
        with mmap.mmap(-1, nbytes) as buffer:
            count = os.preadv(fd, [buffer], offset)
            in_memory = resident_bytes(file.fd, offset, nbytes) > 0
            # FUSE has been seen to open with O_DIRECT and to return garbage.
            equal = count == nbytes and bytes(buffer) == os.pread(file.fd, nbytes, offset)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise ModelFileError(file.path, f"cannot be read: {error.strerror}", offset=offset) from error
    evict(file.fd, offset, nbytes)
    return equal and not in_memory


def _fill(fd: int, size: int, seed: int) -> None:
    """Write ``size`` random bytes, which no file system can store as a hole or compress."""
    chunk = bytearray(np.random.default_rng(seed).bytes(16 * MIB))
    for number, at in enumerate(range(0, size, len(chunk))):
        chunk[:8] = number.to_bytes(8, "little")
        view = memoryview(chunk)[: size - at]
        while view:
            view = view[os.write(fd, view) :]
    os.fsync(fd)
