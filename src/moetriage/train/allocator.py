"""Ask the C library to keep memory that is freed; nothing in, nothing out.

A training step frees and takes hundreds of blocks of many MB. glibc gives each back to the system at once, which then hands out zeroed
pages again one by one. Other C libraries are left as they are.
"""

from __future__ import annotations

import ctypes

#: Parameters of glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Let this process reuse what it freed, for the rest of its life; return whether the C library took it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE - 1))
