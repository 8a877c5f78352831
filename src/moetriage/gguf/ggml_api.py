"""The few C functions of libggml-base that read and write GGUF files, through ctypes.

In: nothing but the installed llama-cpp-python package, whose library is opened without importing the package (importing it costs a
second and registers back ends). Out: ``library()`` with every prototype set, and small wrappers for what Python needs of them. This
module knows ggml's types and calling conventions; it knows nothing of models, layers or experts.

It is the very library that later loads the model, so a header that is understood here is understood there. Prototypes follow
``ggml/include/gguf.h`` and ``ggml.h`` of llama.cpp; structures stay opaque pointers, so no field offset is assumed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, c_bool, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moetriage.errors import MoetriageError, UsageError

#: Oldest ggml whose gguf_init_from_buffer and log functions behave as we rely on; the package of this version is pinned.
MIN_GGML_VERSION = (0, 25)
TESTED_PACKAGE = "llama-cpp-python==0.3.36"
#: ggml_type values known to every library that passes the version check; asking for a name beyond its table is undefined in C.
N_GGML_TYPES = 43
MAX_DIMS = 4
#: Longest tensor name including the terminating zero.
MAX_NAME = 64
DEFAULT_ALIGNMENT = 32
#: Types of activations and of integers: ggml_quantize_chunk has no case for them and asserts.
NOT_WEIGHTS = frozenset({"q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"})


class GgufType(IntEnum):
    """Type of a metadata value in a GGUF file."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


#: C type of each numeric metadata type. Arrays of bool are one byte an element.
NUMBER_CTYPES: dict[GgufType, Any] = {
    GgufType.UINT8: ctypes.c_uint8,
    GgufType.INT8: ctypes.c_int8,
    GgufType.UINT16: ctypes.c_uint16,
    GgufType.INT16: ctypes.c_int16,
    GgufType.UINT32: ctypes.c_uint32,
    GgufType.INT32: ctypes.c_int32,
    GgufType.FLOAT32: ctypes.c_float,
    GgufType.BOOL: ctypes.c_bool,
    GgufType.UINT64: ctypes.c_uint64,
    GgufType.INT64: ctypes.c_int64,
    GgufType.FLOAT64: ctypes.c_double,
}


class GgufInitParams(ctypes.Structure):
    """Mirror ``struct gguf_init_params``; with a null ``ctx`` no tensor memory is allocated."""

    _fields_ = [("no_alloc", c_bool), ("ctx", c_void_p)]


