"""Read the header of one GGUF file with the library that will load it, surviving whatever the file holds.

In: a path. Out: an open ``GgufHeader`` (metadata values, tensor infos, the C context for writers). It knows the container format
only: keys have no meaning here and tensors no role; that is ``layout``'s job.

libggml parses the header; nothing is parsed twice. Python only bounds what it is shown: a header that claims impossible counts is
refused unread, and the library sees at most the first ``WINDOWS[-1]`` bytes, because it allocates an array of strings (32 bytes each,
twice) before reading the first one: an array length of 1 GiB inside a 17 GB file would take 64 GB. No mutation of a header made it
crash within such a window.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moetriage.errors import ModelFileError
from moetriage.gguf import ggml_api
from moetriage.gguf.ggml_api import NUMBER_CTYPES, GgufInitParams, GgufType, library

#: Bytes of the file shown to the parser, tried in turn. Headers of real models take 1 to 20 MiB, nearly all of it the tokenizer.
WINDOWS = (8 * 1024 * 1024, 64 * 1024 * 1024)
#: Smallest encodings: a key of one letter with a one-byte value; a tensor without name and dimensions.
_MIN_KEY_BYTES = 14
_MIN_TENSOR_BYTES = 24
_PREAMBLE = struct.Struct("<4sIqq")
#: Arrays up to this length are read as values (one per layer at most, see LLAMA_MAX_LAYERS); longer ones are tokenizer tables.
MAX_SHORT_ARRAY = 512
#: Reads after which the search for the faulty offset is given up (a tokenizer takes two a token).
_MAX_TRACED_READS = 1_000_000


def whole(value: object) -> int:
    """Return a metadata value whose type was checked to be an integer."""
    assert type(value) is int
    return value


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file; ``offset`` is the absolute byte where its data starts, ``ne`` always has four dimensions."""

    name: str
    ggml_type: int
    ne: tuple[int, int, int, int]
    offset: int
    nbytes: int


class GgufHeader:
    """An open header; valid inside ``open_header`` only, values already taken from it stay valid."""

    def __init__(self, path: Path, size: int, context: int) -> None:
        self.path = path
        self.size = size
        self.context = context
        lib = library()
        self.alignment = int(lib.gguf_get_alignment(context))
        self.data_offset = int(lib.gguf_get_data_offset(context))

    @cached_property
    def types(self) -> dict[str, GgufType]:
        """Type of each key's value (ARRAY for arrays), in file order."""
        return {key: kind for key, (_, kind) in self._entries.items()}

    @cached_property
    def scalars(self) -> dict[str, object]:
        """Value of each key that is not an array."""
        return {key: self._scalar(i, kind) for key, (i, kind) in self._entries.items() if kind != GgufType.ARRAY}

    @cached_property
    def arrays(self) -> dict[str, tuple[object, ...]]:
        """Values of each numeric array of at most ``MAX_SHORT_ARRAY`` elements."""
        read = {key: self._numbers(i) for key, (i, kind) in self._entries.items() if kind == GgufType.ARRAY}
        return {key: values for key, values in read.items() if values is not None}

    @cached_property
    def _entries(self) -> dict[str, tuple[int, GgufType]]:
        """Index and type by key. Keys that differ after a zero byte only look the same here; the first one counts, as in the library."""
        lib = library()
        out: dict[str, tuple[int, GgufType]] = {}
        for i in range(lib.gguf_get_n_kv(self.context)):
            key = lib.gguf_get_key(self.context, i).decode("utf-8", "backslashreplace")
            out.setdefault(key, (i, GgufType(lib.gguf_get_kv_type(self.context, i))))
        return out

    def strings(self, key: str) -> list[bytes] | None:
        """Return the elements of a string array, or None if the key is missing or is something else."""
        lib = library()
        index = lib.gguf_find_key(self.context, key.encode())
        if index < 0 or lib.gguf_get_kv_type(self.context, index) != GgufType.ARRAY:
            return None
        if lib.gguf_get_arr_type(self.context, index) != GgufType.STRING:
            return None
        get, context = lib.gguf_get_arr_str, self.context
        return [get(context, index, i) for i in range(lib.gguf_get_arr_n(context, index))]

    def tensors(self) -> list[TensorInfo]:
        """Return all tensors in file order; raises ModelFileError for a name that cannot be told from another one."""
        lib = library()
        out = []
        seen: set[str] = set()
        for i in range(lib.gguf_get_n_tensors(self.context)):
            raw = lib.gguf_get_tensor_name(self.context, i)
            name = raw.decode("utf-8", "backslashreplace")
            # The library compares whole names, its API hands out those up to the first zero byte.
            if name in seen:
                raise ModelFileError(str(self.path), f"tensor {name!r} is there twice; the file is damaged")
            seen.add(name)
            ne = lib.gguf_get_tensor_ne(self.context, i)
            out.append(
                TensorInfo(
                    name=name,
                    ggml_type=lib.gguf_get_tensor_type(self.context, i),
                    ne=(ne[0], ne[1], ne[2], ne[3]),
                    offset=self.data_offset + lib.gguf_get_tensor_offset(self.context, i),
                    nbytes=lib.gguf_get_tensor_size(self.context, i),
                )
            )
        return out

    def _scalar(self, index: int, kind: GgufType) -> object:
        lib = library()
        if kind == GgufType.STRING:
            return lib.gguf_get_val_str(self.context, index).decode("utf-8", "replace")
        return NUMBER_CTYPES[kind].from_address(lib.gguf_get_val_data(self.context, index)).value

    def _numbers(self, index: int) -> tuple[object, ...] | None:
        lib = library()
        kind = GgufType(lib.gguf_get_arr_type(self.context, index))
        n = lib.gguf_get_arr_n(self.context, index)
        if kind not in NUMBER_CTYPES or n > MAX_SHORT_ARRAY:
            return None
        if n == 0:
            return ()
        return tuple((NUMBER_CTYPES[kind] * n).from_address(lib.gguf_get_arr_data(self.context, index)))


