"""Token ids on disk: raw little-endian 16-bit numbers in shards, one behind the other. Ids in, files and digests out; and back.

Deliberately unknown here: what the ids mean, and which of them make a batch (``data``).
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetriage.errors import UsageError

#: Tokens of a shard; a shard is what is read, hashed and copied as one.
SHARD_TOKENS = 8 * 1024 * 1024
DTYPE = np.dtype("<u2")


def write_file(path: Path, content: bytes) -> str:
    """Write a file down to the disk and return its sha256. Raises UsageError, with the path, if that fails."""
    try:
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
    return hashlib.sha256(content).hexdigest()


def write_shards(folder: Path, name: str, ids: NDArray[np.uint16], shard_tokens: int = SHARD_TOKENS) -> list[dict[str, Any]]:
    """Write ids as ``name-00000.bin`` and so on; return each shard's file name, number of tokens and sha256."""
    shards = []
    for number, start in enumerate(range(0, max(len(ids), 1), shard_tokens)):
        part = ids[start : start + shard_tokens].astype(DTYPE)
        file = f"{name}-{number:05d}.bin"
        shards.append({"file": file, "tokens": len(part), "sha256": write_file(folder / file, part.tobytes())})
    return shards


class TokenStream:
    """The ids of several shards as one row, read where they are needed."""

    def __init__(self, folder: Path, shards: Sequence[dict[str, Any]]) -> None:
        """shards: what ``write_shards`` returned. Raises UsageError for a file that is missing or of another length."""
        self._parts = [_mapped(folder / shard["file"], int(shard["tokens"])) for shard in shards]
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        """Return ids ``start`` up to ``start + count``, all of which must exist."""
        assert 0 <= start <= start + count <= len(self)
        return np.concatenate([part.astype(np.int64) for part in self._pieces(start, start + count)])

    def pieces(self, count: int) -> Iterator[NDArray[np.int64]]:
        """Yield all ids in order, ``count`` at a time."""
        return (self.read(start, min(count, len(self) - start)) for start in range(0, len(self), count))

    def _pieces(self, start: int, end: int) -> Iterator[NDArray[np.uint16]]:
        first = int(np.searchsorted(self._ends, start, side="right"))
        for part, part_end in zip(self._parts[first:], self._ends[first:], strict=True):
            offset = int(part_end) - len(part)
            yield part[max(start - offset, 0) : end - offset]
            if part_end >= end:
                return


def verify(folder: Path, files: Sequence[dict[str, Any]]) -> None:
    """Read all files (``file``, ``sha256``) once and raise UsageError for one that is missing or whose sha256 is not the recorded one."""
    for about in files:
        path = folder / about["file"]
        _file_bytes(path)
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}; build the data again") from error
        if digest != about["sha256"]:
            raise UsageError(f"{path}: is not what moetriage data build wrote (sha256 differs); build the data again")


def _file_bytes(path: Path) -> int:
    """Return a file's size. Raises UsageError for what is none: a pipe would be waited for without end."""
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}; build the data again") from error
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path}: is no regular file; build the data again")
    return found.st_size


def _mapped(path: Path, n_tokens: int) -> NDArray[np.uint16]:
    nbytes = _file_bytes(path)
    if nbytes != n_tokens * DTYPE.itemsize:
        raise UsageError(f"{path}: has {nbytes} bytes, {n_tokens * DTYPE.itemsize} were written; build the data again")
    try:
        return np.memmap(path, dtype=DTYPE, mode="r") if n_tokens else np.empty(0, dtype=DTYPE)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