class GgmlInitParams(ctypes.Structure):
    """Mirror ``struct ggml_init_params``."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


#: size_t (*)(void * userdata, void * output, uint64_t offset, size_t len)
READ_CALLBACK = CFUNCTYPE(c_size_t, c_void_p, c_void_p, c_uint64, c_size_t)
#: void (*)(enum ggml_log_level, const char * text, void * user_data)
LOG_CALLBACK = CFUNCTYPE(None, c_int, c_char_p, c_void_p)

_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_version": (c_char_p, []),
    "ggml_log_get": (None, [POINTER(c_void_p), POINTER(c_void_p)]),
    "ggml_log_set": (None, [c_void_p, c_void_p]),
    "ggml_type_name": (c_char_p, [c_int]),
    "ggml_type_size": (c_size_t, [c_int]),
    "ggml_blck_size": (c_int64, [c_int]),
    "ggml_quantize_requires_imatrix": (c_bool, [c_int]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_init": (c_void_p, [GgmlInitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor": (c_void_p, [c_void_p, c_int, c_int, POINTER(c_int64)]),
    "ggml_set_name": (c_void_p, [c_void_p, c_char_p]),
    "gguf_init_empty": (c_void_p, []),
    "gguf_init_from_buffer": (c_void_p, [c_void_p, c_size_t, GgufInitParams]),
    "gguf_init_from_callback": (c_void_p, [READ_CALLBACK, c_void_p, c_size_t, c_uint64, GgufInitParams]),
    "gguf_free": (None, [c_void_p]),
    "gguf_get_version": (c_uint32, [c_void_p]),
    "gguf_get_alignment": (c_size_t, [c_void_p]),
    "gguf_get_data_offset": (c_size_t, [c_void_p]),
    "gguf_get_n_kv": (c_int64, [c_void_p]),
    "gguf_find_key": (c_int64, [c_void_p, c_char_p]),
    "gguf_get_key": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_kv_type": (c_int, [c_void_p, c_int64]),
    "gguf_get_val_str": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_val_data": (c_void_p, [c_void_p, c_int64]),
    "gguf_get_arr_type": (c_int, [c_void_p, c_int64]),
    "gguf_get_arr_n": (c_size_t, [c_void_p, c_int64]),
    "gguf_get_arr_data": (c_void_p, [c_void_p, c_int64]),
    "gguf_get_arr_str": (c_char_p, [c_void_p, c_int64, c_size_t]),
    "gguf_get_n_tensors": (c_int64, [c_void_p]),
    "gguf_get_tensor_offset": (c_size_t, [c_void_p, c_int64]),
    "gguf_get_tensor_name": (c_char_p, [c_void_p, c_int64]),
    "gguf_get_tensor_ne": (POINTER(c_int64), [c_void_p, c_int64]),
    "gguf_get_tensor_type": (c_int, [c_void_p, c_int64]),
    "gguf_get_tensor_size": (c_size_t, [c_void_p, c_int64]),
    "gguf_remove_key": (c_int64, [c_void_p, c_char_p]),
    "gguf_set_val_u16": (None, [c_void_p, c_char_p, ctypes.c_uint16]),
    "gguf_set_val_u32": (None, [c_void_p, c_char_p, c_uint32]),
    "gguf_set_val_i32": (None, [c_void_p, c_char_p, ctypes.c_int32]),
    "gguf_set_val_f32": (None, [c_void_p, c_char_p, c_float]),
    "gguf_set_val_f64": (None, [c_void_p, c_char_p, c_double]),
    "gguf_set_val_bool": (None, [c_void_p, c_char_p, c_bool]),
    "gguf_set_val_str": (None, [c_void_p, c_char_p, c_char_p]),
    "gguf_set_arr_data": (None, [c_void_p, c_char_p, c_int, c_void_p, c_size_t]),
    "gguf_set_arr_str": (None, [c_void_p, c_char_p, POINTER(c_char_p), c_size_t]),
    "gguf_set_kv": (None, [c_void_p, c_void_p]),
    "gguf_add_tensor": (None, [c_void_p, c_void_p]),
    "gguf_get_meta_size": (c_size_t, [c_void_p]),
    "gguf_get_meta_data": (None, [c_void_p, c_void_p]),
}


def library_path() -> Path:
    """Find libggml-base beside the installed llama_cpp package, without importing that package.

    Raises MoetriageError if the package or the library is missing.
    """
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise MoetriageError(f"llama-cpp-python is not installed, and its libggml-base reads GGUF files: pip install {TESTED_PACKAGE}")
    folder = Path(next(iter(spec.submodule_search_locations))) / "lib"
    names = ("libggml-base.dylib", "libggml-base.so") if sys.platform == "darwin" else ("libggml-base.so",)
    for name in names:
        if (folder / name).exists():
            return folder / name
    raise MoetriageError(f"{folder} has no {names[0]}: this llama-cpp-python was built otherwise; pip install {TESTED_PACKAGE}")


def open_library(path: Path) -> ctypes.CDLL:
    """Open a libggml-base and set every prototype; raises MoetriageError for a file that is no such library or too old a one."""
    try:
        lib = ctypes.CDLL(str(path))
        for name, (restype, argtypes) in _PROTOTYPES.items():
            function = getattr(lib, name)
            function.restype = restype
            function.argtypes = argtypes
    except (OSError, AttributeError) as error:
        raise MoetriageError(f"{path} does not fit moetriage, which needs that of {TESTED_PACKAGE}: {error}") from error
    version = lib.ggml_version().decode()
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < MIN_GGML_VERSION:
        needed = ".".join(map(str, MIN_GGML_VERSION))
        raise MoetriageError(f"{path} is ggml {version} and moetriage needs at least {needed}: pip install {TESTED_PACKAGE}")
    return lib


@functools.cache
def library() -> ctypes.CDLL:
    """Return the process's libggml-base; raises MoetriageError if it is missing or does not fit."""
    return open_library(library_path())


