"""Build GGUF headers with libggml's own writer.

In: metadata values and tensor descriptions. Out: the header's bytes, padded to where the tensor data starts, and the offset of each
tensor behind it. It writes no file and holds no tensor data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from moetriage.gguf.ggml_api import (
    DEFAULT_ALIGNMENT,
    MAX_DIMS,
    NUMBER_CTYPES,
    GgmlInitParams,
    GgufType,
    library,
    tensor_bytes,
)


@dataclass(frozen=True)
class Typed:
    """A number of a given GGUF type, or with a sequence an array of that type."""

    kind: GgufType
    value: int | float | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...]


#: A metadata value: int is written as uint32, float as float32; ``Typed`` says otherwise.
Value = str | bool | int | float | list[str] | Typed


def aligned(nbytes: int) -> int:
    """Round a size up to the default alignment of tensor data."""
    return -(-nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


class HeaderWriter:
    """Collects keys and tensors of one file; use as a context manager, which frees the C objects."""

    def __init__(self, max_tensors: int) -> None:
        lib = library()
        self._context = lib.gguf_init_empty()
        # Tensors without data: each takes its bookkeeping only.
        self._tensors = lib.ggml_init(GgmlInitParams((max_tensors + 1) * lib.ggml_tensor_overhead(), None, True))
        self._data_bytes = 0

    def __enter__(self) -> HeaderWriter:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        library().gguf_free(self._context)
        library().ggml_free(self._tensors)

    def set(self, key: str, value: Value) -> None:
        """Set a key; a value of another type than before replaces it."""
        lib, name = library(), key.encode()
        match value:
            case Typed():
                self._set_typed(name, value)
            case str():
                lib.gguf_set_val_str(self._context, name, value.encode())
            case bool():
                lib.gguf_set_val_bool(self._context, name, value)
            case int():
                lib.gguf_set_val_u32(self._context, name, value)
            case float():
                lib.gguf_set_val_f32(self._context, name, value)
            case list():
                texts = (ctypes.c_char_p * len(value))(*(text.encode() for text in value))
                lib.gguf_set_arr_str(self._context, name, texts, len(value))

    def _set_typed(self, name: bytes, typed: Typed) -> None:
        lib = library()
        if isinstance(typed.value, tuple):
            array = (NUMBER_CTYPES[typed.kind] * len(typed.value))(*typed.value)
            lib.gguf_set_arr_data(self._context, name, typed.kind, array, len(typed.value))
        else:
            setter: dict[GgufType, Any] = {GgufType.UINT16: lib.gguf_set_val_u16, GgufType.INT32: lib.gguf_set_val_i32}
            setter[typed.kind](self._context, name, typed.value)

    def copy_keys(self, context: int) -> None:
        """Set every key of an open header (its gguf_context)."""
        library().gguf_set_kv(self._context, context)

    def remove(self, keys: Iterable[str]) -> None:
        """Remove keys; those not there are ignored."""
        for key in keys:
            library().gguf_remove_key(self._context, key.encode())

    def add_tensor(self, name: str, ggml_type: int, ne: tuple[int, ...]) -> int:
        """Add a tensor behind the others and return the offset of its data from the end of the header."""
        lib = library()
        dims = (ctypes.c_int64 * MAX_DIMS)(*ne, *(1,) * (MAX_DIMS - len(ne)))
        tensor = lib.ggml_new_tensor(self._tensors, ggml_type, len(ne), dims)
        lib.ggml_set_name(tensor, name.encode())
        lib.gguf_add_tensor(self._context, tensor)
        offset = self._data_bytes
        self._data_bytes += aligned(tensor_bytes(ggml_type, ne))
        return offset

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data including the padding behind each tensor."""
        return self._data_bytes

    def header(self) -> bytes:
        """Return the header as it stands, padded so that tensor data follows it directly."""
        lib = library()
        buffer = ctypes.create_string_buffer(lib.gguf_get_meta_size(self._context))
        lib.gguf_get_meta_data(self._context, buffer)
        return buffer.raw
