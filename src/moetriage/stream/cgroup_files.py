"""Read and write the one-value and "name number" files of cgroups and /proc.

In: a path. Out: numbers, or nothing where a file is missing, unreadable or says something else: which of these files exist depends on the
kernel, the cgroup version and the container, and no caller can do better than to go on without. Writing, in contrast, reports its errors.
"""

from __future__ import annotations

import os
from pathlib import Path


def read_words(path: Path) -> list[str]:
    """Return the words of a file, none if it cannot be read."""
    return _read(path).split()


def read_number(path: Path) -> int | None:
    """Return the number in a one-line file; None for "max", for a missing or unreadable file and for anything else."""
    text = _read(path).strip()
    return int(text) if _is_number(text) else None


def read_table(path: Path, *, unit: int = 1) -> dict[str, int]:
    """Return the "name number" lines of a file such as memory.stat, numbers times unit; empty when it cannot be read."""
    fields = (line.split() for line in _read(path).splitlines())
    return {field[0]: int(field[1]) * unit for field in fields if len(field) >= 2 and _is_number(field[1])}


def write_value(path: Path, text: str) -> None:
    """Write one value to a file that must exist (a missing controller shows as a missing file). Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
