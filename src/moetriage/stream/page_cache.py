"""Ask about and empty the kernel's page cache for parts of a file.

In: open files or paths and byte ranges. Out: how much of them is in memory. A measurement of a disk or of a model "larger than memory" is
worthless while the page cache holds the file; the benches use this to make sure, and to refuse a number where they cannot.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetriage.types import MIB

#: The largest folio of the page cache, which is aligned to its size: a huge page.
_FOLIO_BYTES = 2 * MIB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def drop_page_cache(paths: Iterable[Path | str]) -> int:
    """Write back and evict the page cache of the files; return the bytes that stayed in memory all the same.

    What another process has mapped or locked, and everything on tmpfs, cannot be evicted: a caller that needs a cold file checks for 0.
    Raises OSError for a file that cannot be opened.
    """
    resident = 0
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            evict(fd)
            resident += resident_bytes(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)
    return resident


def evict(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Write back the file, then evict the range (0 bytes: to the end of the file) from the page cache as far as the kernel can.

    Somewhat more than the range goes: the kernel keeps a large folio of which only a part is named.
    """
    os.fsync(fd)  # dirty pages are never evicted
    start = offset // _FOLIO_BYTES * _FOLIO_BYTES
    end = -(-(offset + nbytes) // _FOLIO_BYTES) * _FOLIO_BYTES
    os.posix_fadvise(fd, start, end - start if nbytes else 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(fd: int, offset: int, nbytes: int) -> int:
    """Return how many bytes of the range lie in the page cache, counted in whole pages."""
    return int(resident_pages(fd, offset, nbytes).sum()) * mmap.PAGESIZE


def resident_pages(fd: int, offset: int, nbytes: int) -> NDArray[np.bool_]:
    """Return for each page that the range touches whether it is in the page cache.

    The kernel answers "all of them" to a user who neither owns the file nor may write it (Linux 5.2 and later), which makes callers refuse
    instead of trusting. Raises OSError where the file cannot be mapped.
    """
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = offset + nbytes - start
    if nbytes <= 0:
        return np.zeros(0, dtype=np.bool_)
    with mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as mapped:
        pages = np.zeros(-(-length // mmap.PAGESIZE), dtype=np.uint8)
        view = np.frombuffer(mapped, dtype=np.uint8)
        failed = _libc.mincore(view.ctypes.data, length, pages.ctypes.data)
        del view  # the mapping cannot be closed while an array looks into it
        if failed:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    first = (offset - start) // mmap.PAGESIZE
    return (pages[first:] & 1).astype(np.bool_)
