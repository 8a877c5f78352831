"""The only module that touches llama_cpp's low level: how its loader is redirected and its callbacks are set.

In: a session's plans (buffer types per tensor, a FILE*, callback addresses). Out: llama.cpp models and contexts made with them. It knows
llama.cpp's calling conventions and no policy. docs/seam.md lists everything here that leans on upstream behaviour.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp.llama_cpp as lib
from llama_cpp._logger import llama_log_callback

#: The ggml_log_level of errors (llama_cpp's own table predates the current numbering and takes warnings for errors).
_LOG_ERROR = 4
#: llama_decode's answer when the abort callback ended the evaluation.
ABORTED = 2

_PATCH_LOCK = threading.Lock()
_plain_load, _plain_init = lib.llama_model_load_from_file, lib.llama_init_from_model


_messages: list[str] = []


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _collect(level: int, text: bytes, _user_data: Any) -> None:
    if level == _LOG_ERROR:
        _messages.append(text.decode(errors="replace").strip())


@contextmanager
def explained() -> Iterator[list[str]]:
    """Collect llama.cpp's error messages instead of printing them; yields the list they go to. Its log is one per process."""
    _messages.clear()
    lib.llama_log_set(_collect, None)
    try:
        yield _messages
    finally:
        lib.llama_log_set(llama_log_callback, None)


def cause(reasons: Sequence[str]) -> str:
    """Return the first of llama.cpp's messages, which names the fault; later ones only pass it on."""
    return reasons[0].removesuffix(".") if reasons else "it gave no reason"


class _BufferOverride(ctypes.Structure):
    """Mirror ``struct llama_model_tensor_buft_override``; the package leaves its field of llama_model_params untyped."""

    _fields_ = [("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p)]


def buffer_overrides(pairs: Sequence[tuple[str, int]]) -> ctypes.Array[_BufferOverride]:
    """Return the null-terminated table that sends tensors matching a pattern to a buffer type; keep it alive while a model loads."""
    table = (_BufferOverride * (len(pairs) + 1))()
    for entry, (pattern, buffer_type) in zip(table, pairs, strict=False):
        entry.pattern = pattern.encode()
        entry.buffer_type = buffer_type
    return table


@contextmanager
def loading_through(load_model: Callable[[Any], Any], init_context: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let the calling thread's ``llama_cpp.Llama`` load its model and make its context through the two functions.

    llama_cpp offers no argument for callbacks or buffer types, but calls these two C functions by their names in this module. Other
    threads, and everything outside the ``with``, keep the originals.
    """
    owner = threading.get_ident()

    def load(path: bytes, params: Any) -> Any:
        return load_model(params) if threading.get_ident() == owner else _plain_load(path, params)

    def init(model: Any, params: Any) -> Any:
        return init_context(model, params) if threading.get_ident() == owner else _plain_init(model, params)

    with _PATCH_LOCK:
        lib.llama_model_load_from_file, lib.llama_init_from_model = load, init
        try:
            yield
        finally:
            lib.llama_model_load_from_file, lib.llama_init_from_model = _plain_load, _plain_init


def load_streamed(params: Any, file_pointer: int, overrides: ctypes.Array[_BufferOverride]) -> Any:
    """Load a model from a FILE*; weights go where ``overrides`` sends them. Returns None if llama.cpp refuses the file."""
    params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    params.tensor_buft_overrides = ctypes.addressof(overrides)
    return lib.llama_model_load_from_file_ptr(ctypes.c_void_p(file_pointer), params)


def load_mapped(params: Any, path: bytes) -> Any:
    """Load a model the plain way, mapped. Repacking is off: it would copy every expert into memory of its own."""
    params.load_mode = lib.LLAMA_LOAD_MODE_MMAP
    params.use_extra_bufts = False
    return _plain_load(path, params)


def init_hooked(model: Any, params: Any, *, on_eval: int, on_abort: int, user_data: int) -> Any:
    """Make a context whose evaluations call ``on_eval`` for every graph node and ask ``on_abort`` whether to stop."""
    params.cb_eval = lib.ggml_backend_sched_eval_callback(on_eval)
    params.cb_eval_user_data = user_data
    params.abort_callback = lib.ggml_abort_callback(on_abort)
    params.abort_callback_data = user_data
    return _plain_init(model, params)


def decode_once(ctx: Any, token: int) -> int:
    """Evaluate one token at the start of the sequence and return llama_decode's status."""
    tokens = (lib.llama_token * 1)(token)
    return int(lib.llama_decode(ctx, lib.llama_batch_get_one(tokens, 1)))


def decode_batch(ctx: Any, batch: Any) -> int:
    """Evaluate a prepared llama_batch and return llama_decode's status."""
    return int(lib.llama_decode(ctx, batch))


def forget_batch(ctx: Any, batch: Any) -> bool:
    """Take a batch's tokens, and any after them, out of the KV cache; False where the model's state cannot be cut back."""
    return bool(lib.llama_memory_seq_rm(lib.llama_get_memory(ctx), -1, batch.pos[0], -1))


def clear_memory(ctx: Any) -> None:
    """Empty the KV cache (and any recurrent state)."""
    lib.llama_memory_clear(lib.llama_get_memory(ctx), True)


def first_token(model: Any) -> int:
    """Return a token every vocabulary has: BOS, or token 0."""
    return max(0, int(lib.llama_vocab_bos(lib.llama_model_get_vocab(model))))


def free_context(ctx: Any) -> None:
    """Free a context that never reached its owner."""
    lib.llama_free(ctx)