@contextmanager
def open_header(path: Path) -> Iterator[GgufHeader]:
    """Open the header of a GGUF file.

    Raises ModelFileError, naming the file and where one is known the byte, for anything that is no readable GGUF file.
    """
    size = _file_size(path)
    context = _parse(path, size)
    try:
        yield GgufHeader(path, size, context)
    finally:
        library().gguf_free(context)


def _file_size(path: Path) -> int:
    try:
        status = os.stat(path)
    except OSError as error:
        raise ModelFileError(str(path), f"cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise ModelFileError(repr(str(path)), f"is not a usable file name: {error}") from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError(str(path), "is a directory; pass the .gguf file itself, or the first one of a split model")
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(str(path), "is not a regular file; experts are read at random offsets, which needs one")
    return status.st_size


def _read_head(path: Path, nbytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(nbytes)
    except OSError as error:
        raise ModelFileError(str(path), f"cannot be read: {error.strerror}") from error


def _parse(path: Path, size: int) -> int:
    """Return the gguf_context of the file."""
    _check_preamble(path, size)
    lib = library()
    head, reason = b"", ""
    for window in WINDOWS:
        head = _read_head(path, window)
        with ggml_api.captured_log() as lines:
            context = lib.gguf_init_from_buffer(head, len(head), GgufInitParams(True, None))
        if context:
            return int(context)
        reason = _reason(lines)
        if len(head) < window:
            break
    else:
        reason += f" (looked at the first {WINDOWS[-1]} bytes, where a header has to end)"
    raise ModelFileError(str(path), f"the GGUF header is unreadable: {reason}; copy or convert the model again", offset=_fault_offset(head))


def _check_preamble(path: Path, size: int) -> None:
    head = _read_head(path, _PREAMBLE.size)
    if size == 0 or not head:
        raise ModelFileError(str(path), "is empty")
    if head[:4] != b"GGUF":
        raise ModelFileError(str(path), f"is not a GGUF file: it starts with {head[:4]!r} and not with b'GGUF'", offset=0)
    if len(head) < _PREAMBLE.size:
        raise ModelFileError(str(path), f"ends after {len(head)} bytes, inside the GGUF header; copy it again", offset=len(head))
    _, _, n_tensors, n_keys = _PREAMBLE.unpack(head)
    room = min(size, WINDOWS[-1]) - _PREAMBLE.size
    if n_tensors < 0 or n_keys < 0 or n_tensors * _MIN_TENSOR_BYTES + n_keys * _MIN_KEY_BYTES > room:
        raise ModelFileError(
            str(path),
            f"the GGUF header claims {n_tensors} tensors and {n_keys} keys, which cannot fit into {room} bytes; the file is damaged",
            offset=8,
        )


def _reason(lines: list[str]) -> str:
    """Make one printable line of what the library logged; names in it come from the file and may hold anything."""
    texts = [line.split(": ", 1)[-1].strip() for line in lines]
    text = ", ".join(texts) or "no reason given"
    return "".join(c if c.isprintable() else "?" for c in text)[:300]


def _fault_offset(head: bytes) -> int | None:
    """Return the byte up to which the library read before it gave up: parse once more through a callback that looks on."""
    end = reads = 0

    def read(_user: object, output: int, offset: int, nbytes: int) -> int:
        nonlocal end, reads
        reads += 1
        if reads > _MAX_TRACED_READS:
            return 0
        piece = head[offset : offset + nbytes]
        ctypes.memmove(output, piece, len(piece))
        end = max(end, offset + len(piece))
        return len(piece)

    callback = ggml_api.READ_CALLBACK(read)
    with ggml_api.captured_log():
        context = library().gguf_init_from_callback(callback, None, 0, len(head), GgufInitParams(True, None))
    if context:
        library().gguf_free(context)
        return None
    return end if reads <= _MAX_TRACED_READS else None
