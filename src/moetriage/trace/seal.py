"""A digest of a whole file, kept inside that file, so that a damaged Parquet trace is noticed before it is parsed.

Parquet's own page checksums are neither written nor read by polars, and a flipped bit in a page can abort the whole process there
(an allocation of exabytes, polars 2.1). The mark is put into the file's metadata by whoever writes it; ``seal`` then replaces the
zeros after it by the digest of the file as it is with the zeros.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

_MARK = b"moetriage-seal:"
_DIGEST_BYTES = 16
_ZEROS = b"0" * (2 * _DIGEST_BYTES)
_PARQUET_MAGIC = b"PAR1"
_CHUNK_BYTES = 1 << 20

#: To be written into the file's metadata (once), before it is sealed.
UNSEALED = (_MARK + _ZEROS).decode()


def seal(path: Path) -> None:
    """Put the digest in its place. The file must be Parquet with ``UNSEALED`` in its metadata; it does not grow. Raises OSError."""
    with path.open("r+b") as file:
        place = _place(file)
        assert place is not None, f"{path} has no place for a seal"
        digest = _digest(file, place)
        file.seek(place)
        file.write(digest)


def seal_fault(path: Path) -> str | None:
    """Return why a file is not what was sealed, or None. Raises OSError."""
    with path.open("rb") as file:
        place = _place(file)
        if place is None:
            return "is not a route trace written by moetriage, or is cut short"
        digest = _digest(file, place)
        file.seek(place)
        if file.read(len(_ZEROS)) != digest:
            return "is damaged: its bytes are not those that were written"
        return None


def _place(file: BinaryIO) -> int | None:
    """Return the offset of the digest, which is in the footer: the file ends with it, its length (4 bytes) and the magic."""
    size = file.seek(0, 2)
    if size < 12:
        return None
    file.seek(size - 8)
    footer_bytes = int.from_bytes(file.read(4), "little")
    start = size - 8 - footer_bytes
    if file.read(4) != _PARQUET_MAGIC or start < 4:
        return None
    file.seek(start)
    found = file.read(footer_bytes).rfind(_MARK)
    place = start + found + len(_MARK)
    return place if found >= 0 and place + len(_ZEROS) <= size - 8 else None


def _digest(file: BinaryIO, place: int) -> bytes:
    # Read in chunks, not mapped: a mapping of the whole file would count as our memory.
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    file.seek(0)
    left = place
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        digest.update(chunk)
        left -= len(chunk)
    digest.update(_ZEROS)
    file.seek(place + len(_ZEROS))
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest().encode()