_LOG_LEVEL_ERROR = 4
_log_lock = threading.Lock()
_log_lines: list[str] = []


def _collect_log(level: int, text: bytes | None, _user: object) -> None:
    # Other threads may be computing meanwhile; what they say is no error.
    if text is not None and level == _LOG_LEVEL_ERROR:
        _log_lines.append(text.decode("utf-8", "replace"))


# Kept alive for the life of the process: another thread may still be inside it when the previous callback is put back.
_collect_callback = LOG_CALLBACK(_collect_log)


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect ggml's error messages of the block in place of printing them; the previous log callback is put back after it."""
    lib = library()
    with _log_lock:
        callback, user = c_void_p(), c_void_p()
        lib.ggml_log_get(ctypes.byref(callback), ctypes.byref(user))
        _log_lines.clear()
        lib.ggml_log_set(ctypes.cast(_collect_callback, c_void_p), None)
        lines: list[str] = []
        try:
            yield lines
        finally:
            lib.ggml_log_set(callback, user)
            lines.extend(_log_lines)


@functools.cache
def type_names() -> dict[int, str]:
    """Return the names of the usable tensor types by number; types whose support was removed are left out."""
    lib = library()
    return {i: lib.ggml_type_name(i).decode() for i in range(N_GGML_TYPES) if lib.ggml_blck_size(i) > 0 and lib.ggml_type_size(i) > 0}


def type_id(name: str) -> int:
    """Return the number of the tensor type called ``name`` (case does not matter); raises UsageError naming the known ones."""
    wanted = name.lower()
    for number, known in type_names().items():
        if known.lower() == wanted:
            return number
    raise UsageError(f"tensor type {name!r} is unknown; the library has: {', '.join(type_names().values())}")


def block_elements(ggml_type: int) -> int:
    """Return how many elements one block of the type holds."""
    return int(library().ggml_blck_size(ggml_type))


def block_bytes(ggml_type: int) -> int:
    """Return how many bytes one block of the type takes."""
    return int(library().ggml_type_size(ggml_type))


def tensor_bytes(ggml_type: int, ne: tuple[int, ...]) -> int:
    """Return the size in bytes of a contiguous tensor; the first dimension must be a multiple of the type's block."""
    elements = 1
    for n in ne:
        elements *= n
    return elements // block_elements(ggml_type) * block_bytes(ggml_type)


def fitting_type(name: str, row_elements: int) -> int:
    """Return the number of the first of ``name``, q8_0 and f16 whose blocks divide a row. Raises UsageError for an unknown name."""
    for candidate in (name, "q8_0", "f16"):
        number = type_id(candidate)
        if row_elements % block_elements(number) == 0:
            return number
    raise AssertionError("one element is a block of f16")


def check_weight_type(ggml_type: int) -> None:
    """Raise UsageError for a type that cannot be made from weights alone (it needs an importance matrix, or is no weight type)."""
    name = type_names()[ggml_type]
    if library().ggml_quantize_requires_imatrix(ggml_type) or name in NOT_WEIGHTS:
        raise UsageError(f"tensor type {name} cannot be made from weights alone; use for example q4_0, q4_K, q6_K, q8_0 or f16")


def quantize(values: npt.NDArray[np.float32], ggml_type: int) -> npt.NDArray[np.uint8]:
    """Quantise ``values`` [rows, row elements] f32 and return the blocks' bytes.

    Raises UsageError as ``check_weight_type`` does.
    """
    check_weight_type(ggml_type)
    source = np.ascontiguousarray(values, dtype=np.float32)
    rows, row_elements = source.shape
    out = np.empty(tensor_bytes(ggml_type, (row_elements, rows)), dtype=np.uint8)
    library().ggml_quantize_chunk(ggml_type, source.ctypes.data, out.ctypes.data, 0, rows, row_elements, None)
    return out
